"""Which Triton servers there are and which of them may be asked: adding, ejecting, probing and draining."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from serve_app.clock import Clock
from serve_app.endpoint import Endpoint
from serve_app.errors import EndpointStalled, EndpointUnavailable, EndpointUnreachable, ServeAppError
from serve_app.settings import ChannelSettings
from serve_app.triton.member import Member, MemberState
from serve_app.triton.pool import ChannelPool
from serve_app.triton.tls import CertificateFiles, CertificateWatch

logger = logging.getLogger(__name__)

Call = Callable[[str, Any, float], Awaitable[Any]]
"""Carries one unary control call to one server: RPC name, message, budget in seconds; raises `ServeAppError`."""

Prepare = Callable[[Endpoint, Call], Awaitable[None]]
"""Makes a server ready to be asked."""

PROBE_TIMEOUT_S = 1.0
"""How long one probe of an ejected server tries to connect and waits for an answer."""

INITIAL_PROBE_PAUSE_S = 0.1
"""Pause after the first failed probe; doubles each time. The first probe starts at once."""

MAX_PROBE_PAUSE_S = 1.0
"""Longest pause between probes."""

DRAIN_GRACE_S = 30.0
"""How long calls on a removed server may go on."""


class Membership:
    """The servers of one router, each with its pool, and the background tasks that connect, probe and drain them.

    The mutable state is `_members`, by address and server id, with a `state` on each, and `_draining`; `_available`,
    `_trusted` and `_connecting` are drawn from the first whenever it changes. All changes are made in synchronous
    functions in the event loop in which `update` is first called.

    Args:
        settings: The channels to each server.
        clock: When a server was admitted is told by it.
        local_node_id: Ray node this process runs on.
        local_zone: Zone of that node; taken from a server on the same node when empty.
        on_change: Called when the servers that may be asked have changed; what it raises is logged.
        prepare: Awaited with a server that is connected, before it may be asked; what it raises is logged.
    """

    def __init__(
        self,
        settings: ChannelSettings,
        *,
        clock: Clock,
        local_node_id: str,
        local_zone: str,
        on_change: Callable[[], None] | None,
        prepare: Prepare | None = None,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._local_node_id, self._local_zone = local_node_id, local_zone
        self._on_change = on_change
        self._prepare = prepare
        self._files = None if settings.tls is None else CertificateFiles(settings.tls)
        self._watch = None
        if self._files is not None and settings.tls is not None:
            interval_s = settings.tls.reload_interval_s
            self._watch = CertificateWatch(self._files, interval_s=interval_s, on_change=self.expire_connections)
        self._members: dict[tuple[str, str], Member] = {}
        self._draining: dict[asyncio.Task[None], Member] = {}
        self._probes: dict[Member, asyncio.Task[None]] = {}
        self._available: list[Member] = []
        self._trusted: list[Member] = []
        self._connecting: list[Member] = []
        self.num_ejections = 0

    # --- looking at it ------------------------------------------------------------------------------------

    @property
    def candidates(self) -> list[Member]:
        """The servers to choose from: those that are available, those that may hang last; or those that connect."""
        return self._trusted or self._available or self._connecting

    @property
    def available(self) -> list[Member]:
        """The servers that are available, those that may hang included; or those that connect."""
        return self._available or self._connecting

    @property
    def usable(self) -> list[Member]:
        """The servers that are not ejected."""
        return [*self._available, *self._connecting]

    @property
    def num_available(self) -> int:
        """Servers that are not ejected."""
        return len(self._available) + len(self._connecting)

    @property
    def members(self) -> list[Member]:
        """Every server, removed ones that still drain included."""
        return [*self._members.values(), *self._draining.values()]

    @property
    def current(self) -> list[Member]:
        """Every server that has not been removed."""
        return list(self._members.values())

    def describe_outage(self) -> str:
        """Why nobody can be asked now, in one sentence."""
        if not self._members:
            return "no server is known"
        reasons = "; ".join(sorted({member.reason for member in self._members.values() if member.reason})[:4])
        return f"none of {len(self._members)} servers can be reached ({reasons})"

    # --- the set ------------------------------------------------------------------------------------------

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Make these the servers; see `Router.update`."""
        wanted = {(endpoint.address, endpoint.server_id): endpoint for endpoint in endpoints}
        for key in [key for key in self._members if key not in wanted]:
            self._remove(key)
        zone = self._local_zone or self._find_zone(endpoints)
        for key, endpoint in wanted.items():
            member = self._members.get(key)
            if member is None:
                member = self._add(key, endpoint)
            member.endpoint = endpoint
            member.distance = self._distance(endpoint, zone)
        self._refresh()

    def _add(self, key: tuple[str, str], endpoint: Endpoint) -> Member:
        if self._watch is not None:
            self._watch.start()
        pool = ChannelPool(endpoint, self._settings, clock=self._clock, files=self._files)
        pool.open()
        member = self._members[key] = Member(endpoint, pool)
        self._start_probe(member)
        return member

    def expire_connections(self) -> None:
        """Have every server's calls use new connections from now on; those under way finish on the old ones."""
        for member in self._members.values():
            member.pool.expire_connections()

    def _remove(self, key: tuple[str, str]) -> None:
        member = self._members.pop(key)
        member.state = MemberState.DRAINING
        if (probe := self._probes.pop(member, None)) is not None:
            probe.cancel()
        drain = asyncio.ensure_future(member.pool.aclose(grace_s=DRAIN_GRACE_S))
        self._draining[drain] = member
        drain.add_done_callback(lambda done: self._draining.pop(done, None))

    def _find_zone(self, endpoints: Sequence[Endpoint]) -> str:
        here = [e.zone for e in endpoints if e.zone and e.node_id and e.node_id == self._local_node_id]
        return here[0] if here else ""

    def _distance(self, endpoint: Endpoint, zone: str) -> int:
        if endpoint.node_id and endpoint.node_id == self._local_node_id:
            return 0
        return 1 if endpoint.zone and endpoint.zone == zone else 2

    def _refresh(self) -> None:
        """Draw the lists for the choice anew, and tell if they have changed."""
        before = (self._available, self._connecting)
        self._available = [m for m in self._members.values() if m.state is MemberState.AVAILABLE]
        self._trusted = [m for m in self._available if not m.is_suspect]
        self._connecting = [m for m in self._members.values() if m.state is MemberState.CONNECTING]
        if self._on_change is not None and before != (self._available, self._connecting):
            try:
                self._on_change()
            except Exception:
                logger.exception("the listener to changes of the Triton servers failed")

    # --- ejection and probes ------------------------------------------------------------------------------

    def eject(self, member: Member, error: ServeAppError, *, started_at: float) -> None:
        """Stop asking a server that a call could not reach, or lost, and start to probe it.

        Callers that wait for one of its channels get `EndpointUnreachable`; calls under way go on.

        Args:
            member: The server.
            error: How the call ended.
            started_at: When the call started; one from before the server last came back says nothing about now.
        """
        if member.state is not MemberState.AVAILABLE or started_at < member.admitted_at:
            return
        self._set_ejected(member, error)
        self._start_probe(member)

    def eject_stalled(self, member: Member, error: ServeAppError) -> bool:
        """Stop asking a server that gives no sign of life, and give up what is on it and safe to send again.

        Args:
            member: The server.
            error: How it was found.

        Returns:
            False if it stays, since there is no other.
        """
        if member.state is not MemberState.AVAILABLE:
            return True
        if len(self._available) < 2:
            return False
        member.num_stalls += 1
        stalled = EndpointStalled(f"Triton at {member.endpoint.address}", f"it gives no sign of life ({error})")
        self._set_ejected(member, stalled)
        member.pool.abandon_calls(stalled)
        self._start_probe(member)
        return True

    def set_suspect(self, member: Member, is_suspect: bool) -> None:
        """Prefer others to a server that may hang, or no longer."""
        member.is_suspect = is_suspect
        self._trusted = [m for m in self._available if not m.is_suspect]

    def _set_ejected(self, member: Member, error: ServeAppError) -> None:
        reason = str(error)
        if member.state not in (MemberState.EJECTED, MemberState.DRAINING):
            logger.warning("Triton at %s is not asked for now: %s", member.endpoint.address, reason)
            member.eject(reason)
            self.num_ejections += 1
            member.pool.fail_waiting(EndpointUnreachable(f"Triton at {member.endpoint.address}", reason))
            self._refresh()

    def _start_probe(self, member: Member) -> None:
        if member not in self._probes:
            probe = self._probes[member] = asyncio.ensure_future(self._probe(member))
            probe.add_done_callback(lambda done: self._probes.pop(member, None))

    async def _probe(self, member: Member) -> None:
        """Connect a server's channels, again and again until it works, and admit it."""
        pause_s = INITIAL_PROBE_PAUSE_S
        while member.state is not MemberState.DRAINING:
            is_new = member.state is MemberState.CONNECTING
            timeout_s = self._settings.connect_timeout_s if is_new else PROBE_TIMEOUT_S
            try:
                await member.pool.warm_up(timeout_s=timeout_s, wait_for_ready=not is_new)
                await self._make_ready(member)
            except ServeAppError as error:
                self._set_ejected(member, error)
            except Exception as error:
                logger.exception("the probe of Triton at %s failed in an unforeseen way", member.endpoint.address)
                self._set_ejected(member, EndpointUnavailable("probe", f"{type(error).__name__}: {error}"))
            else:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PROBE_PAUSE_S)
        if member.state is MemberState.DRAINING:
            return
        if member.num_ejections:
            logger.info("Triton at %s is asked again", member.endpoint.address)
        member.admit(now=self._clock.now())
        self._refresh()

    async def _make_ready(self, member: Member) -> None:
        """Have a connected server prepared.

        Raises:
            EndpointUnavailable: It was lost meanwhile.
        """

        async def call(rpc_name: str, message: Any, timeout_s: float) -> Any:
            return await member.pool.call(rpc_name, lambda left_s: message, timeout_s=timeout_s)

        if self._prepare is not None:
            try:
                await self._prepare(member.endpoint, call)
            except EndpointUnavailable:
                raise
            except Exception:
                logger.exception("Triton at %s is asked although it could not be prepared", member.endpoint.address)

    # --- closing ------------------------------------------------------------------------------------------

    async def aclose(self, *, grace_s: float) -> None:
        """Stop probing; close every pool, those that drain included. `hasten` cuts it short."""
        if self._watch is not None:
            await self._watch.aclose()
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        for member in self._members.values():
            member.state = MemberState.DRAINING  # calls that are cut off now start no new probe, which would open it
        closing = [member.pool.aclose(grace_s=grace_s) for member in self._members.values()]
        timer = asyncio.get_running_loop().call_later(grace_s, self.hasten)  # those that drain were given longer
        await asyncio.gather(*probes, *self._draining, *closing, return_exceptions=True)
        timer.cancel()

    def hasten(self) -> None:
        """Make an `aclose` that waits for running calls cut them off now."""
        for member in self.members:
            member.pool.hasten()
