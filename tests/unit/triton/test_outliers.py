"""When a server is left out for a model because it does far worse than the others: never all, never on few answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.triton.model_record import ModelRecord
from serve_app.triton.outliers import MIN_ANSWERS_SLOW, MIN_OUTCOMES, is_outlier, max_outliers, slow_limit_s
from serve_app.triton.stall_watch import LATE_S, MAX_PATIENCE_S, SUSPECT_AFTER_S, is_suspicious, patience_s

records = st.builds(
    ModelRecord,
    usual_s=st.floats(0.0, 10.0),
    at=st.just(0.0),
    num_answers=st.integers(0, 100),
    num_outcomes=st.integers(0, 100),
    fault_share=st.floats(0.0, 1.0),
)


def record_of(latencies: Sequence[float | None]) -> ModelRecord:
    """A record of outcomes, half a millisecond apart; `None` is a fault."""
    record = ModelRecord(0.0, 0.0)
    for index, latency_s in enumerate(latencies):
        if latency_s is None:
            record.add_fault(now=index * 0.0005)
        else:
            record.add(latency_s, now=index * 0.0005)
    return record


def test_ten_times_slower_is_an_outlier_after_enough_answers() -> None:
    """One of three that takes 100 ms where the others take 10 is left out, but not on its first answers."""
    others = [record_of([0.010] * 50), record_of([0.011] * 50)]
    assert is_outlier(record_of([0.100] * MIN_ANSWERS_SLOW), others)
    assert not is_outlier(record_of([0.100] * (MIN_ANSWERS_SLOW - 1)), others)
    assert not is_outlier(record_of([0.025] * 50), others), "merely slower gets less, and is not left out"


def test_a_cold_start_or_a_hiccup_is_no_slowness() -> None:
    """Long first answers, and a single long one later, leave a server in."""
    others = [record_of([0.010] * 50)]
    assert not is_outlier(record_of([2.0] * 3 + [0.010] * MIN_ANSWERS_SLOW), others)
    assert not is_outlier(record_of([0.010] * MIN_ANSWERS_SLOW + [5.0]), others)


def test_fractions_of_a_millisecond_are_noise() -> None:
    """Twenty times nothing is still nothing."""
    assert not is_outlier(record_of([0.010] * 50), [record_of([0.0005] * 50)])


def test_faults_count_when_others_have_fewer() -> None:
    """A server that answers wrongly is left out; not when the model answers so everywhere."""
    bad = record_of([None] * MIN_OUTCOMES)
    assert is_outlier(bad, [record_of([0.01] * 50), None])
    assert is_outlier(bad, [None])
    assert not is_outlier(bad, [record_of([None] * 50)])
    assert not is_outlier(record_of([None] * (MIN_OUTCOMES - 1)), [None])
    assert not is_outlier(record_of([0.01, 0.01, 0.01, None] * 20), [record_of([0.01] * 50)])


@given(own=records, others=st.lists(st.none() | records, max_size=5))
def test_an_outlier_is_worse_than_somebody(own: ModelRecord, others: list[ModelRecord | None]) -> None:
    """Whatever the records say, nobody is left out alone, unheard, or when no other does better."""
    if is_outlier(own, others):
        assert others
        assert own.num_outcomes >= MIN_OUTCOMES or own.num_answers >= MIN_ANSWERS_SLOW
        limit_s = slow_limit_s(others)
        is_slow = limit_s is not None and own.usual_s > limit_s
        shares = [0.0 if o is None or o.num_outcomes < MIN_OUTCOMES else o.fault_share for o in others]
        assert is_slow or min(shares) < own.fault_share / 2


@given(num_servers=st.integers(1, 200))
def test_never_all_and_never_more_than_half(num_servers: int) -> None:
    """The only server stays, and so does one of two."""
    assert 0 <= max_outliers(num_servers) <= num_servers / 2
    assert max_outliers(num_servers) < num_servers


@pytest.mark.parametrize(
    ("silent_s", "late_s", "expected"),
    [
        (SUSPECT_AFTER_S, 0.0, True),
        (SUSPECT_AFTER_S - 0.01, 0.0, False),
        (10.0, LATE_S, False),
    ],
)
def test_silence_is_suspicious_unless_this_process_was_away(silent_s: float, late_s: float, expected: bool) -> None:
    """A process that did not run itself must not blame the servers."""
    assert is_suspicious(silent_s, late_s=late_s) is expected


def test_patience_grows_with_each_answered_ping_and_is_bounded() -> None:
    """Long calls are not a ping every moment; a server that hangs in one is still noticed soon."""
    assert [patience_s(count) for count in range(4)] == [0.3, 0.6, 1.2, 1.2]
    assert patience_s(10_000) == MAX_PATIENCE_S
    assert not is_suspicious(0.5, late_s=0.0, num_pings=1)
    assert is_suspicious(0.7, late_s=0.0, num_pings=1)
