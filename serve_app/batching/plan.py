"""Which rows go into the next ModelInfer: a pure function of the queue and the bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from serve_app.protocol.messages import ModelSpec
from serve_app.settings import BatchingMode, BatchingSettings

MAX_PASSED_OVER = 16
"""How many requests that do not fit are looked past for smaller ones; bounds the work per batch."""

UNMERGED_PERMITS = 32
"""Permits per endpoint where requests are not merged here: enough for Triton's own scheduler to work with."""


class Waiting(Protocol):
    """What the planner sees of a waiting request."""

    @property
    def num_rows(self) -> int:
        """Rows of the whole request."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of its input tensors."""
        ...

    @property
    def next_row(self) -> int:
        """The first row that no batch has taken yet; above 0 once the request has been cut."""
        ...

    def bytes_between(self, start: int, stop: int) -> int:
        """Bytes of rows `start` to `stop`."""
        ...


W = TypeVar("W", bound=Waiting)


@dataclass(slots=True, eq=False)
class Slice(Generic[W]):
    """Rows `start` to `stop` of one request, and their bytes."""

    item: W
    start: int
    stop: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of one ModelInfer.

    Attributes:
        max_rows: Most rows.
        max_bytes: Most bytes of input tensors, unless it is a single row.
        can_merge: Whether several requests may share it.
        can_cut: Whether a request that is larger may be sent in parts.
    """

    max_rows: int
    max_bytes: int
    can_merge: bool = True
    can_cut: bool = True


def batch_limits_of(spec: ModelSpec, batching: BatchingSettings) -> BatchLimits:
    """The bounds in force for a model: the settings', never above the model's own `max_batch_size`."""
    max_rows = max(spec.max_batch_size, 1)
    if batching.max_batch_rows is not None:
        max_rows = min(max_rows, batching.max_batch_rows)
    can_merge = spec.can_merge and batching.mode is not BatchingMode.OFF
    return BatchLimits(max_rows, batching.max_batch_bytes, can_merge, can_cut=spec.can_merge)


def permits_of(spec: ModelSpec, batching: BatchingSettings) -> int:
    """ModelInfer calls that may be under way at once for each endpoint.

    The settings' number; else one more than the model's instances, so that the next batch is at hand when an
    instance gets free, and `UNMERGED_PERMITS` where requests are not merged.
    """
    if batching.max_batches_in_flight is not None:
        return batching.max_batches_in_flight
    if spec.can_merge and batching.mode is not BatchingMode.OFF:
        return spec.num_instances + 1
    return max(UNMERGED_PERMITS, spec.num_instances + 1)


def plan_batch(queue: Iterable[W], limits: BatchLimits) -> list[Slice[W]]:
    """The next batch, first come first served.

    A request that fits a batch is never cut: Triton would run it whole, so its rows stay together. One that is too
    large by itself gives as many rows as there is room for, and the rest stays at the head of the queue for the next
    batches, which may be under way at the same time. A request that does not fit the room left is passed over for
    smaller ones behind it (at most `MAX_PASSED_OVER` are): nobody is sent later for that than if the batch had been
    closed there, because all that would have gone before still goes before.

    Args:
        queue: Waiting requests of one signature, oldest first; looked at only as far as needed, not changed.
        limits: Bounds of the batch. A request without rows counts as one.

    Returns:
        At most one slice of each request; at least one slice if `queue` is not empty.
    """
    slices: list[Slice[W]] = []
    rows_left, bytes_left = limits.max_rows, limits.max_bytes
    num_passed_over = 0
    for item in queue:
        start, num_rows, size_bytes = item.next_row, item.num_rows, item.size_bytes
        is_whole = start == 0 and num_rows <= limits.max_rows and size_bytes <= limits.max_bytes
        if is_whole or not limits.can_cut:
            stop = num_rows
            has_room = not slices or (num_rows <= rows_left and size_bytes <= bytes_left)
        else:
            stop = _last_row_that_fits(item, rows_left, bytes_left)
            has_room = stop > start
            if not slices and not has_room:
                stop, has_room = start + 1, True  # one row above `max_bytes` goes alone
            size_bytes = item.bytes_between(start, stop) if has_room else 0
        if not has_room:
            num_passed_over += 1
            if num_passed_over > MAX_PASSED_OVER:
                break
            continue
        slices.append(Slice(item, start, stop, size_bytes))
        rows_left -= (stop - start) or 1
        bytes_left -= size_bytes
        if rows_left <= 0 or not limits.can_merge:
            break
    return slices


def _last_row_that_fits(item: Waiting, max_rows: int, max_bytes: int) -> int:
    """The largest `stop` such that rows `next_row` to `stop` are within both bounds."""
    start = item.next_row
    low, high = start, min(start + max_rows, item.num_rows)
    if item.bytes_between(start, high) <= max_bytes:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if item.bytes_between(start, middle) <= max_bytes:
            low = middle
        else:
            high = middle - 1
    return low
