"""A collector in plain asyncio, whose window ends when the test says so."""

from __future__ import annotations

import asyncio

from serve_app.batching.window import Dispatch, Pending
from serve_app.protocol.messages import InferResponse


class WindowCollector:
    """Gathers requests until `end_window`, or until the window is full; with a window of 0 s, until the next turn.

    Attributes:
        windows: How many requests each window had.
        max_batch_rows: As last configured.
        window_s: As last configured.
        is_stuck: Whether windows never end.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._items: list[tuple[Pending, asyncio.Future[asyncio.Future[InferResponse]]]] = []
        self.windows: list[int] = []
        self.max_batch_rows = 1
        self.window_s = 0.0
        self.is_stuck = False

    async def collect(self, item: Pending) -> asyncio.Future[InferResponse]:
        """Wait for the end of the window."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[asyncio.Future[InferResponse]] = loop.create_future()
        self._items.append((item, waiter))
        if len(self._items) == 1 and self.window_s == 0.0:
            loop.call_soon(self.end_window)
        if len(self._items) >= self.max_batch_rows:
            self.end_window()
        return await waiter

    def reconfigure(self, *, max_batch_rows: int, window_s: float) -> None:
        """Note the bounds."""
        self.max_batch_rows, self.window_s = max_batch_rows, window_s

    def end_window(self) -> None:
        """Dispatch what has been gathered and hand each caller its own future, as `@serve.batch` does."""
        if self.is_stuck or not self._items:
            return
        items, self._items = self._items, []
        self.windows.append(len(items))
        futures = self._dispatch([item for item, _ in items])
        for (_, waiter), future in zip(items, futures, strict=True):
            if not waiter.done():
                waiter.set_result(future)
