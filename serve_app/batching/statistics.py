"""What a dispatcher tells of itself: the same numbers for metrics, tests and people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DispatcherCounters:
    """What a dispatcher has counted since it was made.

    Attributes:
        num_batches_sent: Batches closed and sent, the extra calls of isolations not included.
        num_rows_sent: Rows in them.
        num_answered: Requests answered.
        num_failed: Requests that got an error from below, or from a fault of ours.
        num_expired: Requests whose deadline came first.
        num_cancelled: Requests whose caller left.
        num_refused: Requests that a full queue refused.
        num_isolations: Failed batches that were sent again in parts.
        num_isolation_calls: ModelInfer calls that this took.
    """

    num_batches_sent: int = 0
    num_rows_sent: int = 0
    num_answered: int = 0
    num_failed: int = 0
    num_expired: int = 0
    num_cancelled: int = 0
    num_refused: int = 0
    num_isolations: int = 0
    num_isolation_calls: int = 0


@dataclass(frozen=True, slots=True)
class DispatcherStatistics:
    """A dispatcher at one moment.

    Attributes:
        num_waiting_requests: Requests with rows in the queue.
        num_waiting_rows: Rows in the queue.
        num_waiting_bytes: Bytes of input tensors in the queue.
        num_waiting_signatures: Queues they are in.
        num_requests_in_flight: Requests all of whose rows are in batches under way.
        num_batches_in_flight: Batches under way.
        num_permits: Batches that may be under way, over all endpoints.
        rows_per_s: Rows answered per second lately.
        stalled_s: Seconds that requests have waited without a batch being sent; 0 when nothing waits. Steady growth
            beyond the requests' own deadlines means that the dispatcher is stuck.
        counters: What happened since the start; a copy.
    """

    num_waiting_requests: int
    num_waiting_rows: int
    num_waiting_bytes: int
    num_waiting_signatures: int
    num_requests_in_flight: int
    num_batches_in_flight: int
    num_permits: int
    rows_per_s: float
    stalled_s: float
    counters: DispatcherCounters

    @property
    def mean_rows_per_batch(self) -> float:
        """Rows in a batch on average; 0 before the first."""
        counters = self.counters
        return counters.num_rows_sent / counters.num_batches_sent if counters.num_batches_sent else 0.0
