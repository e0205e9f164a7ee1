"""Telling a cancelled task from a cancelled call: gRPC raises `CancelledError` for both."""

from __future__ import annotations

import asyncio


def is_task_cancelled() -> bool:
    """Whether the running task itself was told to cancel; always false before Python 3.11, which does not say."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is not None and cancelling() > 0
