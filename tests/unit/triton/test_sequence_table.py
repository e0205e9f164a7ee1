"""Where sequences are: remembered while they live, forgotten when they end, bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.triton.fastest import WINDOW_S, FastestAnswers
from serve_app.triton.sequences import IDLE_S, SequenceTable


def test_a_sequence_is_remembered_until_it_ends_or_falls_silent() -> None:
    """By model and id; the last answer counts."""
    table = SequenceTable()
    table.keep("m", "1", "a", now=0.0)
    table.keep("n", "1", "b", now=0.0)
    assert (table.server_of("m", "1", now=1.0), table.server_of("n", "1", now=1.0)) == ("a", "b")
    assert table.server_of("m", "2", now=1.0) is None
    table.forget("m", "1")
    assert table.server_of("m", "1", now=1.0) is None
    assert table.server_of("n", "1", now=IDLE_S) is None
    assert repr(table) == "<SequenceTable 1 sequences>"


@given(ids=st.lists(st.integers(0, 20), max_size=60))
def test_the_latest_are_kept(ids: list[int]) -> None:
    """However many sequences clients begin and never end, a bounded number is remembered: those used last."""
    table = SequenceTable(max_sequences=5)
    for index, number in enumerate(ids):
        table.keep("m", str(number), f"s{number}", now=float(index))
    latest = list(dict.fromkeys(reversed(ids)))[:5]
    assert len(table) == len(latest)
    assert all(table.server_of("m", str(number), now=float(len(ids))) == f"s{number}" for number in latest)


def test_a_hopeless_budget_is_told_by_what_was_lately_fastest() -> None:
    """Less than half the fastest answer of the last windows; forgotten when nothing was answered since."""
    fastest = FastestAnswers()
    assert not fastest.is_hopeless("m", 0.001, now=0.0)
    fastest.add("m", 0.5, now=0.0)
    fastest.add("m", 0.1, now=1.0)
    assert fastest.is_hopeless("m", 0.049, now=1.0)
    assert not fastest.is_hopeless("m", 0.051, now=1.0)
    assert not fastest.is_hopeless("other", 0.001, now=1.0)
    assert fastest.is_hopeless("m", 0.049, now=1.5 * WINDOW_S)
    assert not fastest.is_hopeless("m", 0.049, now=2.5 * WINDOW_S)
