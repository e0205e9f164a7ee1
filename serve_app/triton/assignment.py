"""Which caller has which channel, and who waits for one: every decision of a pool, with no I/O in it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from serve_app.errors import Overloaded, ServeAppError
from serve_app.triton.channel import Channel

MAX_WAITING = 65536
"""Callers that may wait for a channel of one pool; the bounds that matter are the batching queues' in front of it."""


class Assignment:
    """Channels, and callers in order of arrival.

    The mutable state is `channels` (with `num_calls` on each) and `_waiting`. It changes only in the synchronous
    functions here: `take` on arrival, `give_back` when a call ends in any way, `leave` and `expire` when a caller stops
    waiting. Each of them that frees something ends in `_decide`, which hands free channels to waiting callers and
    returns the channels that the pool is to close.

    Args:
        max_calls_per_channel: Calls that one channel carries at once.
    """

    def __init__(self, max_calls_per_channel: int) -> None:
        self.channels: list[Channel] = []
        self.generation = 0
        self.num_active = 0
        self._max_calls = max_calls_per_channel
        self._waiting: OrderedDict[asyncio.Future[Channel], None] = OrderedDict()
        self._has_expired = False

    @property
    def num_waiting(self) -> int:
        """Callers without a channel."""
        return len(self._waiting)

    def is_full(self) -> bool:
        """Whether the next caller would have to wait."""
        return bool(self._waiting) or self._find_channel() is None

    # --- channels -------------------------------------------------------------------------------------------

    def replace_channels(self, channels: Sequence[Channel]) -> list[Channel]:
        """Take new channels into use, of a newer generation than all before; returns old ones to close now.

        Old channels that carry calls take no more of them, and are returned by `give_back` when they are idle.
        """
        self.generation = channels[0].generation
        self._has_expired = bool(self.channels)
        self.channels.extend(channels)
        return self._decide()

    def remove_channels(self) -> list[Channel]:
        """Forget every channel; returns them. Callers still hold theirs and give them back later."""
        channels, self.channels = self.channels, []
        return channels

    # --- callers --------------------------------------------------------------------------------------------

    def take(self) -> Channel | asyncio.Future[Channel]:
        """On arrival: a channel, already counted as held, or a place in the queue.

        A place is to be awaited, and `leave` called with it if that ends in any error.

        Raises:
            Overloaded: `MAX_WAITING` callers wait already.
        """
        if not self._waiting and (channel := self._find_channel()) is not None:
            self._hold(channel)
            return channel
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded("channels to Triton", f"{MAX_WAITING} callers wait already")
        place: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self._waiting[place] = None
        return place

    def give_back(self, channel: Channel) -> list[Channel]:
        """When a call ends, however it ended."""
        channel.num_calls -= 1
        self.num_active -= 1
        return self._decide() if self._waiting or self._has_expired else []

    def leave(self, place: asyncio.Future[Channel]) -> list[Channel]:
        """When a caller gives its place up, be it in the very tick in which it was handed a channel."""
        if place in self._waiting:
            del self._waiting[place]
        elif not place.cancelled() and place.exception() is None:
            return self.give_back(place.result())
        return []

    def expire(self, place: asyncio.Future[Channel], error: ServeAppError) -> bool:
        """End one caller's wait with an error; false when it does not wait any more."""
        if place.done() or place not in self._waiting:
            return False
        del self._waiting[place]
        place.set_exception(error)
        return True

    def expire_all(self, error: ServeAppError) -> None:
        """End every caller's wait with a copy of `error`; calls that hold a channel go on."""
        while self._waiting:
            place, _ = self._waiting.popitem(last=False)
            if not place.done():
                place.set_exception(type(error)(*error.args))

    # --- the decision ---------------------------------------------------------------------------------------

    def _decide(self) -> list[Channel]:
        """Hand free channels to waiting callers, first come first served; returns the channels to be closed."""
        while self._waiting and (channel := self._find_channel()) is not None:
            place, _ = self._waiting.popitem(last=False)
            if not place.done():
                self._hold(channel)
                place.set_result(channel)
        if not self._has_expired:
            return []
        kept: list[Channel] = []
        closing: list[Channel] = []
        for channel in self.channels:
            is_surplus = channel.has_expired(self.generation) and channel.is_idle()
            (closing if is_surplus else kept).append(channel)
        self.channels = kept
        self._has_expired = any(channel.has_expired(self.generation) for channel in kept)
        return closing

    def _find_channel(self) -> Channel | None:
        """The least busy channel that can take a call."""
        best: Channel | None = None
        for channel in self.channels:
            if channel.can_handle_request(self._max_calls, self.generation):
                if channel.num_calls == 0:
                    return channel
                if best is None or channel.num_calls < best.num_calls:
                    best = channel
        return best

    def _hold(self, channel: Channel) -> None:
        channel.num_calls += 1
        self.num_active += 1

    def __repr__(self) -> str:
        num_idle = sum(channel.is_idle() for channel in self.channels)
        return (
            f"Requests: {self.num_active} active, {self.num_waiting} queued | "
            f"Channels: {len(self.channels) - num_idle} active, {num_idle} idle"
        )
