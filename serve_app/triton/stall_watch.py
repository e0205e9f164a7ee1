"""Notices servers that hang: their connections stand and nothing comes from them."""

from __future__ import annotations

import asyncio

from serve_app.clock import Clock
from serve_app.errors import ServeAppError
from serve_app.triton.member import Member, MemberState
from serve_app.triton.membership import Membership

SUSPECT_AFTER_S = 0.3
"""Silence of a server with calls under way after which it is asked for a sign of life."""

MAX_PATIENCE_S = 1.2
"""Longest such silence: it doubles with each answered ping, so that long calls do not cost a ping every moment."""

PING_TIMEOUT_S = 0.4
"""How long it has for that, over a connection of its own; a server under full load answers in milliseconds."""

MAX_PINGS = 2
"""Pings in a row that must stay unanswered: on a machine that has far too much to do, one may."""

TICK_S = 0.1
"""Pause between two looks at all servers, while any call is under way."""

LATE_S = 0.2
"""Delay of this process's own timers from which on a silence may be its own fault and does not count."""

LAST_PAUSE_S = 0.2
"""Pause between two pings of a server that hangs and stays in use, because there is no other."""


def patience_s(num_pings: int) -> float:
    """How long a server may be silent that has answered so many pings, and nothing else, one after the other."""
    return min(SUSPECT_AFTER_S * 2.0 ** min(num_pings, 8), MAX_PATIENCE_S)


def is_suspicious(silent_s: float, *, late_s: float, num_pings: int = 0) -> bool:
    """Whether a server is to be asked for a sign of life.

    Args:
        silent_s: For how long nothing has come from it although calls were under way.
        num_pings: How many pings in a row have been all that came from it.
        late_s: By how much this look is late: time in which this process did not run says nothing about the server.
    """
    return late_s < LATE_S and silent_s >= patience_s(num_pings)


class StallWatch:
    """Watches the servers of a `Membership` while calls are under way, and ejects those that hang.

    A long call is no silence of the server: one that answers the ping is left in peace for a while. While it is asked,
    others are preferred. The last one that may be asked stays in use.

    Args:
        membership: The servers.
        clock: Silence is told by it.
    """

    def __init__(self, membership: Membership, clock: Clock) -> None:
        self._membership, self._clock = membership, clock
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._checks: dict[Member, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Watch, until no call is under way any more; called whenever a call sets out."""
        if self._timer is None:
            self._arm()

    def suspect(self, member: Member) -> None:
        """Ask a server for a sign of life now, if there is another to use instead."""
        if len(self._membership.available) > 1 and member.state is MemberState.AVAILABLE and member not in self._checks:
            check = self._checks[member] = asyncio.ensure_future(self._check(member))
            check.add_done_callback(lambda done: self._checks.pop(member, None))

    async def aclose(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
        checks = list(self._checks.values())
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)

    def _arm(self) -> None:
        self._due_at = self._clock.now() + TICK_S
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock.now()
        is_busy = False
        for member in self._membership.current:
            if member.num_out:
                is_busy = True
                if now - self._due_at >= LATE_S:
                    member.heard_at = now
                elif is_suspicious(member.silent_s(now=now), late_s=now - self._due_at, num_pings=member.num_pings):
                    self.suspect(member)
        if is_busy:
            self._arm()

    async def _check(self, member: Member) -> None:
        """Ask a server until it has answered, is ejected, or has nothing left to do."""
        self._membership.set_suspect(member, True)
        num_lost = 0
        try:
            while member.state is MemberState.AVAILABLE:
                asked_at = self._clock.now()
                try:
                    await member.pool.ask_apart(timeout_s=PING_TIMEOUT_S)
                except ServeAppError as error:
                    if self._clock.now() - asked_at >= PING_TIMEOUT_S + LATE_S:
                        continue
                    if member.heard_at > asked_at:
                        return
                    num_lost += 1
                    if num_lost < MAX_PINGS:
                        continue
                    if self._membership.eject_stalled(member, error) or not member.num_out:
                        return
                    await asyncio.sleep(LAST_PAUSE_S)
                else:
                    member.answer_ping(now=self._clock.now())
                    return
        finally:
            self._membership.set_suspect(member, False)
