"""The queue of one dispatcher: by arrival and by signature, with exact counts of what waits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator

from serve_app.batching.item import Item
from serve_app.batching.plan import Slice


class WaitingItems:
    """Items with rows that no batch has taken yet.

    Both orders are `OrderedDict`s by arrival number: an item in the middle leaves at once when its caller cancels,
    and nothing is left behind to be swept.

    Attributes:
        num_rows: Rows waiting.
        num_bytes: Bytes of input tensors waiting.
    """

    def __init__(self) -> None:
        self._by_arrival: OrderedDict[int, Item] = OrderedDict()
        self._by_signature: dict[Hashable, OrderedDict[int, Item]] = {}
        self.num_rows = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._by_arrival.values())

    def __contains__(self, item: Item) -> bool:
        return item.number in self._by_arrival

    @property
    def num_signatures(self) -> int:
        """Different signatures waiting."""
        return len(self._by_signature)

    def add(self, item: Item) -> None:
        """Put an item at the end."""
        queue = self._by_signature.get(item.signature)
        if queue is None:
            queue = self._by_signature[item.signature] = OrderedDict()
        queue[item.number] = item
        self._by_arrival[item.number] = item
        self.num_rows += item.num_rows
        self.num_bytes += item.size_bytes

    def oldest_queue(self) -> Iterable[Item]:
        """All items of the signature whose head has waited longest, oldest first; empty when nothing waits.

        That head is the oldest item of all, so no signature can starve another.
        """
        for item in self._by_arrival.values():
            return self._by_signature[item.signature].values()
        return ()

    def take(self, part: Slice[Item]) -> None:
        """Take a slice out of the queue; an item leaves it with its last row."""
        item = part.item
        if part.stop >= item.num_rows:
            self.remove(item)
            item.next_row, item.waiting_bytes = item.num_rows, 0
            return
        self.num_rows -= part.stop - item.next_row
        self.num_bytes -= part.size_bytes
        item.next_row = part.stop
        item.waiting_bytes -= part.size_bytes

    def remove(self, item: Item) -> None:
        """Take what is left of an item out of the queue; does nothing when it is not there."""
        if self._by_arrival.pop(item.number, None) is None:
            return
        queue = self._by_signature[item.signature]
        del queue[item.number]
        if not queue:
            del self._by_signature[item.signature]
        self.num_rows -= item.num_rows - item.next_row
        self.num_bytes -= item.waiting_bytes
