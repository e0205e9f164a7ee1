"""How one call finds its way: choose a server, try it, note how it went, and try another where that is right."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator
from typing import Any

from tritonclient.grpc import service_pb2

from serve_app.clock import Clock
from serve_app.errors import (
    AnswerMalformed,
    BackendFailed,
    DeadlineExceeded,
    EndpointUnavailable,
    EndpointUnreachable,
    ModelCrashed,
    ModelNotFound,
    ModelNotReady,
    PoolClosed,
    PoolTimeout,
    RequestRejected,
    ServeAppError,
    is_loss,
)
from serve_app.triton.call import Call
from serve_app.triton.fastest import FastestAnswers
from serve_app.triton.member import Member
from serve_app.triton.membership import Membership
from serve_app.triton.model_record import BlockReason, ModelRecord
from serve_app.triton.retry import RetryBudget, Verdict, judge
from serve_app.triton.selection import Selection
from serve_app.triton.stall_watch import StallWatch

REVIVAL_S = 10.0
"""How long a request that was lost with its server waits for one that is healthy, within its budget."""

REVIVAL_PAUSE_S = 0.05
"""Pause between two looks for such a server."""

CHECK_EVERY = 4
"""Answers of one model between two comparisons of a server with the others."""


class Delivery:
    """Brings calls to the servers of a `Membership`.

    Args:
        membership: The servers; told when a call could not reach one.
        budget: Bounds the retries.
        clock: Budgets and pauses are told by it.
        rng: Draws among equals.
        near_calls: Calls in flight at which a near server counts as full.

    Attributes:
        watch: Notices servers that hang; closed by who closes the membership.
    """

    def __init__(
        self, membership: Membership, budget: RetryBudget, *, clock: Clock, rng: random.Random, near_calls: int
    ) -> None:
        self._membership, self.budget = membership, budget
        self._clock = clock
        self.selection = Selection(membership, rng=rng, near_calls=near_calls)
        self.watch = StallWatch(membership, clock)
        self._fastest = FastestAnswers()
        self.num_done = self.num_failed = self.num_retries = self.num_hopeless = 0

    async def run(self, call: Call, *, timeout_s: float) -> Any:
        """Try servers until one answers, or until the failure is final.

        Raises:
            NoEndpoint: No server may be asked now.
            DeadlineExceeded: The budget is so small that nothing was sent, or it ran out.
            ServeAppError: How the last try ended.
        """
        self.budget.deposit()
        now = self._clock.now()
        if call.is_inference and self._fastest.is_hopeless(call.model_name, timeout_s, now=now):
            self.num_hopeless += 1
            self.num_failed += 1
            raise DeadlineExceeded(
                f"about to send to model {call.model_name!r}, which has lately answered nobody in so short a time",
                timeout_s,
            )
        return await self.carry(call, timeout_s=timeout_s)

    async def carry(self, call: Call, *, timeout_s: float) -> Any:
        """As `run`, for a call that earns no retries: the second copy of one that is hedged."""
        now = self._clock.now()
        expires_at = now + timeout_s
        failure: ServeAppError | None = None
        try:
            if call.num_losses:
                member = await self._choose_again(call, expires_at)
                now = self._clock.now()
            else:
                member = self.selection.choose(call, now)
            while member is not None:
                try:
                    answer = await self.attempt(member, call, now=now, timeout_s=expires_at - now)
                except ServeAppError as error:
                    now = self._clock.now()
                    failure = self._final(failure, error)
                    member = self._next(member, call, error, now=now, remaining_s=expires_at - now)
                else:
                    self.num_done += 1
                    return answer
            raise failure or self.selection.outage(call, now)
        except ServeAppError:
            self.num_failed += 1
            raise

    async def _choose_again(self, call: Call, expires_at: float) -> Member | None:
        """A server for a call that was lost before: a healthy one, which is waited for; `None` if none comes."""
        if not self.budget.withdraw():
            raise EndpointUnavailable(
                f"model {call.model_name!r}", "the request was lost with its server, and the retry budget is used up"
            )
        self.num_retries += 1
        waits_until = min(expires_at, self._clock.now() + REVIVAL_S)
        while (member := self.selection.choose_healthy(call, self._clock.now())) is None:
            if self._clock.now() + REVIVAL_PAUSE_S >= waits_until:
                return self.selection.choose(call, self._clock.now())
            await asyncio.sleep(REVIVAL_PAUSE_S)
        return member

    async def attempt(self, member: Member, call: Call, *, now: float, timeout_s: float) -> Any:
        """One call on one server; its outcome goes on the server's record."""
        name, is_inference = call.model_name, call.is_inference
        self._begin(member, call, now)
        try:
            message = await member.pool.call(
                call.rpc_name,
                call.build,
                timeout_s=timeout_s,
                model_name=name,
                model_version=call.model_version,
                is_repeatable=call.is_repeatable,
            )
            answer = message if call.accept is None else await self._accept(member, call, message, now + timeout_s)
        except ServeAppError as error:
            self._note_failure(member, call, error, started_at=now)
            raise
        else:
            member.heard_at = answered_at = self._clock.now()
            if is_inference:
                self._note_answer(member, name, started_at=now, now=answered_at)
            if call.sequence_id:
                self.selection.note_sequence(call, member, answered_at)
            return answer
        finally:
            member.num_out -= 1
            if is_inference:
                member.abandon(name)

    async def _accept(self, member: Member, call: Call, message: Any, expires_at: float) -> Any:
        """The answer in a message; one that the model as we know it cannot have given may be a newer model's."""
        assert call.accept is not None
        try:
            return call.accept(message)
        except AnswerMalformed as error:
            left_s = expires_at - self._clock.now()
            if call.accept_as is None or left_s <= 0:
                raise
            request = service_pb2.ModelMetadataRequest(name=call.model_name, version=call.model_version)
            with contextlib.suppress(ServeAppError):
                metadata = await member.pool.call("ModelMetadata", lambda _: request, timeout_s=left_s)
                return call.accept_as(metadata)(message)
            raise error from None

    async def stream(
        self, call: Call, *, response_timeout_s: float, timeout_s: float | None
    ) -> AsyncGenerator[Any, None]:
        """Try servers until one gives a first response; from then on it is that server's request.

        Args:
            call: A `ModelStreamInfer`.
            response_timeout_s: How long one response may take, in seconds.
            timeout_s: How long all of it may take, in seconds; `None` for any time.

        Raises:
            NoEndpoint: No server may be asked now.
            ServeAppError: How the last try ended.
        """
        self.budget.deposit()
        now = self._clock.now()
        expires_at = now + (response_timeout_s if timeout_s is None else timeout_s)
        member, failure, has_begun = self.selection.choose(call, now), None, False
        while member is not None:
            left_s = None if timeout_s is None else expires_at - now
            try:
                async with contextlib.aclosing(
                    self._attempt_stream(member, call, now, response_timeout_s, left_s)
                ) as it:
                    async for answer in it:
                        has_begun = True
                        yield answer
            except ServeAppError as error:
                now = self._clock.now()
                failure = self._final(failure, error)
                remaining_s = 0.0 if has_begun else expires_at - now
                member = self._next(member, call, error, now=now, remaining_s=remaining_s)
            else:
                self.num_done += 1
                return
        self.num_failed += 1
        raise failure or self.selection.outage(call, now)

    async def _attempt_stream(
        self, member: Member, call: Call, now: float, response_timeout_s: float, timeout_s: float | None
    ) -> AsyncGenerator[Any, None]:
        """One stream on one server; its outcome goes on the server's record, but not how long it took."""
        name = call.model_name
        self._begin(member, call, now)
        member.begin(name)
        try:
            async with contextlib.aclosing(
                member.pool.stream(
                    call.build,
                    response_timeout_s=response_timeout_s,
                    timeout_s=timeout_s,
                    model_name=name,
                    model_version=call.model_version,
                    is_repeatable=call.is_repeatable,
                )
            ) as answers:
                async for answer in answers:
                    member.heard_at = self._clock.now()
                    yield answer
        except ServeAppError as error:
            self._note_failure(member, call, error, started_at=now)
            raise
        else:
            member.unblock(name)
            if call.sequence_id:
                self.selection.note_sequence(call, member, self._clock.now())
        finally:
            member.num_out -= 1
            member.abandon(name)

    # --- what is noted --------------------------------------------------------------------------------------

    def _begin(self, member: Member, call: Call, now: float) -> None:
        call.member = member
        member.depart(now=now)
        self.watch.start()
        if call.is_inference:
            member.begin(call.model_name)

    def _note_failure(self, member: Member, call: Call, error: ServeAppError, *, started_at: float) -> None:
        """Put a failed try on the server's record."""
        name, now = call.model_name, self._clock.now()
        is_about_model = call.is_inference or call.rpc_name == "ModelStreamInfer"
        if isinstance(error, EndpointUnavailable):
            self._membership.eject(member, error, started_at=started_at)
            return
        if isinstance(error, DeadlineExceeded):
            if member.heard_at <= started_at:  # not a sign of life since it set out
                self.watch.suspect(member)
            if call.is_inference and not isinstance(error, PoolTimeout):
                self._compare(member, name, member.fault(name, started_at=started_at, now=now), now)
            return
        member.heard_at = now
        if isinstance(error, ModelNotReady | ModelNotFound) and is_about_model:
            reason = BlockReason.CRASHED if isinstance(error, ModelCrashed) else BlockReason.ABSENT
            member.block(name, now=now, reason=reason)
        elif isinstance(error, AnswerMalformed) and is_about_model:
            self._compare(member, name, member.fault(name, started_at=started_at, now=now), now)

    def _note_answer(self, member: Member, name: str, *, started_at: float, now: float) -> None:
        limit_s = self.selection.slow_limit_s(member, name) if member.has_blocks() else None
        record = member.succeed(name, started_at=started_at, now=now, slow_limit_s=limit_s)
        self._fastest.add(name, now - started_at, now=now)
        if record.num_outcomes % CHECK_EVERY == 0:
            self._compare(member, name, record, now)

    def _compare(self, member: Member, name: str, record: ModelRecord, now: float) -> None:
        """Leave a server out for a model for a while, if it does far worse than the others."""
        if not member.is_outlier(name) and self.selection.is_outlier(member, name, record):
            member.block(name, now=now, reason=BlockReason.OUTLIER)

    # --- what follows ---------------------------------------------------------------------------------------

    def _next(
        self, member: Member, call: Call, error: ServeAppError, *, now: float, remaining_s: float
    ) -> Member | None:
        """The server for another try after `error`; `None` when the error is final."""
        call.tried = (*call.tried, member)
        call.num_losses += is_loss(error)
        call.num_faults += isinstance(error, AnswerMalformed)
        verdict = judge(
            error,
            num_losses=call.num_losses,
            num_faults=call.num_faults,
            num_callers=call.num_callers,
            is_sequence=bool(call.sequence_id),
            is_stranger=self._is_stranger(call, error, now),
            remaining_s=remaining_s,
        )
        if verdict is Verdict.GIVE_UP or (other := self.selection.choose(call, now)) is None:
            return None
        if verdict is Verdict.RETRY and not self.budget.withdraw():
            return None
        self.num_retries += 1
        member.num_retried += 1
        return other

    def _is_stranger(self, call: Call, error: ServeAppError, now: float) -> bool:
        """Whether a server has refused a request because it does not know the sequence, which another one may."""
        return (
            bool(call.sequence_id)
            and not call.is_start
            and isinstance(error, RequestRejected | BackendFailed)  # in streams errors have no status
            and "START flag" in error.reason
            and self.selection.keeper_of(call, now) is None
        )

    def _final(self, before: ServeAppError | None, error: ServeAppError) -> ServeAppError:
        """What the caller gets if no further try is made."""
        if isinstance(error, PoolClosed):
            error = EndpointUnreachable("Triton", "the server was removed before the request was sent")
        # That one server lacks the model says little when another, which has it perhaps, could not be asked.
        return before if before is not None and isinstance(error, ModelNotFound) else error
