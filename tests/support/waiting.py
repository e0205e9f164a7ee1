"""Waiting for a condition, with a bound and a telling failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def wait_until(
    condition: Callable[[], bool], *, timeout_s: float, what: Callable[[], object] = lambda: "the condition"
) -> None:
    """Ask again and again until it holds; the calls run in a thread, so that the loop goes on.

    Raises:
        AssertionError: It did not hold in time; says `what()`.
    """
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what()}"
        await asyncio.sleep(0.05)


def wait_until_sync(condition: Callable[[], bool], *, timeout_s: float, what: object = "the condition") -> None:
    """`wait_until` for tests without a loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.05)
