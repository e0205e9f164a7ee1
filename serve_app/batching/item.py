"""One caller's request on its way through the dispatcher, and the batches it is in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence

from serve_app.batching.plan import Slice
from serve_app.batching.split import RowSlicer
from serve_app.clock import Deadline
from serve_app.protocol.messages import InferRequest, InferResponse


class Item(asyncio.Future[InferResponse]):
    """A caller's request, which is also the future that the caller awaits.

    One object and not two, for thousands of them are made every second; cancelling it withdraws the request in the
    same instant, with no callback to wait for.

    Args:
        request: Borrowed until the future is done.
        num_rows: Rows of the request.
        size_bytes: Bytes of its input tensors.
        deadline: When it is no longer wanted.
        signature: What must be equal for it to share a batch.
        number: Order of arrival, unique in one dispatcher.
        priority: Lower goes first.
        withdraw: Called once, with the item, when the caller cancels it.
        loop: The running loop.

    Attributes:
        next_row: The first row that no batch has taken yet.
        waiting_bytes: Bytes of the rows that no batch has taken yet.
        batches: Batches that carry rows of it and have not answered.
        parts: Answers to the parts of a request that was cut, by first row.
    """

    __slots__ = (
        "_slicer",
        "_withdraw",
        "batches",
        "deadline",
        "next_row",
        "num_rows",
        "number",
        "parts",
        "priority",
        "request",
        "signature",
        "size_bytes",
        "waiting_bytes",
    )

    def __init__(
        self,
        request: InferRequest,
        *,
        num_rows: int,
        size_bytes: int,
        deadline: Deadline,
        signature: Hashable,
        number: int,
        priority: int,
        withdraw: Callable[[Item], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(loop=loop)
        self.request = request
        self.num_rows = num_rows
        self.size_bytes = self.waiting_bytes = size_bytes
        self.deadline = deadline
        self.signature = signature
        self.number = number
        self.priority = priority
        self.next_row = 0
        self.batches: list[Batch] = []
        self.parts: dict[int, InferResponse] | None = None
        self._slicer: RowSlicer | None = None
        self._withdraw = withdraw

    def cancel(self, msg: object | None = None) -> bool:
        """Give the request up: out of the queue, or out of its batches, whose other callers are unharmed."""
        if not super().cancel(msg=msg):
            return False
        self._withdraw(self)
        return True

    def bytes_between(self, start: int, stop: int) -> int:
        """Bytes of input tensors in rows `start` to `stop`.

        Raises:
            TensorShapeMismatch: The data does not fill its shape.
        """
        return self._row_slicer().bytes_between(start, stop)

    def request_between(self, start: int, stop: int) -> InferRequest:
        """The request with rows `start` to `stop` only: itself when that is all of them."""
        if start == 0 and stop == self.num_rows:
            return self.request
        return self._row_slicer().slice(start, stop)

    def __repr__(self) -> str:
        state = "done" if self.done() else f"{self.next_row} sent in {len(self.batches)} batches"
        return f"<Item {self.number} {self.request.model_name} {self.num_rows} rows, {state}>"

    def _row_slicer(self) -> RowSlicer:
        if self._slicer is None:
            self._slicer = RowSlicer(self.request)
        return self._slicer


class Batch:
    """Rows of one or more requests that share a permit.

    Attributes:
        slices: What it was made of when it was closed.
        num_rows: Rows in it.
        num_wanted: How many of its items still wait for its answer; at 0 its call is cancelled.
        started_at: When it was closed, on the dispatcher's clock.
        was_pressed: Whether more was waiting then.
        has_failed: Whether a request in it got an error instead of an answer.
        task: What sends it; set as soon as it is started.
    """

    __slots__ = ("has_failed", "num_rows", "num_wanted", "slices", "started_at", "task", "was_pressed")

    def __init__(self, slices: Sequence[Slice[Item]], *, started_at: float = 0.0, was_pressed: bool = False) -> None:
        self.slices = slices
        self.started_at = started_at
        self.was_pressed = was_pressed
        self.has_failed = False
        self.num_rows = sum([part.stop - part.start for part in slices])
        self.num_wanted = len(slices)
        self.task: asyncio.Task[None] | None = None
        for part in slices:
            part.item.batches.append(self)

    def release(self, item: Item, *, may_cancel: bool) -> None:
        """Note that `item` no longer waits for this batch.

        Args:
            item: One of its items.
            may_cancel: Whether the call is cancelled when nobody is left; not when the batch itself lets go.
        """
        item.batches.remove(self)
        self.num_wanted -= 1
        if may_cancel and self.num_wanted == 0 and self.task is not None:
            self.task.cancel()
