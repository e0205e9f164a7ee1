"""Whether, and after which pause, something that ended by itself is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.settings import RestartSettings


@dataclass(frozen=True, slots=True)
class RestartState:
    """What earlier lives leave behind.

    Attributes:
        num_restarts: Restarts since the last life that was long enough to count as healthy.
    """

    num_restarts: int = 0


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """What to do after a life ended.

    Attributes:
        backoff_s: Pause before the next life; `None` where the limit is reached and there is none.
        state: To be passed with the next end.
    """

    backoff_s: float | None
    state: RestartState


def decide_restart(settings: RestartSettings, state: RestartState, *, lived_s: float) -> RestartDecision:
    """Decide after a life that ended by itself.

    The pause doubles with each restart from `initial_backoff_s` to `max_backoff_s`. A life of `reset_after_s` or
    more starts the count anew. The `max_restarts + 1`-th end in a row without such a life is the last.

    Args:
        settings: The limits.
        state: From the previous decision.
        lived_s: Seconds the life that ended was ready; zero where it never was.
    """
    before = 0 if lived_s >= settings.reset_after_s else state.num_restarts
    if before >= settings.max_restarts:
        return RestartDecision(None, RestartState(before))
    # An exponent beyond 60 would overflow a float long after the cap is reached.
    backoff_s = min(settings.max_backoff_s, settings.initial_backoff_s * 2.0 ** min(before, 60))
    return RestartDecision(backoff_s, RestartState(before + 1))
