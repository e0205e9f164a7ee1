"""Which rows the next batch takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.batching.plan import MAX_PASSED_OVER, BatchLimits, Slice, batch_limits_of, permits_of, plan_batch
from serve_app.settings import BatchingMode, BatchingSettings
from tests.support.identity_model import spec_of


@dataclass(eq=False)
class Rows:
    """A waiting request; `row_bytes` of each of its rows."""

    row_bytes: list[int]
    next_row: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.row_bytes)

    @property
    def size_bytes(self) -> int:
        return sum(self.row_bytes)

    def bytes_between(self, start: int, stop: int) -> int:
        return sum(self.row_bytes[start:stop])


def rows(*counts: int) -> list[Rows]:
    return [Rows([1] * count) for count in counts]


def sent(queue: list[Rows], limits: BatchLimits) -> list[list[tuple[int, int]]]:
    """All batches until the queue is empty, as `(index of the request, rows of it)`."""
    waiting, batches = list(queue), []
    while waiting:
        batch = plan_batch(waiting, limits)
        assert batch, "no progress"
        for part in batch:
            assert part.start == part.item.next_row
            part.item.next_row = part.stop
        waiting = [item for item in waiting if item not in {p.item for p in batch} or item.next_row < item.num_rows]
        batches.append([(queue.index(part.item), part.stop - part.start) for part in batch])
    return batches


LIMITS = BatchLimits(max_rows=8, max_bytes=1000)


@pytest.mark.parametrize(
    ("counts", "batches"),
    [
        ((1, 1, 1), [[(0, 1), (1, 1), (2, 1)]]),
        ((3, 5, 1), [[(0, 3), (1, 5)], [(2, 1)]]),
        # One that fits a batch is never cut; a smaller one behind it fills the room.
        ((5, 5, 3, 3), [[(0, 5), (2, 3)], [(1, 5), (3, 3)]]),
        # One that is too large gives what there is room for, and shares its last batch.
        ((3, 20, 2), [[(0, 3), (1, 5)], [(1, 8)], [(1, 7)], [(2, 2)]]),
        ((18, 6, 1), [[(0, 8)], [(0, 8)], [(0, 2), (1, 6)], [(2, 1)]]),
        # None counts as one.
        ((0, 0, 8), [[(0, 0), (1, 0)], [(2, 8)]]),
        ((0,) * 9, [[(index, 0) for index in range(8)], [(8, 0)]]),
    ],
)
def test_first_come_first_served(counts: tuple[int, ...], batches: list[list[tuple[int, int]]]) -> None:
    """Whole requests stay whole, oversize ones are cut, and small ones fill what is left."""
    assert sent(rows(*counts), LIMITS) == batches


def test_bytes_bound_a_batch_too() -> None:
    """A batch is closed by its bytes; a request above them is cut between rows; one large row goes alone."""
    queue = [Rows([10, 10]), Rows([70]), Rows([60, 60, 10]), Rows([500]), Rows([20])]
    assert sent(queue, BatchLimits(8, 100)) == [
        [(0, 2), (1, 1)],
        [(2, 1), (4, 1)],
        [(2, 2)],
        [(3, 1)],
    ]


def test_only_so_many_are_passed_over() -> None:
    """A long queue of requests that do not fit is not searched to its end for every batch."""
    looked_at = []

    def queue() -> Iterator[Rows]:
        for item in rows(5, *[5] * 100, 1):
            looked_at.append(item)
            yield item

    assert len(plan_batch(queue(), LIMITS)) == 1
    assert len(looked_at) == 1 + MAX_PASSED_OVER + 1


@pytest.mark.parametrize("limits", [BatchLimits(8, 100, can_merge=False), BatchLimits(8, 100, False, can_cut=False)])
def test_without_merging_each_goes_alone(limits: BatchLimits) -> None:
    """Models that must not be merged get one request at a time."""
    assert sent(rows(1, 2, 3), limits) == [[(0, 1)], [(1, 2)], [(2, 3)]]


def test_without_merging_an_oversize_request_is_cut_all_the_same() -> None:
    """Switching batching off does not make large requests fail."""
    assert sent(rows(20, 1), BatchLimits(8, 100, can_merge=False)) == [[(0, 8)], [(0, 8)], [(0, 4)], [(1, 1)]]


def test_what_cannot_be_cut_goes_whole() -> None:
    """A request for a model without rows is sent whatever its size."""
    assert sent([Rows([500])], BatchLimits(1, 100, False, can_cut=False)) == [[(0, 1)]]


def strict(queue: list[Rows], limits: BatchLimits) -> list[int]:
    """In which batch each request (none oversize) goes if each batch is closed at the first that does not fit."""
    numbers, batch, left, size = [], 0, limits.max_rows, limits.max_bytes
    for item in queue:
        if max(item.num_rows, 1) > left or item.size_bytes > size:
            batch, left, size = batch + 1, limits.max_rows, limits.max_bytes
        left, size = left - max(item.num_rows, 1), size - item.size_bytes
        numbers.append(batch)
    return numbers


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=60), st.integers(24, 60))
def test_nobody_is_sent_later_than_in_strict_order(row_bytes: list[list[int]], max_bytes: int) -> None:
    """Looking past a request that does not fit delays no one."""
    queue, limits = [Rows(row) for row in row_bytes], BatchLimits(8, max_bytes)
    number = {index: batch for batch, parts in enumerate(sent(queue, limits)) for index, _ in parts}
    queue = [Rows(row) for row in row_bytes]
    assert all(number[index] <= batch for index, batch in enumerate(strict(queue, limits)))


@given(
    st.lists(st.lists(st.integers(0, 50), max_size=40), min_size=1, max_size=30),
    st.integers(1, 16),
    st.integers(1, 200),
    st.booleans(),
)
def test_every_row_is_sent_once_and_within_bounds(
    row_bytes: list[list[int]], max_rows: int, max_bytes: int, can_merge: bool
) -> None:
    """No row is lost or sent twice, no batch is above its bounds, and what fits a batch is not cut."""
    queue = [Rows(row) for row in row_bytes]
    taken: dict[int, list[Slice[Rows]]] = {}
    waiting = list(queue)
    while waiting:
        batch = plan_batch(waiting, BatchLimits(max_rows, max_bytes, can_merge))
        num_rows = sum(part.stop - part.start for part in batch)
        assert batch
        assert num_rows <= max_rows
        assert sum(part.size_bytes for part in batch) <= max_bytes or num_rows == 1
        for part in batch:
            assert part.size_bytes == part.item.bytes_between(part.start, part.stop)
            taken.setdefault(queue.index(part.item), []).append(part)
            part.item.next_row = part.stop
            if part.stop == part.item.num_rows:
                waiting.remove(part.item)
    for index, item in enumerate(queue):
        parts = taken[index]
        assert [(part.start, part.stop) for part in parts[1:]] == [
            (before.stop, part.stop) for before, part in pairwise(parts)
        ]
        assert (parts[0].start, parts[-1].stop) == (0, item.num_rows)
        assert len(parts) == 1 or item.num_rows > max_rows or item.size_bytes > max_bytes


def test_limits_follow_the_model_and_the_settings() -> None:
    """Settings lower the model's own bound and never raise it; models that do not batch are never merged."""
    assert batch_limits_of(spec_of(max_batch_size=8), BatchingSettings()).max_rows == 8
    assert batch_limits_of(spec_of(max_batch_size=8), BatchingSettings(max_batch_rows=3)).max_rows == 3
    assert batch_limits_of(spec_of(max_batch_size=8), BatchingSettings(max_batch_rows=30)).max_rows == 8
    assert batch_limits_of(spec_of(max_batch_size=0), BatchingSettings()) == BatchLimits(1, 16 * 2**20, False, False)
    assert not batch_limits_of(spec_of(is_sequence=True), BatchingSettings()).can_cut
    off = batch_limits_of(spec_of(), BatchingSettings(mode=BatchingMode.OFF))
    assert (off.can_merge, off.can_cut) == (False, True)


def test_permits_follow_the_instances() -> None:
    """One batch more than there are instances to run it; more where Triton schedules single requests itself."""
    assert permits_of(spec_of(num_instances=2), BatchingSettings()) == 3
    assert permits_of(spec_of(), BatchingSettings(max_batches_in_flight=5)) == 5
    assert permits_of(spec_of(max_batch_size=0), BatchingSettings()) == 32
    assert permits_of(spec_of(), BatchingSettings(mode=BatchingMode.OFF)) == 32
