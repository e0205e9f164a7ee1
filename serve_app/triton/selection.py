"""Which server gets the next try of a call: what is known of each, put before the pure choice."""

from __future__ import annotations

import random

from serve_app.errors import EndpointUnavailable, NoEndpoint, ServeAppError
from serve_app.triton.call import Call
from serve_app.triton.choice import choose, choose_for_sequence, slowness_of
from serve_app.triton.member import Member
from serve_app.triton.membership import Membership
from serve_app.triton.model_record import ModelRecord
from serve_app.triton.outliers import is_outlier, max_outliers, slow_limit_s
from serve_app.triton.sequences import SequenceTable


class Selection:
    """Chooses among the servers of a `Membership`, and leaves out those that do far worse than the others.

    Args:
        membership: The servers.
        rng: Draws among equals.
        near_calls: Calls in flight at which a near server counts as full.

    Attributes:
        sequences: Where each sequence's state is, as far as it is known.
    """

    def __init__(self, membership: Membership, *, rng: random.Random, near_calls: int) -> None:
        self._membership = membership
        self._rng, self._near_calls = rng, near_calls
        self.sequences = SequenceTable()

    def choose(self, call: Call, now: float) -> Member | None:
        """The server for the next try; `None` when there is none.

        The first try goes to a server that is known not to have the model when all are; later ones do not. Any goes to
        one that is merely slow or faulty rather than to none.
        """
        if call.sequence_id:
            return self._choose_for_sequence(call, now)
        name, members = call.model_name, self._membership.candidates
        if call.place:
            members = [m for m in members if m.endpoint.place == call.place]
        if call.tried:
            others = [m for m in members if m not in call.tried]
            members = [m for m in others if not m.is_blocked(name, now=now)]
            members = members or [m for m in others if m.is_outlier(name)]
        elif len(members) > 1 and any(m.has_blocks() for m in members):
            members = [m for m in members if not m.is_blocked(name, now=now)] or members
        if len(members) <= 1:
            return members[0] if members else None
        slowness = slowness_of([m.latency(name, now=now) for m in members])
        return choose(members, slowness, rng=self._rng, near_calls=self._near_calls)

    def choose_healthy(self, call: Call, now: float) -> Member | None:
        """The server for a call that was lost once: one that has lost no process of the model lately."""
        name, members = call.model_name, self._membership.candidates
        if call.place:
            members = [m for m in members if m.endpoint.place == call.place]
        healthy = [m for m in members if not m.is_healing(name, now=now) and not m.is_blocked(name, now=now)]
        members = healthy or [m for m in members if m.is_outlier(name)]
        return min(members, key=lambda m: m.num_in_flight) if members else None

    def _choose_for_sequence(self, call: Call, now: float) -> Member | None:
        """The server that has the sequence's state, or gets it.

        A server that joined since must not take a living sequence over. What this process has carried before, it
        knows; what another replica has carried goes where the hash says, and on from there when that server knows no
        such sequence.
        """
        if not call.is_start and (keeper := self.keeper_of(call, now)) is not None:
            return next(
                (m for m in self._membership.usable if m.endpoint.server_id == keeper and m not in call.tried), None
            )
        members = [m for m in self._membership.available if m not in call.tried]
        if call.place:
            members = [m for m in members if m.endpoint.place == call.place]
        if call.is_start:
            members = [m for m in members if not m.is_blocked(call.model_name, now=now)] or members
        if not members:
            return None
        return choose_for_sequence(members, [m.endpoint.server_id for m in members], call.sequence_id)

    def keeper_of(self, call: Call, now: float) -> str | None:
        """Id of the server that has the state of a call's sequence; `None` when this process does not know it."""
        return self.sequences.server_of(call.model_name, call.sequence_id, now=now)

    def note_sequence(self, call: Call, member: Member, now: float) -> None:
        """A server has answered a sequence's request."""
        if call.is_end:
            self.sequences.forget(call.model_name, call.sequence_id)
        else:
            self.sequences.keep(call.model_name, call.sequence_id, member.endpoint.server_id, now=now)

    def outage(self, call: Call, now: float) -> ServeAppError:
        """The error for a call for which there is no server."""
        if call.sequence_id and not call.is_start and self.keeper_of(call, now) is not None:
            return EndpointUnavailable(
                f"sequence {call.sequence_id!r} of model {call.model_name!r}",
                "the server that has its state cannot be asked now, and the state cannot be moved; "
                "start the sequence anew, or try again",
            )
        if call.place and self._membership.candidates:
            return NoEndpoint("Triton", "no server can be asked now on the machine where the shared memory is")
        return NoEndpoint("Triton", self._membership.describe_outage())

    # --- outliers -------------------------------------------------------------------------------------------

    def slow_limit_s(self, member: Member, model_name: str) -> float | None:
        """The latency from which on a server is slow for a model, by the others' answers; `None` if unknown."""
        return slow_limit_s(self._others(member, model_name))

    def is_outlier(self, member: Member, model_name: str, record: ModelRecord) -> bool:
        """Whether a server is to be left out for a model; false while as many as may be are."""
        members = self._membership.available
        others = self._others(member, model_name)
        if not is_outlier(record, others):
            return False
        num_out = sum(m.is_outlier(model_name) for m in members)
        return num_out < max_outliers(len(members)) and any(
            m is not member and not m.is_outlier(model_name) for m in members
        )

    def _others(self, member: Member, model_name: str) -> list[ModelRecord | None]:
        return [m.record(model_name) for m in self._membership.available if m is not member]
