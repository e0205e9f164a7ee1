"""One call to every server, for what has to be the same on all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from serve_app.clock import Clock
from serve_app.errors import ServeAppError
from serve_app.protocol.server_answers import ServerAnswer
from serve_app.triton.call import Call
from serve_app.triton.delivery import Delivery
from serve_app.triton.member import Member


async def ask_each(
    delivery: Delivery, members: Sequence[Member], call: Call, *, clock: Clock, timeout_s: float
) -> list[ServerAnswer]:
    """Carry one call to each of some servers, at the same time; errors are answers too.

    Args:
        delivery: Carries each; told nothing beyond what any call tells it.
        members: The servers, ejected ones too: a call that fails at once is the proof that they are away.
        call: The call.
        clock: Of the router.
        timeout_s: Budget of each in seconds.
    """

    async def ask(member: Member) -> ServerAnswer:
        try:
            message: Any = await delivery.attempt(member, call, now=clock.now(), timeout_s=timeout_s)
        except ServeAppError as error:
            return ServerAnswer(member.endpoint, error=error)
        return ServerAnswer(member.endpoint, message)

    return list(await asyncio.gather(*(ask(member) for member in members)))
