"""Which of several Triton servers gets a request: a pure function of what is known of each."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

NEAR_CALLS = 2
"""Calls in flight at which a near server counts as full and others get the next ones.

Two keep a server with one instance busy: one call runs, one waits in Triton's queue. More would only queue there
while a server farther away, which costs less than a millisecond to reach, stands idle.
"""

SLOW_RATIO = 3.0
"""How much longer than the fastest server's calls a server's must take to count as slow; less is noise."""

SLOW_DIFFERENCE_S = 0.003
"""By how much at least, in seconds; a factor of three between fractions of a millisecond means nothing."""

MAX_SLOWNESS = 100.0
"""Largest factor by which a slow server's load is weighed up."""

FORGET_HALF_LIFE_S = 1.0
"""Time without an answer in which half of a server's slowness is forgotten, so that it is tried again."""


class Candidate(Protocol):
    """What is known of a server when it is chosen or not."""

    @property
    def distance(self) -> int:
        """0 on the same node, 1 in the same zone, 2 elsewhere or unknown."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Calls on it now, those that wait for a channel included."""
        ...

    def is_full(self) -> bool:
        """Whether the next call would wait for a channel."""
        ...


C = TypeVar("C", bound=Candidate)


def choose(
    candidates: Sequence[C], slowness: Sequence[float], *, rng: random.Random, near_calls: int = NEAR_CALLS
) -> C:
    """The server for the next request.

    The nearest servers come first as long as one of them has fewer than `near_calls` in flight; then those of the next
    distance, and so on. Among those considered, the one with the least calls in flight, weighed with its slowness,
    wins; equals are drawn by lot, so that many replicas that start together do not all fall on the first.

    Args:
        candidates: At least one.
        slowness: For each candidate, a factor of at least 1; see `slowness_of`.
        rng: Draws among equals.
        near_calls: See `NEAR_CALLS`.
    """
    if len(candidates) == 1:
        return candidates[0]
    weighed = [
        (candidate, (candidate.num_in_flight + 1) * factor)
        for candidate, factor in zip(candidates, slowness, strict=True)
    ]
    distances = sorted({candidate.distance for candidate in candidates})
    for distance in distances[:-1]:
        near = [
            (candidate, load)
            for candidate, load in weighed
            if candidate.distance == distance and load <= near_calls and not candidate.is_full()
        ]
        if near:
            return _least(near, rng)
    return _least(weighed, rng)


def _least(weighed: list[tuple[C, float]], rng: random.Random) -> C:
    least = min(load for _, load in weighed)
    best = [candidate for candidate, load in weighed if load == least]
    return best[0] if len(best) == 1 else best[int(rng.random() * len(best))]


def choose_for_sequence(candidates: Sequence[C], keys: Sequence[str], sequence_id: str) -> C:
    """The server that keeps a sequence's state: the same from every replica, as long as that server is there.

    Rendezvous hashing: when a server comes or goes, only its own sequences move.

    Args:
        candidates: At least one.
        keys: For each candidate, what names it everywhere.
        sequence_id: The sequence.
    """

    def weight(pair: tuple[C, str]) -> bytes:
        return hashlib.blake2b(f"{pair[1]}/{sequence_id}".encode(), digest_size=8).digest()

    return max(zip(candidates, keys, strict=True), key=weight)[0]


def slowness_of(latencies: Sequence[tuple[float, float] | None]) -> list[float]:
    """How much slower than the fastest each server answers, as factors of at least 1.

    Args:
        latencies: For each server its usual latency and the age of the last answer, both in seconds; `None` when it has
            not answered yet, which counts as fast.
    """
    known = [latency for latency in latencies if latency is not None]
    if len(known) < 2:
        return [1.0] * len(latencies)
    fastest = min(latency_s for latency_s, _ in known)
    factors = []
    for latency in latencies:
        factor = 1.0
        if latency is not None and latency[0] - fastest > SLOW_DIFFERENCE_S and latency[0] > SLOW_RATIO * fastest:
            excess = min(latency[0] / max(fastest, 1e-6), MAX_SLOWNESS) - 1.0
            factor = float(round(1.0 + excess * 0.5 ** (latency[1] / FORGET_HALF_LIFE_S)))
        factors.append(factor)
    return factors
