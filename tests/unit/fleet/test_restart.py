"""Restart decisions: pauses, their cap, the limit, and when the count begins anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.fleet.restart import RestartState, decide_restart
from serve_app.settings import RestartSettings

SETTINGS = RestartSettings(initial_backoff_s=0.1, max_backoff_s=1.0, reset_after_s=60.0, max_restarts=6)


def pauses(lives_s: list[float], settings: RestartSettings = SETTINGS) -> list[float | None]:
    """Pauses after lives of these lengths, up to the last."""
    state, result = RestartState(), []
    for lived_s in lives_s:
        decision = decide_restart(settings, state, lived_s=lived_s)
        state = decision.state
        result.append(decision.backoff_s)
        if decision.backoff_s is None:
            break
    return result


def test_pauses_double_up_to_the_cap_until_the_limit() -> None:
    """A crash loop is retried with growing pauses, and given up after `max_restarts`."""
    assert pauses([0.0] * 9) == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, None]


def test_a_long_life_begins_anew() -> None:
    """A server that ran well for `reset_after_s` is restarted at once again, however often it fell before."""
    assert pauses([0.0, 0.0, 60.0, 59.9]) == [0.1, 0.2, 0.1, 0.2]


def test_no_restarts_at_all() -> None:
    """`max_restarts: 0` gives up at the first end, even after a long life."""
    assert pauses([1000.0], RestartSettings(max_restarts=0)) == [None]


@given(st.integers(0, 5000), st.floats(0.0, 1e6))
def test_pauses_stay_within_their_bounds(num_restarts: int, lived_s: float) -> None:
    """No number of restarts makes a pause negative, longer than the cap, or an overflow."""
    settings = RestartSettings(max_restarts=10_000)
    decision = decide_restart(settings, RestartState(num_restarts), lived_s=lived_s)
    assert decision.backoff_s is not None
    assert 0 <= decision.backoff_s <= settings.max_backoff_s
