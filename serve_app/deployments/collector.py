"""`@serve.batch` as the runner's collector: it gathers a window's requests and hands them on, waiting for nothing.

The batch function returns at once with one future for each request. So a batch of Ray Serve is never "under way":
no caller waits for the answers to its window-mates, a cancelled caller withdraws its own request only, and which
rows share a ModelInfer is decided by the dispatcher when it holds a permit, not by the window.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve

from serve_app.batching.window import Dispatch, Pending
from serve_app.protocol.messages import InferResponse


class ServeBatchCollector:
    """One `@serve.batch` queue, for one model.

    Serve counts calls, not rows: its own `batch_size_fn` looks at the whole window again for every request in it. So
    a window ends early when it holds as many requests as a batch may hold rows; the dispatcher counts rows. A request
    that fills a batch alone does not come here at all.

    Args:
        dispatch: The runner's; called with what a window has gathered.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        async def collect_window(items: list[Pending]) -> list[list[asyncio.Future[InferResponse]]]:
            # In lists, so that nobody between here and the caller can take a future for something to await.
            return [[future] for future in dispatch(items)]

        # A queue belongs to the decorated function, so each model gets a function of its own.
        self._collect_window: Any = serve.batch(max_batch_size=1, batch_wait_timeout_s=0.0, max_concurrent_batches=1)(
            collect_window
        )

    async def collect(self, item: Pending) -> asyncio.Future[InferResponse]:
        """Wait for the end of the window that `item` falls into; its own future comes back."""
        future: asyncio.Future[InferResponse]
        (future,) = await self._collect_window(item)
        return future

    def reconfigure(self, *, max_batch_rows: int, window_s: float) -> None:
        """Change the window from the next one on."""
        self._collect_window.set_max_batch_size(max_batch_rows)
        self._collect_window.set_batch_wait_timeout_s(window_s)
