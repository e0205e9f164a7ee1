"""Time as an argument: one monotonic clock for the process, one that tests move by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

MAX_TIMEOUT_S = 7 * 24 * 3600.0
"""Longest budget: more means that there is no limit, for which neither gRPC nor Triton's microseconds have a number."""


class Clock(Protocol):
    """Anything that tells monotonic seconds."""

    def now(self) -> float:
        """Seconds on a clock that never goes back; only differences have a meaning."""
        ...


class MonotonicClock:
    """The process's own monotonic clock (the one the event loop uses)."""

    def now(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is told to move; for tests."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The time set by `advance`."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward by `seconds`."""
        self._now += seconds


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment at which a request is no longer wanted.

    Attributes:
        expires_at: Seconds on the same `Clock` that is passed to `remaining_s`.
        timeout_s: The budget the caller started with, for error texts.
    """

    expires_at: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float, *, now: float) -> Deadline:
        """The deadline `timeout_s` seconds after `now`, at most `MAX_TIMEOUT_S`."""
        timeout_s = min(timeout_s, MAX_TIMEOUT_S)
        return cls(now + timeout_s, timeout_s)

    def remaining_s(self, *, now: float) -> float:
        """Budget left in seconds, zero or negative once it has passed."""
        return self.expires_at - now
