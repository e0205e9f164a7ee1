"""One Triton server as the router sees it: whether it may be asked, for which models, and how it has been doing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from serve_app.endpoint import Endpoint
from serve_app.triton.choice import FORGET_HALF_LIFE_S
from serve_app.triton.pool import ChannelPool, PoolStatistics

INITIAL_PAUSE_S = 0.25
"""How long a model that a server could not serve is asked for elsewhere; doubles with each failed trial."""

MAX_PAUSE_S = 1.0
"""Longest such pause, and so about the longest that a model is missed after it came back."""

MAX_BLOCKS = 256
"""Models of one server that are remembered as unavailable; clients can invent names without end."""

LATENCY_WEIGHT = 0.2
"""Weight of the newest answer in a server's usual latency, when the one before it is recent."""

MAX_JUMP = 2.0
"""Most that one answer counts, as a multiple of the usual latency: one hiccup does not make a server slow."""

MIN_ANSWERS = 5
"""Answers before a latency counts as usual; the first ones of a cold server are slow everywhere."""

MAX_LATENCIES = 1024
"""Models of one server whose latency is remembered."""


class MemberState(Enum):
    """Whether a server may be asked."""

    CONNECTING = "connecting"
    """New; asked only when there is nothing better."""
    AVAILABLE = "available"
    EJECTED = "ejected"
    """Not asked until it answers a probe."""
    DRAINING = "draining"
    """Removed; its last calls are finishing."""


@dataclass(slots=True)
class ModelBlock:
    """A model that a server could not serve.

    Attributes:
        until: When the next trial is due, in seconds of the router's clock.
        pause_s: The pause that led there.
        is_trying: Whether a trial is under way.
    """

    until: float
    pause_s: float
    is_trying: bool = False


@dataclass(slots=True)
class ModelLatency:
    """How long a server takes to answer for one model.

    Attributes:
        usual_s: Weighted mean of the latest answers' latencies in seconds.
        at: When the last answer came, in seconds of the router's clock.
        num_answers: Answers that went into it.
    """

    usual_s: float
    at: float
    num_answers: int = 1

    def add(self, latency_s: float, *, now: float) -> None:
        """Take one more answer in; the longer the silence before it, the more it counts."""
        kept = (1.0 - LATENCY_WEIGHT) * 0.5 ** ((now - self.at) / FORGET_HALF_LIFE_S)
        self.usual_s = kept * self.usual_s + (1.0 - kept) * min(latency_s, MAX_JUMP * self.usual_s)
        self.at = now
        self.num_answers += 1


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """Counts of one server.

    Attributes:
        endpoint: The server.
        state: Whether it may be asked.
        reason: Why it was last ejected; empty when it never was.
        num_active: Calls that hold a channel.
        num_waiting: Callers that wait for one.
        num_ejections: Times it was ejected.
        num_retried: Calls that failed here and were sent elsewhere.
        unavailable_models: Models that it could not serve when last asked.
        pool: Its channels.
    """

    endpoint: Endpoint
    state: MemberState
    reason: str
    num_active: int
    num_waiting: int
    num_ejections: int
    num_retried: int
    unavailable_models: tuple[str, ...]
    pool: PoolStatistics


