"""The seam for Ray Serve's `@serve.batch`: what gathers a window's requests before they reach the dispatcher."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from typing import Protocol

from serve_app.clock import Deadline
from serve_app.protocol.messages import InferRequest, InferResponse


class PendingState(enum.Enum):
    """Where a request is that a collector was given."""

    COLLECTING = "collecting"
    DISPATCHED = "dispatched"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"


class Pending:
    """A checked request in a collector's window.

    Attributes:
        request: Borrowed until the caller has its answer.
        num_rows: Rows in it; what a window counts.
        deadline: When it is no longer wanted.
        state: Set by the runner.
    """

    __slots__ = ("_future", "deadline", "num_rows", "request", "state")

    def __init__(self, request: InferRequest, num_rows: int, deadline: Deadline) -> None:
        self.request = request
        self.num_rows = num_rows
        self.deadline = deadline
        self.state = PendingState.COLLECTING
        self._future: asyncio.Future[InferResponse] | None = None

    def dispatched(self, future: asyncio.Future[InferResponse]) -> None:
        """Note the future that will bring the answer."""
        self._future = future
        if self.state is PendingState.COLLECTING:
            self.state = PendingState.DISPATCHED

    def withdraw(self, state: PendingState = PendingState.WITHDRAWN) -> None:
        """Give the request up, wherever it is: in the window, in the queue or in flight."""
        self.state = state
        if self._future is not None:
            self._future.cancel()

    def __repr__(self) -> str:
        return f"<Pending {self.request.model_name} {self.num_rows} rows {self.state.value}>"


class Collector(Protocol):
    """What gathers a window's requests: the seam for Ray Serve's `@serve.batch`.

    A collector awaits no model. When its window ends it calls the `Dispatch` it was made with and hands each item's
    future to that item's caller at once, so that nobody waits for the answers of others.
    """

    async def collect(self, item: Pending) -> asyncio.Future[InferResponse]:
        """Wait for the end of the window that `item` falls into.

        Returns:
            The item's future out of what `Dispatch` returned; the caller awaits it.
        """
        ...

    def reconfigure(self, *, max_batch_rows: int, window_s: float) -> None:
        """Change the rows at which a window closes early, and its length in seconds, from the next window on."""
        ...


Dispatch = Callable[[Sequence[Pending]], list[asyncio.Future[InferResponse]]]
"""Queues a window's items; one future for each, in order. Never raises: an item that is refused has its error in its
future, and one whose caller has left has a cancelled future."""
