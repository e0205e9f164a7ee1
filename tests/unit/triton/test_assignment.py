"""The pool's decisions under any order of events: nothing leaks, nobody is forgotten, nobody overtakes."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.errors import PoolTimeout
from serve_app.triton.assignment import Assignment
from serve_app.triton.channel import Channel

MAX_CALLS = 2


class StubChannel(Channel):
    """The predicates of a channel, without grpc."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.num_calls = 0
        self._address = "stub"

    def is_available(self, generation: int) -> bool:
        return self.generation == generation


def channels(count: int, *, generation: int = 0) -> list[Channel]:
    return [cast(Channel, StubChannel(generation)) for _ in range(count)]


class Model:
    """Callers as a test sees them: who waits, who holds what, and the order of arrival."""

    def __init__(self, num_channels: int) -> None:
        self.assignment = Assignment(MAX_CALLS)
        self.assignment.replace_channels(channels(num_channels))
        self.num_channels = num_channels
        self.waiting: list[asyncio.Future[Channel]] = []
        self.held: list[Channel] = []
        self.closed: list[Channel] = []

    def apply(self, event: str, index: int) -> None:
        if event == "arrive":
            taken = self.assignment.take()
            if isinstance(taken, Channel):
                self.held.append(taken)
            else:
                self.waiting.append(taken)
        elif event == "finish" and self.held:
            self.closed += self.assignment.give_back(self.held.pop(index % len(self.held)))
        elif event == "cancel" and self.waiting:
            place = self.waiting.pop(index % len(self.waiting))
            if index % 2:  # before the hand-over; otherwise perhaps in its tick
                place.cancel()
            self.closed += self.assignment.leave(place)
        elif event == "expire" and self.waiting:
            place = self.waiting[index % len(self.waiting)]
            self.assignment.expire(place, PoolTimeout("waiting", 1.0))
        elif event == "renew":
            generation = self.assignment.generation + 1
            self.closed += self.assignment.replace_channels(channels(self.num_channels, generation=generation))
        elif event == "wake":
            self.wake()

    def wake(self) -> None:
        """Let every caller whose wait has ended notice it."""
        for place in [place for place in self.waiting if place.done()]:
            self.waiting.remove(place)
            if place.exception() is None:
                self.held.append(place.result())

    def check(self) -> None:
        assignment = self.assignment
        handed = [place.result() for place in self.waiting if place.done() and place.exception() is None]
        assert assignment.num_active == len(self.held) + len(handed)
        assert sum(channel.num_calls for channel in assignment.channels) == assignment.num_active
        assert all(0 <= channel.num_calls <= MAX_CALLS for channel in assignment.channels)
        assert all(channel.num_calls == 0 for channel in self.closed)
        assert not set(self.closed) & set(assignment.channels)
        still_waiting = [not place.done() for place in self.waiting]
        assert assignment.num_waiting == sum(still_waiting)
        served = [not waits for waits, place in zip(still_waiting, self.waiting, strict=True) if not is_failed(place)]
        assert served == sorted(served, reverse=True), "a later caller was served before an earlier one"
        current = [channel for channel in assignment.channels if channel.generation == assignment.generation]
        assert len(current) == self.num_channels
        assert not assignment.num_waiting or all(channel.num_calls == MAX_CALLS for channel in current)


def is_failed(place: asyncio.Future[Channel]) -> bool:
    return place.done() and place.exception() is not None


EVENTS = st.tuples(
    st.sampled_from(["arrive", "arrive", "finish", "cancel", "expire", "renew", "wake"]), st.integers(0, 7)
)


@settings(deadline=None)
@given(num_channels=st.integers(1, 3), events=st.lists(EVENTS, max_size=60))
def test_any_order_of_events(num_channels: int, events: list[tuple[str, int]]) -> None:
    """After every event the counts are true, free channels and waiting callers do not coexist, and order holds.

    And when all have gone, nothing is left.
    """

    async def run() -> None:
        model = Model(num_channels)
        for event, index in events:
            model.apply(event, index)
            model.check()
        model.wake()
        while model.held or model.waiting:
            model.apply("finish" if model.held else "cancel", 0)
            model.wake()
            model.check()
        assert repr(model.assignment) == (f"Requests: 0 active, 0 queued | Channels: 0 active, {num_channels} idle")

    asyncio.run(run())


async def test_expire_all_gives_each_caller_its_own_error() -> None:
    """Every waiting caller gets a copy of the error, so that no two share a traceback."""
    assignment = Assignment(1)
    assignment.replace_channels(channels(1))
    assignment.take()
    places = [assignment.take() for _ in range(2)]
    assignment.expire_all(PoolTimeout("waiting", 1.0))
    errors = []
    for place in places:
        assert isinstance(place, asyncio.Future)
        with pytest.raises(PoolTimeout) as caught:
            await place
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert assignment.num_waiting == 0
