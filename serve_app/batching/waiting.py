"""The queue of one dispatcher: by priority, arrival and signature, with exact counts of what waits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator

from serve_app.batching.item import Item
from serve_app.batching.plan import Slice


class WaitingItems:
    """Items with rows that no batch has taken yet.

    All orders are `OrderedDict`s by arrival number: an item in the middle leaves at once when its caller cancels,
    and nothing is left behind to be swept.

    Attributes:
        num_rows: Rows waiting.
        num_bytes: Bytes of input tensors waiting.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}
        self._num_items = 0
        self.num_rows = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[Item]:
        """The most urgent first, and among equals the one that came first."""
        for priority in sorted(self._lanes):
            yield from self._lanes[priority].by_arrival.values()

    def __contains__(self, item: Item) -> bool:
        lane = self._lanes.get(item.priority)
        return lane is not None and item.number in lane.by_arrival

    @property
    def num_signatures(self) -> int:
        """Different signatures waiting; one that waits in two priorities counts twice."""
        return sum([len(lane.by_signature) for lane in self._lanes.values()])

    def add(self, item: Item) -> None:
        """Put an item at the end of its priority."""
        lane = self._lanes.get(item.priority)
        if lane is None:
            lane = self._lanes[item.priority] = _Lane()
        lane.add(item)
        self._num_items += 1
        self.num_rows += item.num_rows
        self.num_bytes += item.size_bytes

    def next_queue(self) -> Iterable[Item]:
        """All items of the highest priority's signature whose head has waited longest, oldest first.

        Empty when nothing waits. That head is the oldest item of its priority, so no signature can starve another;
        a priority can.
        """
        if not self._lanes:
            return ()
        lane = self._lanes[min(self._lanes)]
        head = next(iter(lane.by_arrival.values()))
        return lane.by_signature[head.signature].values()

    def num_rows_ahead(self, priority: int) -> int:
        """Rows that go before an item of that priority which comes now."""
        return sum([lane.num_rows for number, lane in self._lanes.items() if number <= priority])

    def less_urgent(self, priority: int) -> Iterator[Item]:
        """Items of lower priority than that of which no row was sent: the least urgent first, then the newest."""
        for number in sorted(self._lanes, reverse=True):
            if number <= priority:
                return
            for item in reversed(self._lanes[number].by_arrival.values()):
                if not item.next_row:
                    yield item

    def take(self, part: Slice[Item]) -> None:
        """Take a slice out of the queue; an item leaves it with its last row."""
        item = part.item
        if part.stop >= item.num_rows:
            self.remove(item)
            item.next_row, item.waiting_bytes = item.num_rows, 0
            return
        self._count(item, -(part.stop - item.next_row), -part.size_bytes)
        item.next_row = part.stop
        item.waiting_bytes -= part.size_bytes

    def remove(self, item: Item) -> None:
        """Take what is left of an item out of the queue; does nothing when it is not there."""
        lane = self._lanes.get(item.priority)
        if lane is None or not lane.remove(item):
            return
        self._num_items -= 1
        self._count(item, -(item.num_rows - item.next_row), -item.waiting_bytes)
        if not lane.by_arrival:
            del self._lanes[item.priority]

    def _count(self, item: Item, num_rows: int, num_bytes: int) -> None:
        self._lanes[item.priority].num_rows += num_rows
        self.num_rows += num_rows
        self.num_bytes += num_bytes


class _Lane:
    """Items of one priority."""

    __slots__ = ("by_arrival", "by_signature", "num_rows")

    def __init__(self) -> None:
        self.by_arrival: OrderedDict[int, Item] = OrderedDict()
        self.by_signature: dict[Hashable, OrderedDict[int, Item]] = {}
        self.num_rows = 0

    def add(self, item: Item) -> None:
        queue = self.by_signature.get(item.signature)
        if queue is None:
            queue = self.by_signature[item.signature] = OrderedDict()
        queue[item.number] = item
        self.by_arrival[item.number] = item
        self.num_rows += item.num_rows

    def remove(self, item: Item) -> bool:
        if self.by_arrival.pop(item.number, None) is None:
            return False
        queue = self.by_signature[item.signature]
        del queue[item.number]
        if not queue:
            del self.by_signature[item.signature]
        return True
