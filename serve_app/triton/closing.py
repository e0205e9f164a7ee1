"""How a resource is closed when the one who closes it may be cancelled: never halfway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


async def finish(closing: asyncio.Task[None], hasten: Callable[[], None]) -> None:
    """Wait until `closing` is done, whatever happens to the waiting task.

    Args:
        closing: The task that closes; it must end soon after `hasten` was called.
        hasten: Called when the waiting task is cancelled, so that what closes politely now closes at once.

    Raises:
        asyncio.CancelledError: The waiting task was cancelled; `closing` is done all the same.
    """
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        hasten()
        while not closing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(closing)
        raise
