"""Which server is left out for a model because it does far worse than the others: pure functions of their records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from serve_app.triton.model_record import ModelRecord

MIN_OUTCOMES = 5
"""Answers and faults that a server must have had before it is called faulty."""

MAX_FAULT_SHARE = 0.5
"""Share of faults at which a server is faulty, if another has less than half of it."""

MIN_ANSWERS_SLOW = 20
"""Answers that a server, and those it is compared with, must have given before it is called slow."""

SLOW_FACTOR = 5.0
"""Multiple of the others' median latency at which a server is left out; below it, it merely gets less."""

SLOW_EXCESS_S = 0.02
"""By how much at least, in seconds: a few milliseconds are a busy machine's noise."""

MAX_SHARE = 0.5
"""Largest share of the servers that is left out for a model; never all of them."""


def max_outliers(num_servers: int) -> int:
    """How many of so many servers may be left out for one model."""
    return int(num_servers * MAX_SHARE)


def slow_limit_s(others: Sequence[ModelRecord | None]) -> float | None:
    """The latency from which on a server is an outlier; `None` where the others have not answered enough."""
    known = [other.usual_s for other in others if other is not None and other.num_answers >= MIN_ANSWERS_SLOW]
    if not known:
        return None
    median = statistics.median(known)
    return max(SLOW_FACTOR * median, median + SLOW_EXCESS_S)


def is_outlier(own: ModelRecord, others: Sequence[ModelRecord | None]) -> bool:
    """Whether a server does so much worse with a model than the others that it is left out.

    Args:
        own: Its record.
        others: The records of the other servers that may be asked; `None` for one that was never asked. Without
            others nobody is an outlier.
    """
    if not others:
        return False
    if own.num_outcomes >= MIN_OUTCOMES and own.fault_share >= MAX_FAULT_SHARE:
        shares = [0.0 if o is None or o.num_outcomes < MIN_OUTCOMES else o.fault_share for o in others]
        if min(shares) < own.fault_share / 2:
            return True
    if own.num_answers < MIN_ANSWERS_SLOW:
        return False
    limit_s = slow_limit_s(others)
    return limit_s is not None and own.usual_s > limit_s
