"""What is sent again, and how often."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app import errors
from serve_app.settings import ChannelSettings
from serve_app.triton.retry import MAX_LOSSES, RetryBudget, Verdict, judge

LOST = errors.EndpointUnavailable("Triton at a", "Socket closed")
REFUSED = errors.EndpointUnreachable("Triton at a", "Connection refused")
CRASHED = errors.ModelCrashed("model 'm'", "Stub process 'm_0_0' is not healthy.")
NOT_READY = errors.ModelNotReady("model 'm'", "no available versions")
NOT_FOUND = errors.ModelNotFound("m")
REMOVED = errors.PoolClosed("pool")
HUNG = errors.EndpointStalled("Triton at a", "no sign of life")
NONSENSE = errors.AnswerMalformed("m", "3 rows for 2")

# (error, losses so far with this one, verdict, verdict for a sequence)
TABLE = [
    (LOST, 1, Verdict.RETRY, Verdict.GIVE_UP),
    (LOST, 2, Verdict.GIVE_UP, Verdict.GIVE_UP),
    (CRASHED, 1, Verdict.RETRY, Verdict.GIVE_UP),
    (CRASHED, 2, Verdict.GIVE_UP, Verdict.GIVE_UP),
    (REFUSED, 1, Verdict.REROUTE, Verdict.GIVE_UP),
    (REMOVED, 0, Verdict.REROUTE, Verdict.REROUTE),
    (HUNG, 0, Verdict.RETRY, Verdict.GIVE_UP),
    (NONSENSE, 0, Verdict.RETRY, Verdict.GIVE_UP),
    (NOT_READY, 0, Verdict.RETRY, Verdict.GIVE_UP),
    (NOT_FOUND, 0, Verdict.REROUTE, Verdict.GIVE_UP),
    (errors.RequestRejected("m", "bad shape"), 0, Verdict.GIVE_UP, Verdict.GIVE_UP),
    (errors.BackendFailed("m", "boom"), 0, Verdict.GIVE_UP, Verdict.GIVE_UP),
    (errors.Overloaded("m", "queue full"), 0, Verdict.GIVE_UP, Verdict.GIVE_UP),
    (errors.DeadlineExceeded("waiting", 1.0), 0, Verdict.GIVE_UP, Verdict.GIVE_UP),
    (errors.RequestCancelled(), 0, Verdict.GIVE_UP, Verdict.GIVE_UP),
    (errors.RequestTooLarge("request", 2, 1), 0, Verdict.GIVE_UP, Verdict.GIVE_UP),
]


@pytest.mark.parametrize(("error", "num_losses", "verdict", "of_sequence"), TABLE)
def test_table(error: errors.ServeAppError, num_losses: int, verdict: Verdict, of_sequence: Verdict) -> None:
    """Only a server's failure is tried elsewhere, a deadly one once, a sequence never, and nothing without budget."""
    assert judge(error, num_losses=num_losses, is_sequence=False, remaining_s=1.0) is verdict
    assert judge(error, num_losses=num_losses, is_sequence=True, remaining_s=1.0) is of_sequence
    assert judge(error, num_losses=num_losses, is_sequence=False, remaining_s=0.0) is Verdict.GIVE_UP


@given(
    error=st.sampled_from([row[0] for row in TABLE]),
    num_losses=st.integers(0, 3),
    num_faults=st.integers(0, 3),
    num_callers=st.integers(1, 8),
    is_sequence=st.booleans(),
    is_stranger=st.booleans(),
    remaining_s=st.floats(-1.0, 10.0),
)
def test_what_is_never_sent_again(
    error: errors.ServeAppError,
    num_losses: int,
    num_faults: int,
    num_callers: int,
    is_sequence: bool,
    is_stranger: bool,
    remaining_s: float,
) -> None:
    """No sequence that may have run, nothing lost twice or lost together, no nonsense twice, nothing without time."""
    verdict = judge(
        error,
        num_losses=num_losses,
        num_faults=num_faults,
        num_callers=num_callers,
        is_sequence=is_sequence,
        is_stranger=is_stranger,
        remaining_s=remaining_s,
    )
    if verdict is Verdict.GIVE_UP:
        return
    assert remaining_s > 0
    assert not is_sequence or is_stranger or isinstance(error, errors.PoolClosed)
    if not is_sequence and errors.is_loss(error):
        assert num_losses < MAX_LOSSES
        assert num_callers == 1
        assert verdict is Verdict.RETRY
    if not is_sequence and isinstance(error, errors.AnswerMalformed):
        assert num_faults < 2


def test_a_sequence_that_a_server_does_not_know_is_asked_for_elsewhere() -> None:
    """A refusal for want of a start has run nothing, so another server may be asked."""
    error = errors.RequestRejected("m", "must specify the START flag")
    assert judge(error, num_losses=0, is_sequence=True, is_stranger=True, remaining_s=1.0) is Verdict.REROUTE


def test_budget_allows_a_burst_and_then_one_in_ten() -> None:
    """The burst is spent once; afterwards ten requests earn one retry, and the savings are bounded."""
    budget = RetryBudget(3)
    assert [budget.withdraw() for _ in range(4)] == [True, True, True, False]
    for _ in range(11):
        budget.deposit()
    assert [budget.withdraw(), budget.withdraw()] == [True, False]
    for _ in range(1000):
        budget.deposit()
    assert repr(budget) == "<RetryBudget 3.0 of 3 tokens>"


def test_budget_covers_a_dying_server() -> None:
    """The burst is at least every call that one server's channels can carry, twice over."""
    settings = ChannelSettings(num_channels=8, max_calls_per_channel=100)
    assert RetryBudget.for_channels(settings).burst == 1600
    assert RetryBudget.for_channels(ChannelSettings()).burst == 256
