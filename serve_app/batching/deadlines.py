"""The deadlines of all live items, for one timer and not one for each request."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator

from serve_app.batching.item import Item
from serve_app.clock import Clock


class DeadlineHeap:
    """Live items, the next to expire first.

    Entries of items that are done stay in the heap, without the item, until they come up or make up half of it; so
    both adding and discarding cost next to nothing.
    """

    _MIN_SWEPT = 256

    def __init__(self) -> None:
        self._live: dict[int, Item] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._live.values())

    @property
    def num_entries(self) -> int:
        """Entries in the heap, those of items that are done included."""
        return len(self._heap)

    def add(self, item: Item) -> None:
        """Begin to watch an item."""
        self._live[item.number] = item
        heapq.heappush(self._heap, (item.deadline.expires_at, item.number))

    def discard(self, item: Item) -> None:
        """Cease to watch an item; does nothing when it is not watched."""
        self._live.pop(item.number, None)
        if len(self._heap) > 2 * len(self._live) + self._MIN_SWEPT:
            self._heap = [(item.deadline.expires_at, number) for number, item in self._live.items()]
            heapq.heapify(self._heap)

    def next_expiry(self) -> float | None:
        """When the next live item expires; `None` when there is none."""
        heap = self._heap
        while heap and heap[0][1] not in self._live:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_expired(self, now: float) -> list[Item]:
        """The items whose deadline has come, oldest deadline first; they are no longer watched."""
        heap, expired = self._heap, []
        while heap and heap[0][0] <= now:
            item = self._live.pop(heapq.heappop(heap)[1], None)
            if item is not None:
                expired.append(item)
        return expired


class ExpiryTimer:
    """The one loop timer of a `DeadlineHeap`.

    Args:
        items: Whose deadlines to watch.
        clock: Time of the deadlines; they are also looked at when it stands still, never early.
        on_due: Called when a deadline may have come.
    """

    def __init__(self, items: DeadlineHeap, *, clock: Clock, on_due: Callable[[], None]) -> None:
        self._items = items
        self._clock = clock
        self._on_due = on_due
        self._handle: asyncio.TimerHandle | None = None
        self._due_at = 0.0

    def watch(self, expires_at: float, *, now: float) -> None:
        """Make sure that the timer fires at `expires_at` or before."""
        if self._handle is not None:
            if self._due_at <= expires_at:
                return
            self._handle.cancel()
        self._due_at = expires_at
        self._handle = asyncio.get_running_loop().call_later(expires_at - now, self._fire)

    def close(self) -> None:
        """Let go of the loop."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._on_due()
        expires_at = self._items.next_expiry()
        if expires_at is not None:
            self.watch(expires_at, now=self._clock.now())
