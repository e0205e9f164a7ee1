"""Who may join one model's queue, and who has to leave it for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from serve_app.batching.admission import Load, displaced, has_room, out_of_time, overload, too_long
from serve_app.batching.item import Batch, Item
from serve_app.batching.service_rate import ServiceRate
from serve_app.batching.service_time import ServiceTime
from serve_app.batching.statistics import DispatcherCounters
from serve_app.batching.waiting import WaitingItems
from serve_app.clock import Clock, Deadline
from serve_app.errors import Overloaded
from serve_app.settings import QueueSettings

_MARGIN = 1.1
"""What a budget has to be more than the time foreseen: batches are not all alike, and an answer that comes a moment too
late is work for nothing, in a full queue for one request after the other."""


class Gate:
    """Compares what waits with the bounds, and with the time that the model takes.

    Args:
        waiting: The queue; only looked at.
        counters: Where refusals are counted.
        what: The model, for error texts.
        clock: Time of the deadlines.
    """

    def __init__(self, waiting: WaitingItems, counters: DispatcherCounters, *, what: str, clock: Clock) -> None:
        self._waiting = waiting
        self._counters = counters
        self._what = what
        self._clock = clock
        self._rate = ServiceRate()
        self._time = ServiceTime()

    def reconfigure(self, settings: QueueSettings, *, max_batch_rows: int) -> None:
        """Put other bounds in force for who comes next."""
        self._settings = settings
        self._max_batch_rows = max_batch_rows

    def note_answered(self, batch: Batch) -> None:
        """Learn from a batch that has just been answered at its first try."""
        now = self._clock.now()
        self._rate.add(batch.num_rows, now=now)
        self._time.add(batch.num_rows, now - batch.started_at, was_pressed=batch.was_pressed)

    def note_given_up(self, batch: Batch) -> None:
        """Learn from a batch that was cancelled because nobody waited for it any more."""
        self._time.note_longer(self._clock.now() - batch.started_at)

    def hopeless(self, queue: Iterable[Item]) -> list[tuple[Item, Overloaded]]:
        """Who of the next in line has less time left than the quickest of the last batches took, with an error each.

        To send them would take the model's time from those who can still be answered: every batch would be given up
        shortly before its end, one after the other. Where nobody else waits they are sent all the same, for then it
        costs nobody anything, and the model may have become quicker.

        Args:
            queue: What is about to be sent, the first first.
        """
        shortest_s, now = self._time.shortest_s, self._clock.now()
        if not shortest_s or len(self._waiting) <= 1:
            return []
        next_ones = islice(queue, self._max_batch_rows)
        found = [item for item in next_ones if not item.next_row and item.deadline.expires_at - now < shortest_s]
        if len(found) == len(self._waiting):
            return []
        self._counters.num_refused += len(found)
        return [
            (item, out_of_time(self._what, item.deadline.remaining_s(now=now), shortest_s, self._retry_after_s()))
            for item in found
        ]

    def rows_per_s(self) -> float:
        """Rows answered per second lately."""
        return self._rate.rows_per_s(now=self._clock.now())

    def has_room(self, more: Load, gathering: Load) -> bool:
        """Whether the queue has room for `more`, beside what waits and what is on its way to it."""
        return has_room(self._load(gathering), more, self._settings)

    def admit(
        self, more: Load, deadline: Deadline, *, priority: int, gathering: Load, num_permits: int
    ) -> Sequence[tuple[Item, Overloaded]]:
        """Let a request into the queue.

        Args:
            more: The request.
            deadline: When it is no longer wanted.
            priority: How urgent it is; lower is more.
            gathering: What is on its way to the queue and counts as waiting.
            num_permits: Batches that may be under way at once.

        Returns:
            Who has to leave for it, each with the error to give; mostly nobody.

        Raises:
            Overloaded: It may not; with the time after which to try again.
        """
        leaving = self.check(more, deadline, priority=priority, gathering=gathering, num_permits=num_permits)
        self._counters.num_refused += len(leaving)
        return [(item, displaced(self._what, retry_after_s=self._retry_after_s())) for item in leaving]

    def check(
        self, more: Load, deadline: Deadline, *, priority: int, gathering: Load, num_permits: int
    ) -> Sequence[Item]:
        """Who would have to leave for a request, which is not let in yet; arguments and errors as `admit`."""
        load = self._load(gathering)
        leaving: list[Item] = []
        if not has_room(load, more, self._settings):
            leaving = self._less_urgent(more, priority, load)
            if not leaving:
                self._counters.num_refused += 1
                raise overload(load, more, self._settings, what=self._what, retry_after_s=self._retry_after_s())
        if self._waiting:
            self._check_wait(deadline, priority, num_permits)
        return leaving

    def _check_wait(self, deadline: Deadline, priority: int, num_permits: int) -> None:
        num_ahead = self._waiting.num_rows_ahead(priority)
        wait_s = self._time.wait_s(num_ahead, num_permits=num_permits, max_batch_rows=self._max_batch_rows)
        may_wait_s = deadline.remaining_s(now=self._clock.now()) / _MARGIN
        if self._settings.max_wait_s is not None:
            may_wait_s = min(may_wait_s, self._settings.max_wait_s)
        if num_ahead and wait_s > may_wait_s:
            self._counters.num_refused += 1
            raise too_long(num_ahead, wait_s, may_wait_s, what=self._what)

    def _less_urgent(self, more: Load, priority: int, load: Load) -> list[Item]:
        """The fewest of the least urgent that make room for something more urgent; none if all of them would not."""
        leaving: list[Item] = []
        for item in self._waiting.less_urgent(priority):
            leaving.append(item)
            load = load.minus(Load(1, item.num_rows, item.size_bytes))
            if has_room(load, more, self._settings):
                return leaving
        return []

    def _load(self, gathering: Load) -> Load:
        return Load(len(self._waiting), self._waiting.num_rows, self._waiting.num_bytes).plus(gathering)

    def _retry_after_s(self) -> float:
        return self._rate.retry_after_s(self._waiting.num_rows, now=self._clock.now())
