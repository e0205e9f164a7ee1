"""The least time in which each model has lately answered: what a budget must at least be for a call to make sense."""

from __future__ import annotations

WINDOW_S = 10.0
"""An answer counts for one to two windows, so that a model that has become faster is not refused for long."""

MARGIN = 0.5
"""Part of the fastest answer's time below which a budget is hopeless; above it, there may be luck."""

MAX_MODELS = 1024
"""Models that are remembered."""


class FastestAnswers:
    """Least latencies by model, over all servers."""

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._turned_at = 0.0

    def add(self, model_name: str, latency_s: float, *, now: float) -> None:
        """Take one more answer in."""
        self._turn(now)
        known_s = self._now.get(model_name)
        if (known_s is None and len(self._now) < MAX_MODELS) or (known_s is not None and latency_s < known_s):
            self._now[model_name] = latency_s

    def is_hopeless(self, model_name: str, timeout_s: float, *, now: float) -> bool:
        """Whether a call with this budget would end without an answer in all likelihood."""
        self._turn(now)
        times = [times[model_name] for times in (self._now, self._before) if model_name in times]
        return bool(times) and timeout_s < MARGIN * min(times)

    def _turn(self, now: float) -> None:
        if now - self._turned_at >= WINDOW_S:
            is_next = now - self._turned_at < 2 * WINDOW_S
            self._before = self._now if is_next else {}
            self._now, self._turned_at = {}, now
