"""One Triton server as the router sees it: whether it may be asked, for which models, and how it has been doing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from serve_app.endpoint import Endpoint
from serve_app.triton.model_record import (
    HEAL_S,
    INITIAL_PAUSE_S,
    MIN_ANSWERS,
    BlockReason,
    ModelBlock,
    ModelRecord,
)
from serve_app.triton.pool import ChannelPool
from serve_app.triton.pool_statistics import PoolStatistics

MAX_BLOCKS = 256
"""Models of one server that are remembered as unavailable; clients can invent names without end."""

MAX_RECORDS = 1024
"""Models of one server whose record is kept."""


class MemberState(Enum):
    """Whether a server may be asked."""

    CONNECTING = "connecting"
    """New; asked only when there is nothing better."""
    AVAILABLE = "available"
    EJECTED = "ejected"
    """Not asked until it answers a probe."""
    DRAINING = "draining"
    """Removed; its last calls are finishing."""


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
        num_stalls: Times it gave no sign of life.
        unavailable_models: Models that are asked for elsewhere now.
        pool: Its channels.
    """

    endpoint: Endpoint
    state: MemberState
    reason: str
    num_active: int
    num_waiting: int
    num_ejections: int
    num_retried: int
    num_stalls: int
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
        num_stalls: Times it gave no sign of life.
        num_out: Calls under way or waiting for a channel.
        heard_at: When anything last came from it while calls were under way, or when the first of these set out.
        is_suspect: Whether it is being asked for a sign of life; others are preferred meanwhile.
    """

    endpoint: Endpoint
    pool: ChannelPool
    distance: int = 2
    state: MemberState = MemberState.CONNECTING
    reason: str = ""
    admitted_at: float = 0.0
    num_ejections: int = 0
    num_retried: int = 0
    num_stalls: int = 0
    num_out: int = 0
    heard_at: float = 0.0
    is_suspect: bool = False
    _pinged_at: float = -1.0
    _num_pings: int = 0
    _blocks: dict[str, ModelBlock] = field(default_factory=dict)
    _records: dict[str, ModelRecord] = field(default_factory=dict)

    # --- what the choice asks -----------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Calls on it now, those that wait for a channel included."""
        return self.pool.num_in_flight

    def is_full(self) -> bool:
        """Whether the next call would wait for a channel."""
        return self.pool.is_full()

    def has_blocks(self) -> bool:
        """Whether there is any model that is better asked for elsewhere."""
        return bool(self._blocks)

    def is_blocked(self, model_name: str, *, now: float) -> bool:
        """Whether the model is better asked for elsewhere: it failed here, and no trial is due."""
        block = self._blocks.get(model_name)
        return block is not None and (block.is_trying or now < block.until)

    def is_outlier(self, model_name: str) -> bool:
        """Whether the model is asked for elsewhere because others serve it far better."""
        block = self._blocks.get(model_name)
        return block is not None and block.reason is BlockReason.OUTLIER

    def is_healing(self, model_name: str, *, now: float) -> bool:
        """Whether the model's process died here so lately that it may not have been loaded again."""
        block = self._blocks.get(model_name)
        return block is not None and block.reason is BlockReason.CRASHED and now < block.since + HEAL_S

    def record(self, model_name: str) -> ModelRecord | None:
        """How it has been doing with a model; `None` before the first outcome."""
        return self._records.get(model_name)

    def latency(self, model_name: str, *, now: float) -> tuple[float, float] | None:
        """The model's usual latency here and the age of its last answer, in seconds; `None` until it is known."""
        record = self._records.get(model_name)
        if record is None or record.num_answers < MIN_ANSWERS:
            return None
        return record.usual_s, now - record.at

    # --- signs of life --------------------------------------------------------------------------------------

    def depart(self, *, now: float) -> None:
        """A call sets out."""
        if self.num_out == 0:
            self.heard_at = max(self.heard_at, now)
        self.num_out += 1

    def silent_s(self, *, now: float) -> float:
        """For how long nothing has come from it although calls were under way."""
        return now - self.heard_at if self.num_out else 0.0

    @property
    def num_pings(self) -> int:
        """How many answers to pings in a row have been all that came from it."""
        return self._num_pings if self._pinged_at == self.heard_at else 0

    def answer_ping(self, *, now: float) -> None:
        """It has given a sign of life."""
        self._num_pings = self.num_pings + 1
        self._pinged_at = self.heard_at = now

    # --- what calls tell ------------------------------------------------------------------------------------

    def begin(self, model_name: str) -> None:
        """A call for the model starts; if the model is blocked, the call is its trial."""
        if self._blocks and (block := self._blocks.get(model_name)) is not None:
            block.is_trying = True

    def abandon(self, model_name: str) -> None:
        """A call for the model ended in a way that tells nothing about the model here."""
        if self._blocks and (block := self._blocks.get(model_name)) is not None:
            block.is_trying = False

    def succeed(
        self, model_name: str, *, started_at: float, now: float, slow_limit_s: float | None = None
    ) -> ModelRecord:
        """A call for the model was answered.

        Args:
            model_name: The model.
            started_at: When the call set out.
            now: When the answer came.
            slow_limit_s: Latency from which on a trial of a slow server has failed.
        """
        record = self._record(model_name, now)
        if self._blocks and (block := self._blocks.get(model_name)) is not None:
            if block.reason is not BlockReason.OUTLIER:
                del self._blocks[model_name]
            elif started_at >= block.since:  # calls from before the block are no trials of it
                if slow_limit_s is not None and now - started_at > slow_limit_s:
                    self._blocks[model_name] = block.prolonged(now=now)
                else:
                    del self._blocks[model_name]
                    # Judged anew, but not taken for a new server, which would count as fast.
                    record = self._records[model_name] = ModelRecord(now - started_at, now, num_answers=MIN_ANSWERS)
        record.add(now - started_at, now=now)
        return record

    def fault(self, model_name: str, *, started_at: float, now: float) -> ModelRecord:
        """A call for the model was answered wrongly, or not within its budget."""
        record = self._record(model_name, now)
        record.add_fault(now=now)
        block = self._blocks.get(model_name)
        if block is not None and block.reason is BlockReason.OUTLIER and started_at >= block.since:
            self._blocks[model_name] = block.prolonged(now=now)
        return record

    def _record(self, model_name: str, now: float) -> ModelRecord:
        record = self._records.get(model_name)
        if record is None:
            if len(self._records) >= MAX_RECORDS:
                self._records.clear()
            record = self._records[model_name] = ModelRecord(0.0, now)
        return record

    def unblock(self, model_name: str) -> None:
        """The model was served here, in a call whose duration says nothing."""
        self._blocks.pop(model_name, None)

    def block(self, model_name: str, *, now: float, reason: BlockReason = BlockReason.ABSENT) -> None:
        """The model is better asked for elsewhere for a while; then one call tries."""
        block = self._blocks.get(model_name)
        if block is None:
            while len(self._blocks) >= MAX_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[model_name] = ModelBlock(now + INITIAL_PAUSE_S, INITIAL_PAUSE_S, now, reason)
        elif block.is_trying:
            self._blocks[model_name] = block.prolonged(now=now)
            self._blocks[model_name].reason = reason

    # --- life -----------------------------------------------------------------------------------------------

    def eject(self, reason: str) -> None:
        """Stop asking it."""
        self.state, self.reason = MemberState.EJECTED, reason
        self.num_ejections += 1

    def admit(self, *, now: float) -> None:
        """Ask it (again), for every model."""
        self.state, self.admitted_at, self.heard_at = MemberState.AVAILABLE, now, now
        self._blocks.clear()
        self._records.clear()

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
            num_stalls=self.num_stalls,
            unavailable_models=tuple(self._blocks),
            pool=pool,
        )

    def __repr__(self) -> str:
        pool = self.pool.statistics()
        return (
            f"{self.endpoint.address} {self.state.value} {pool.num_active} active {pool.num_waiting} queued "
            f"{self.num_ejections} ejections {self.num_retried} retried"
        )
