"""Decoding of JSON that takes long, beside the event loop: few at a time, and ended when nobody waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from serve_app.errors import RequestCancelled

T = TypeVar("T")

# Python runs one thread at a time: more of them would only hold more memory.
_MAX_AT_ONCE = 2


class LargeJsonDecoder:
    """Threads for decoding, bounded in number; who finds none free waits.

    Args:
        max_at_once: How many decode at the same time.
    """

    def __init__(self, *, max_at_once: int = _MAX_AT_ONCE) -> None:
        self._slots = asyncio.Semaphore(max_at_once)
        self._num_running = self._num_waiting = 0

    async def run(self, decode: Callable[..., T]) -> T:
        """Call `decode` in a thread.

        Args:
            decode: Gets an argument `on_piece`, a function to call now and then: that lets the event loop run, and
                ends the work when the caller has gone.

        Raises:
            ServeAppError: What `decode` raises.
        """
        is_left = threading.Event()

        def on_piece() -> None:
            if is_left.is_set():
                raise RequestCancelled("decoding of JSON")
            time.sleep(0)  # gives the interpreter away at once, if anybody wants it

        self._num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        self._num_running += 1
        try:
            return await asyncio.to_thread(decode, on_piece=on_piece)
        finally:
            is_left.set()
            self._num_running -= 1
            self._slots.release()

    def statistics(self) -> dict[str, int]:
        """How many decode now, and how many wait for that."""
        return {"running": self._num_running, "waiting": self._num_waiting}

    def __repr__(self) -> str:
        return f"<LargeJsonDecoder {self._num_running} running, {self._num_waiting} waiting>"
