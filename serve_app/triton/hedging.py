"""A second copy of a request that takes long, on another server; the first answer counts, the other is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from serve_app.clock import Clock
from serve_app.triton.call import Call
from serve_app.triton.delivery import Delivery


class Hedging:
    """Sends second copies.

    Each is paid for from the budget of retries, so that a fleet that is slow altogether is not asked twice for
    everything.

    Args:
        delivery: Brings both copies to their servers.
        clock: Budgets are told by it.
    """

    def __init__(self, delivery: Delivery, clock: Clock) -> None:
        self._delivery, self._clock = delivery, clock
        self.num_hedges = 0
        self.num_won = 0

    async def run(self, make: Callable[[], Call], *, after_s: float, timeout_s: float) -> Any:
        """Run a call, and a second copy of it if it has not been answered in time.

        Args:
            make: Makes the call, once for each copy. Running it twice must do no harm.
            after_s: How long the first copy is waited for, in seconds.
            timeout_s: Whole budget in seconds.

        Raises:
            ServeAppError: As `Delivery.run`; when both copies fail, what became of the first.
        """
        expires_at = self._clock.now() + timeout_s
        call = make()
        tasks = [asyncio.ensure_future(self._delivery.run(call, timeout_s=timeout_s))]
        try:
            await asyncio.wait(tasks, timeout=after_s)
            if not tasks[0].done() and (second := self._second(call, make())) is not None:
                left_s = expires_at - self._clock.now()
                tasks.append(asyncio.ensure_future(self._delivery.carry(second, timeout_s=left_s)))
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None:
                        self.num_won += task is not tasks[0]
                        return task.result()
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _second(self, call: Call, second: Call) -> Call | None:
        """The second copy, if there is another server for it and the budget allows."""
        if call.sequence_id or call.member is None:
            return None
        second.tried = (*call.tried, call.member)
        if self._delivery.selection.choose(second, self._clock.now()) is None or not self._delivery.budget.withdraw():
            return None
        self.num_hedges += 1
        return second
