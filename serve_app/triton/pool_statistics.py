"""What a pool tells of itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PoolState(Enum):
    """Life of a pool; a closed one may be opened again."""

    NEW = "new"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counts of one pool: of now up to `num_waiting`, since the pool was made from `num_done` on.

    Attributes:
        address: The endpoint's address.
        state: Life of the pool.
        num_channels: Channels open.
        num_active: Calls that hold a channel.
        num_waiting: Callers waiting for one.
        num_done: Calls that succeeded.
        num_failed: Calls that ended with an error.
        num_cancelled: Calls, and waits for a channel, whose caller gave up.
        num_timed_out: Waits for a channel that outlasted their budget.
    """

    address: str
    state: PoolState
    num_channels: int
    num_active: int
    num_waiting: int
    num_done: int
    num_failed: int
    num_cancelled: int
    num_timed_out: int
