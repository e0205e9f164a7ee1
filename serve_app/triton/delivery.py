"""How one call finds its way: choose a server, try it, note how it went, and try another where that is right."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from serve_app.clock import Clock
from serve_app.errors import (
    EndpointUnavailable,
    EndpointUnreachable,
    ModelNotFound,
    ModelNotReady,
    NoEndpoint,
    PoolClosed,
    ServeAppError,
)
from serve_app.triton.choice import choose, choose_for_sequence, slowness_of
from serve_app.triton.member import Member
from serve_app.triton.membership import Membership
from serve_app.triton.pool import Build
from serve_app.triton.retry import RetryBudget, Verdict, is_loss, judge


@dataclass(slots=True)
class Call:
    """One call on its way through the servers.

    Attributes:
        rpc_name: For example `ModelInfer`.
        build: Makes the request message.
        model_name: The model it is about; empty for calls that concern the server.
        model_version: The version it is about.
        sequence_id: Sequence it belongs to; empty for none.
        tried: Servers that failed it.
        num_losses: Tries that ended with a dead server or model process.
    """

    rpc_name: str
    build: Build
    model_name: str = ""
    model_version: str = ""
    sequence_id: str = ""
    tried: tuple[Member, ...] = ()
    num_losses: int = 0

    @property
    def is_inference(self) -> bool:
        """Whether its result tells how well a server serves the model."""
        return self.rpc_name == "ModelInfer"


class Delivery:
    """Brings calls to the servers of a `Membership`.

    Args:
        membership: The servers; told when a call could not reach one.
        budget: Bounds the retries.
        clock: Budgets and pauses are told by it.
        rng: Draws among equals.
        near_calls: Calls in flight at which a near server counts as full.
    """

    def __init__(
        self, membership: Membership, budget: RetryBudget, *, clock: Clock, rng: random.Random, near_calls: int
    ) -> None:
        self._membership, self.budget = membership, budget
        self._clock, self._rng, self._near_calls = clock, rng, near_calls
        self.num_done = self.num_failed = self.num_retries = 0

    async def run(self, call: Call, *, timeout_s: float) -> Any:
        """Try servers until one answers, or until the failure is final.

        Raises:
            NoEndpoint: No server may be asked now.
            ServeAppError: How the last try ended.
        """
        self.budget.deposit()
        now = self._clock.now()
        expires_at = now + timeout_s
        member, failure = self._choose(call, now), None
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
        self.num_failed += 1
        raise failure or NoEndpoint("Triton", self._membership.describe_outage())

    async def attempt(self, member: Member, call: Call, *, now: float, timeout_s: float) -> Any:
        """One call on one server; its outcome goes on the server's record."""
        name = call.model_name
        if call.is_inference:
            member.begin(name)
        try:
            answer = await member.pool.call(
                call.rpc_name, call.build, timeout_s=timeout_s, model_name=name, model_version=call.model_version
            )
        except EndpointUnavailable as error:
            self._membership.eject(member, error, started_at=now)
            raise
        except (ModelNotReady, ModelNotFound):
            if call.is_inference:
                member.block(name, now=self._clock.now())
            raise
        else:
            if call.is_inference:
                member.succeed(name, started_at=now, now=self._clock.now())
            return answer
        finally:
            if call.is_inference:
                member.abandon(name)

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
        member, failure, has_begun = self._choose(call, now), None, False
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
        raise failure or NoEndpoint("Triton", self._membership.describe_outage())

    async def _attempt_stream(
        self, member: Member, call: Call, now: float, response_timeout_s: float, timeout_s: float | None
    ) -> AsyncGenerator[Any, None]:
        """One stream on one server; its outcome goes on the server's record, but not how long it took."""
        name = call.model_name
        member.begin(name)
        try:
            async with contextlib.aclosing(
                member.pool.stream(
                    call.build,
                    response_timeout_s=response_timeout_s,
                    timeout_s=timeout_s,
                    model_name=name,
                    model_version=call.model_version,
                )
            ) as answers:
                async for answer in answers:
                    yield answer
        except EndpointUnavailable as error:
            self._membership.eject(member, error, started_at=now)
            raise
        except (ModelNotReady, ModelNotFound):
            member.block(name, now=self._clock.now())
            raise
        else:
            member.unblock(name)
        finally:
            member.abandon(name)

    # --- decisions ----------------------------------------------------------------------------------------

    def _choose(self, call: Call, now: float) -> Member | None:
        """The server for the next try; `None` when there is none.

        The first try goes to a server that is known not to have the model when all are; later ones do not.
        """
        name, members = call.model_name, self._membership.candidates
        if call.tried:
            members = [m for m in members if m not in call.tried and not m.is_blocked(name, now=now)]
        elif len(members) > 1 and any(m.has_blocks() for m in members):
            members = [m for m in members if not m.is_blocked(name, now=now)] or members
        if len(members) <= 1:
            return members[0] if members else None
        if call.sequence_id:
            return choose_for_sequence(members, [m.endpoint.server_id for m in members], call.sequence_id)
        slowness = slowness_of([m.latency(name, now=now) for m in members])
        return choose(members, slowness, rng=self._rng, near_calls=self._near_calls)

    def _next(
        self, member: Member, call: Call, error: ServeAppError, *, now: float, remaining_s: float
    ) -> Member | None:
        """The server for another try after `error`; `None` when the error is final."""
        call.tried = (*call.tried, member)
        call.num_losses += is_loss(error)
        is_sequence = bool(call.sequence_id)
        verdict = judge(error, num_losses=call.num_losses, is_sequence=is_sequence, remaining_s=remaining_s)
        if verdict is Verdict.GIVE_UP or (other := self._choose(call, now)) is None:
            return None
        if verdict is Verdict.RETRY and not self.budget.withdraw():
            return None
        self.num_retries += 1
        member.num_retried += 1
        return other

    def _final(self, before: ServeAppError | None, error: ServeAppError) -> ServeAppError:
        """What the caller gets if no further try is made."""
        if isinstance(error, PoolClosed):
            error = EndpointUnreachable("Triton", "the server was removed before the request was sent")
        # That one server lacks the model says little when another, which has it perhaps, could not be asked.
        return before if before is not None and isinstance(error, ModelNotFound) else error
