"""The channels of one pool: made, connected, renewed, asked and closed together."""

from __future__ import annotations

import asyncio

from serve_app.endpoint import Endpoint
from serve_app.errors import ServeAppError
from serve_app.settings import ChannelSettings
from serve_app.triton.assignment import Assignment
from serve_app.triton.channel import Channel
from serve_app.triton.tls import CertificateFiles


class ChannelSet:
    """The channels to one server, and who has which of them.

    Args:
        endpoint: The server.
        settings: How many channels, how many calls on each, and how each connects.
        files: Certificates for TLS, as they are when a channel is made; read from the settings' files when `None`.

    Attributes:
        endpoint: The server; channels made later are to another one when it is replaced.
        assignment: Who has which channel, and who waits for one.
    """

    def __init__(self, endpoint: Endpoint, settings: ChannelSettings, files: CertificateFiles | None) -> None:
        self.endpoint = endpoint
        self._settings, self._files = settings, files
        self.assignment = Assignment(settings.max_calls_per_channel)
        self._closing: set[asyncio.Task[None]] = set()

    def restart(self) -> None:
        """Forget everything: the loop in which it was has ended."""
        self.assignment = Assignment(self._settings.max_calls_per_channel)
        self._closing.clear()

    def renew(self, generation: int) -> None:
        """Make new channels, which connect when first used; old ones are closed when they are idle."""
        channels = [self._new_channel(generation) for _ in range(self._settings.num_channels)]
        self.close_all(self.assignment.replace_channels(channels))

    def _new_channel(self, generation: int) -> Channel:
        return Channel(
            self.endpoint.address,
            self._settings,
            generation=generation,
            certificates=None if self._files is None else self._files.certificates,
            secret=self.endpoint.secret,
        )

    async def connect(self, *, timeout_s: float, wait_for_ready: bool) -> None:
        """Connect every channel: one first, so that errors surface early, then the others together.

        Raises:
            EndpointUnavailable: A channel could not be connected, or the server is not live.
        """
        first, *others = self.assignment.channels
        await first.ping(timeout_s=timeout_s, wait_for_ready=wait_for_ready)
        pings = [channel.ping(timeout_s=timeout_s, wait_for_ready=wait_for_ready) for channel in others]
        for result in await asyncio.gather(*pings, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def ask_apart(self, *, timeout_s: float) -> None:
        """Ask the server whether it is alive, over a connection of its own.

        Raises:
            EndpointUnavailable: It is not, or there was no answer within the budget.
        """
        channel = self._new_channel(self.assignment.generation)
        try:
            await channel.ping(timeout_s=timeout_s)
        finally:
            await asyncio.shield(channel.aclose())

    def abandon_calls(self, error: ServeAppError) -> None:
        """End every call that may be sent again elsewhere with a copy of `error`."""
        for channel in self.assignment.channels:
            channel.abandon_calls(error)

    def close_all(self, channels: list[Channel]) -> None:
        """Close channels that nobody has any more, in the background."""
        for channel in channels:
            task = asyncio.ensure_future(channel.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close every channel; calls under way end with `EndpointUnavailable`."""
        channels = self.assignment.remove_channels()
        await asyncio.gather(*(channel.aclose() for channel in channels), *self._closing, return_exceptions=True)
