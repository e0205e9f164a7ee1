"""How many rows a second a model has answered lately, to tell refused callers when to come back."""

from __future__ import annotations

import math

MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0
UNKNOWN_RETRY_AFTER_S = 1.0


class ServiceRate:
    """Rows per second, older seconds weighing less.

    Args:
        time_constant_s: After so many seconds an answer weighs 1/e.
    """

    def __init__(self, *, time_constant_s: float = 5.0) -> None:
        self._time_constant_s = time_constant_s
        self._weighted_rows = 0.0
        self._started_at: float | None = None
        self._updated_at = 0.0

    def add(self, num_rows: int, *, now: float) -> None:
        """Count rows that were answered."""
        if self._started_at is None:
            self._started_at = now
        self._decay(now)
        self._weighted_rows += num_rows

    def rows_per_s(self, *, now: float) -> float:
        """The rate; 0 as long as nothing was answered."""
        if self._started_at is None:
            return 0.0
        self._decay(now)
        # The part of an endless past that has been seen: without it, the first seconds would look slow.
        seen = 1.0 - math.exp(-max(now - self._started_at, 0.001) / self._time_constant_s)
        return self._weighted_rows / (self._time_constant_s * seen)

    def retry_after_s(self, num_waiting_rows: int, *, now: float) -> float:
        """When what waits now will have been answered, in seconds, within sane bounds."""
        rate = self.rows_per_s(now=now)
        if rate <= 0.0:
            return UNKNOWN_RETRY_AFTER_S
        return min(max(num_waiting_rows / rate, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _decay(self, now: float) -> None:
        if now > self._updated_at:
            self._weighted_rows *= math.exp((self._updated_at - now) / self._time_constant_s)
            self._updated_at = now
