"""The judgement of the fault suite: it tells right answers from others', and broken promises from kept ones."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.chaos.report import Promise, broken_promises, row_of
from tests.chaos.soak import Holdings, grown
from tests.chaos.traffic import Ended, Outcome, judge, payload


def test_payloads_tell_their_callers_apart() -> None:
    """An own row is right; another caller's, an older one of its own, and all else are each told."""
    sent = payload(3, 7)
    assert judge(sent, payload(3, 7)) is Outcome.OK
    assert judge(sent, payload(4, 7)) is Outcome.CROSSED
    assert judge(sent, payload(3, 6)) is Outcome.WRONG
    assert judge(sent, sent[:, :1]) is Outcome.WRONG
    assert judge(sent, np.full_like(sent, np.nan)) is Outcome.WRONG
    assert judge(sent, np.zeros((0, 2), np.float32)) is Outcome.WRONG


def test_payloads_are_exact_and_unique() -> None:
    """In FP32, to the last turn of the last caller."""
    values = [float(payload(caller, turn)[0, 0]) for caller in (0, 1, 199) for turn in (0, 1, 61_439)]
    assert len(set(values)) == len(values)
    assert max(values) < 2**24


@pytest.mark.parametrize("outcome", [Outcome.WRONG, Outcome.CROSSED, Outcome.HUNG, Outcome.LOST, Outcome.TYPED])
def test_a_hidden_fault_shows_nothing(outcome: Outcome) -> None:
    """One request that ended otherwise than well breaks the promise."""
    ended = [Ended(Outcome.OK, "", 1.0, 1.1), Ended(outcome, "HTTP 503", 1.0, 1.2)]
    row = row_of("a fault", ended, times=1, began_at=1.0, over_at=1.0)
    assert broken_promises(row, Promise()) == [f"1 {outcome.value}"]


def test_a_visible_fault_may_show_errors() -> None:
    """Typed ones always, lost ones where connections die; wrong answers never."""
    ended = [Ended(outcome, "", 1.0, 1.2) for outcome in Outcome]
    row = row_of("a fault", ended, times=1, began_at=1.0, over_at=1.0)
    assert broken_promises(row, Promise(is_hidden=False)) == ["1 wrong", "1 crossed", "1 hung", "1 lost"]
    assert broken_promises(row, Promise(is_hidden=False, may_lose=True)) == ["1 wrong", "1 crossed", "1 hung"]


def test_recovery_counts_from_the_end_of_the_fault() -> None:
    """To the last bad or slow answer; on an overloaded machine it may take as much longer; no answer is no recovery."""
    ended = [
        Ended(Outcome.TYPED, "HTTP 503", 1.0, 9.0),
        Ended(Outcome.OK, "", 10.0, 12.5),
        Ended(Outcome.OK, "", 13.0, 13.1),
    ]
    row = row_of("a fault", ended, times=1, began_at=1.0, over_at=5.0)
    assert row.recovery_s == 7.5
    promise = Promise(is_hidden=False, recovery_s=5.0)
    assert broken_promises(row, promise) == ["recovery took 7.5 s, not 5 s"]
    assert broken_promises(row, promise, load_factor=2.0) == []
    nothing = row_of("a fault", [], times=1, began_at=1.0, over_at=1.0)
    assert nothing.counts == Counter()
    assert broken_promises(nothing, promise) == ["nothing was answered"]


def test_growth_is_seen_and_noise_is_not() -> None:
    """A leak of a third over the run is told by name; a wobble around the same value is not."""
    flat = [Holdings(100 + number % 3, 50, 20, 5, 9) for number in range(30)]
    assert grown(flat) == []
    leaking = [Holdings(100, 50 + number, 20, 5, 9) for number in range(30)]
    assert grown(leaking) == ["num_descriptors grew from 55 to 75"]