@dataclass(slots=True, eq=False)
class Member:
    """A server, its pool and its record. Changed by the router only; nothing here does I/O.

    Attributes:
        endpoint: The server.
        pool: Its channels.
        distance: 0 on this node, 1 in this zone, 2 elsewhere or unknown.
        state: See `MemberState`.
        reason: Why it was last ejected.
        admitted_at: When it last became available, in seconds of the router's clock.
        num_ejections: Times it was ejected.
        num_retried: Calls that failed here and were sent elsewhere.
    """

    endpoint: Endpoint
    pool: ChannelPool
    distance: int = 2
    state: MemberState = MemberState.CONNECTING
    reason: str = ""
    admitted_at: float = 0.0
    num_ejections: int = 0
    num_retried: int = 0
    _blocks: dict[str, ModelBlock] = field(default_factory=dict)
    _latencies: dict[str, ModelLatency] = field(default_factory=dict)

    # --- what the choice asks -----------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Calls on it now, those that wait for a channel included."""
        return self.pool.num_in_flight

    def is_full(self) -> bool:
        """Whether the next call would wait for a channel."""
        return self.pool.is_full()

    def has_blocks(self) -> bool:
        """Whether there is any model that it could not serve."""
        return bool(self._blocks)

    def is_blocked(self, model_name: str, *, now: float) -> bool:
        """Whether the model is better asked for elsewhere: it failed here, and no trial is due."""
        block = self._blocks.get(model_name)
        return block is not None and (block.is_trying or now < block.until)

    def latency(self, model_name: str, *, now: float) -> tuple[float, float] | None:
        """The model's usual latency here and the age of its last answer, in seconds; `None` until it is known."""
        latency = self._latencies.get(model_name)
        if latency is None or latency.num_answers < MIN_ANSWERS:
            return None
        return latency.usual_s, now - latency.at

    # --- what calls tell ------------------------------------------------------------------------------------

    def begin(self, model_name: str) -> None:
        """A call for the model starts; if the model is blocked, the call is its trial."""
        if self._blocks and (block := self._blocks.get(model_name)) is not None:
            block.is_trying = True

    def abandon(self, model_name: str) -> None:
        """A call for the model ended in a way that tells nothing about the model here."""
        if self._blocks and (block := self._blocks.get(model_name)) is not None:
            block.is_trying = False

    def succeed(self, model_name: str, *, started_at: float, now: float) -> None:
        """A call for the model was answered."""
        if self._blocks:
            self._blocks.pop(model_name, None)
        latency = self._latencies.get(model_name)
        if latency is not None:
            latency.add(now - started_at, now=now)
            return
        if len(self._latencies) >= MAX_LATENCIES:
            self._latencies.clear()
        self._latencies[model_name] = ModelLatency(now - started_at, now)

    def unblock(self, model_name: str) -> None:
        """The model was served here, in a call whose duration says nothing."""
        self._blocks.pop(model_name, None)

    def block(self, model_name: str, *, now: float) -> None:
        """The model could not be served here: ask elsewhere for a while, then try with one call."""
        block = self._blocks.get(model_name)
        if block is None:
            while len(self._blocks) >= MAX_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[model_name] = ModelBlock(now + INITIAL_PAUSE_S, INITIAL_PAUSE_S)
        elif block.is_trying:
            pause_s = min(2 * block.pause_s, MAX_PAUSE_S)
            self._blocks[model_name] = ModelBlock(now + pause_s, pause_s)

    # --- life -----------------------------------------------------------------------------------------------

    def eject(self, reason: str) -> None:
        """Stop asking it."""
        self.state, self.reason = MemberState.EJECTED, reason
        self.num_ejections += 1

    def admit(self, *, now: float) -> None:
        """Ask it (again), for every model."""
        self.state, self.admitted_at = MemberState.AVAILABLE, now
        self._blocks.clear()

    def statistics(self) -> EndpointStatistics:
        """Counts of now and since it was added."""
        pool = self.pool.statistics()
        return EndpointStatistics(
            endpoint=self.endpoint,
            state=self.state,
            reason=self.reason,
            num_active=pool.num_active,
            num_waiting=pool.num_waiting,
            num_ejections=self.num_ejections,
            num_retried=self.num_retried,
            unavailable_models=tuple(self._blocks),
            pool=pool,
        )

    def __repr__(self) -> str:
        pool = self.pool.statistics()
        return (
            f"{self.endpoint.address} {self.state.value} {pool.num_active} active {pool.num_waiting} queued "
            f"{self.num_ejections} ejections {self.num_retried} retried"
        )
