"""How one server has been doing with one model: its usual latency, its share of faults, and whether it is left out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from serve_app.triton.choice import FORGET_HALF_LIFE_S

INITIAL_PAUSE_S = 0.25
"""How long a model that a server could not serve is asked for elsewhere; doubles with each failed trial."""

MAX_PAUSE_S = 1.0
"""Longest such pause, and so about the longest that a model is missed after it came back."""

MAX_OUTLIER_PAUSE_S = 8.0
"""Longest pause of a server that has the model and is slow or faulty: each trial costs a client its latency."""

HEAL_S = 1.5
"""How long a model whose process died is given to be loaded again; the fleet's supervisor takes about a second."""

WEIGHT = 0.2
"""Weight of the newest answer in a server's usual latency and share of faults, when the one before it is recent."""

MAX_JUMP = 2.0
"""Most that one answer counts, as a multiple of the usual latency: one hiccup does not make a server slow."""

MIN_ANSWERS = 5
"""Answers before a latency counts as usual; the first ones of a cold server are slow everywhere."""


class BlockReason(Enum):
    """Why a model is asked for elsewhere."""

    ABSENT = "absent"
    """The server does not have it now."""
    CRASHED = "crashed"
    """Its process died."""
    OUTLIER = "outlier"
    """The server answers it far more slowly, or wrongly far more often, than the others."""


@dataclass(slots=True)
class ModelBlock:
    """A model that is better asked for elsewhere.

    Attributes:
        until: When the next trial is due, in seconds of the router's clock.
        pause_s: The pause that led there.
        since: When the block was made, or last prolonged.
        reason: Why.
        is_trying: Whether a trial is under way.
    """

    until: float
    pause_s: float
    since: float
    reason: BlockReason = BlockReason.ABSENT
    is_trying: bool = False

    def prolonged(self, *, now: float) -> ModelBlock:
        """The block after a trial that failed."""
        longest_s = MAX_OUTLIER_PAUSE_S if self.reason is BlockReason.OUTLIER else MAX_PAUSE_S
        pause_s = min(2 * self.pause_s, longest_s)
        return ModelBlock(now + pause_s, pause_s, now, self.reason)


@dataclass(slots=True)
class ModelRecord:
    """How a server has been doing with a model.

    Attributes:
        usual_s: Weighted mean of the latest answers' latencies in seconds.
        at: When the last outcome came, in seconds of the router's clock.
        num_answers: Answers that went into `usual_s`.
        num_outcomes: Answers and faults.
        fault_share: Weighted share of faults among the latest outcomes.
    """

    usual_s: float
    at: float
    num_answers: int = 0
    num_outcomes: int = 0
    fault_share: float = 0.0

    def add(self, latency_s: float, *, now: float) -> None:
        """Take one more answer in; the longer the silence before it, the more it counts."""
        if self.num_answers < MIN_ANSWERS:
            self.usual_s = min(self.usual_s, latency_s) if self.num_answers else latency_s
        else:
            kept = (1.0 - WEIGHT) * 0.5 ** ((now - self.at) / FORGET_HALF_LIFE_S)
            self.usual_s = kept * self.usual_s + (1.0 - kept) * min(latency_s, MAX_JUMP * self.usual_s)
        self.at = now
        self.num_answers += 1
        self.num_outcomes += 1
        self.fault_share *= 1.0 - WEIGHT

    def add_fault(self, *, now: float) -> None:
        """Take one more fault in."""
        self.at = now
        self.num_outcomes += 1
        self.fault_share += WEIGHT * (1.0 - self.fault_share)
