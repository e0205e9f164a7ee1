"""Which parts of a failed batch are sent again, and what each caller is told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.batching.isolation import Isolation, error_for_caller, is_one_requests_fault, max_extra_calls
from serve_app.clock import Deadline
from serve_app.errors import (
    BackendFailed,
    DeadlineExceeded,
    EndpointUnavailable,
    InvalidRequest,
    ModelNotReady,
    NoEndpoint,
    Overloaded,
    PoolTimeout,
    RequestCancelled,
    RequestTooLarge,
    ServeAppError,
)


def isolate(num_members: int, guilty: set[int]) -> tuple[list[int], int]:
    """Those who stood alone when they failed, and the calls it took beyond the first."""
    isolation = Isolation(list(range(num_members)))
    seen: list[int] = []
    alone: list[int] = []
    num_calls = 0
    while (part := isolation.next_part()) is not None:
        num_calls += 1
        if not guilty.intersection(part):
            seen += part
        elif len(part) == 1:
            alone += part
        else:
            isolation.narrow(part)
    assert sorted(seen + alone) == list(range(num_members))
    return alone, num_calls - 1


@given(st.integers(1, 130), st.data())
def test_only_the_guilty_fail_and_the_calls_are_bounded(num_members: int, data: st.DataObject) -> None:
    """Everyone else is answered, whoever and how many are guilty, in at most n + 2 ceil(log2 n) more calls."""
    guilty = data.draw(st.sets(st.integers(0, num_members - 1)))
    alone, num_extra_calls = isolate(num_members, guilty)
    assert set(alone) == guilty
    assert num_extra_calls <= max_extra_calls(num_members)


@pytest.mark.parametrize("num_members", [2, 3, 8, 33, 64])
def test_one_guilty_costs_a_halving(num_members: int) -> None:
    """One bad request among n costs at most 2 ceil(log2 n) calls, wherever it stands."""
    for guilty in range(num_members):
        alone, num_extra_calls = isolate(num_members, {guilty})
        assert alone == [guilty]
        assert num_extra_calls <= 2 * math.ceil(math.log2(num_members))


def test_a_batch_that_is_broken_throughout_costs_little_more_than_one_by_one() -> None:
    """A broken model does not see twice the calls that unmerged requests would have made."""
    _, num_extra_calls = isolate(64, set(range(64)))
    assert num_extra_calls <= 64 + 12


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BackendFailed("m", "raised"), True),
        (InvalidRequest("f", "a", "b"), True),
        (RequestTooLarge("response", 9, 8), True),
        (KeyError("f"), True),
        (EndpointUnavailable("e", "gone"), False),
        (ModelNotReady("m", "loading"), False),
        (NoEndpoint("m", "none"), False),
        (Overloaded("m", "full"), False),
        (DeadlineExceeded("x", 1.0), False),
        (PoolTimeout("x", 1.0), False),
        (RequestCancelled(), False),
    ],
)
def test_what_is_nobodys_fault_is_not_tried_again(error: Exception, expected: bool) -> None:
    """A lost server or a spent budget would only fail again; a bad request may be one of many."""
    assert is_one_requests_fault(error) is expected


class Stubborn(ServeAppError):
    """An error that breaks the rule that all arguments go to `super`."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def test_every_caller_gets_an_error_of_its_own() -> None:
    """Copies keep class, text and attributes, and never share a traceback."""
    error = Overloaded("m", "full", 3.0)
    try:
        raise error
    except Overloaded:
        copies = [error_for_caller(error, Deadline(9.0, 5.0), model_name="m") for _ in range(2)]
    assert copies[0] is not copies[1]
    for copied in copies:
        assert isinstance(copied, Overloaded)
        assert (str(copied), copied.retry_after_s, copied.__traceback__) == (str(error), 3.0, None)


def test_a_deadline_is_told_in_the_callers_own_budget() -> None:
    """The batch had the longest budget of its members; each is told its own."""
    error = error_for_caller(PoolTimeout("waiting for a channel", 30.0), Deadline(9.0, 0.5), model_name="m")
    assert isinstance(error, PoolTimeout)
    assert str(error) == "deadline of 0.5 s exceeded while waiting for a channel"


@pytest.mark.parametrize("error", [ValueError("[[1.0, 2.0]]"), Stubborn("[[1.0, 2.0]]", "b")])
def test_errors_nobody_thought_of_become_typed_and_carry_no_data(error: Exception) -> None:
    """A fault of ours is told by its type, and even a class that cannot be copied gives an answer."""
    told = error_for_caller(error, Deadline(9.0, 0.5), model_name="m")
    assert isinstance(told, BackendFailed)
    assert type(error).__name__ in str(told)
    assert "1.0" not in str(told)
