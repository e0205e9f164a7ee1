"""Whether a replica still works, as far as it can tell from its own counts; a pure function of two looks at them."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.runner import RunnerStatistics
from serve_app.triton.router_statistics import RouterStatistics

STALL_S = 60.0
"""Twice the default budget of a request: by then whatever waited has been answered or has expired, in a replica that
works."""


class Pulse:
    """Remembers since when a batcher or the pools have made no progress although they could.

    That servers are gone, slow or hung is no fault of a replica's: requests then wait with all permits or all channels
    taken, or fail. A replica has a fault when it neither works nor waits for anybody.

    Args:
        stall_s: How long that may last.
    """

    def __init__(self, *, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._stalled: dict[str, tuple[int, float]] = {}

    def faults(self, models: Mapping[str, RunnerStatistics], router: RouterStatistics, *, now: float) -> list[str]:
        """What has stood still for too long, each as a sentence; to be asked every few seconds.

        Args:
            models: Each model's counts, by name.
            router: Those of the router.
            now: Seconds on any clock that only goes on.
        """
        standing: dict[str, int] = {}
        for name, runner in models.items():
            dispatcher = runner.dispatcher
            if dispatcher.num_waiting_requests and dispatcher.num_batches_in_flight < dispatcher.num_permits:
                text = f"the batcher of model {name!r} sends nothing though requests wait and permits are free"
                standing[text] = dispatcher.counters.num_batches_sent
        if router.num_waiting and not router.num_active:
            text = "requests wait for a channel though none is in use"
            standing[text] = router.num_done + router.num_failed
        before, self._stalled = self._stalled, {}
        for text, progress in standing.items():
            seen, since = before.get(text, (progress, now))
            self._stalled[text] = (progress, since if seen == progress else now)
        return [text for text, (_, since) in self._stalled.items() if now - since >= self._stall_s]
