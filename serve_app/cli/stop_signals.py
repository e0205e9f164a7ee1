"""The signals that end `serve-app up`: the first in order, the second at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP, counted; the handlers do nothing else.

    Use it as a context manager inside a running event loop.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._received: list[signal.Signals] = []
        self._events = (asyncio.Event(), asyncio.Event())

    def __repr__(self) -> str:
        return f"<StopSignals {[received.name for received in self._received]}>"

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in self.SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *exc: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self.SIGNALS:
            loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._received.append(number)
        for event in self._events[: len(self._received)]:
            event.set()

    async def first(self) -> None:
        """Return once a signal came: stop in order."""
        await self._events[0].wait()

    async def second(self) -> None:
        """Return once another came: stop at once."""
        await self._events[1].wait()


class StopAsked(Exception):
    """A signal came before or while the models were served."""


async def unless_stopped(work: Awaitable[T], signals: StopSignals) -> T:
    """Await `work`; when a signal comes first, cancel it and raise `StopAsked`."""
    working = asyncio.ensure_future(work)
    asked = asyncio.ensure_future(signals.first())
    try:
        await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise StopAsked
        return working.result()
    finally:
        asked.cancel()
        working.cancel()
        await asyncio.wait({working, asked})
