"""What is sent again, and how often."""

from __future__ import annotations

import pytest

from serve_app import errors
from serve_app.settings import ChannelSettings
from serve_app.triton.retry import RetryBudget, Verdict, judge

LOST = errors.EndpointUnavailable("Triton at a", "Socket closed")
REFUSED = errors.EndpointUnreachable("Triton at a", "Connection refused")
CRASHED = errors.ModelCrashed("model 'm'", "Stub process 'm_0_0' is not healthy.")
NOT_READY = errors.ModelNotReady("model 'm'", "no available versions")
NOT_FOUND = errors.ModelNotFound("m")
REMOVED = errors.PoolClosed("pool")

# (error, losses so far with this one, verdict, verdict for a sequence)
TABLE = [
    (LOST, 1, Verdict.RETRY, Verdict.GIVE_UP),
    (LOST, 2, Verdict.GIVE_UP, Verdict.GIVE_UP),
    (CRASHED, 1, Verdict.RETRY, Verdict.GIVE_UP),
    (CRASHED, 2, Verdict.GIVE_UP, Verdict.GIVE_UP),
    (REFUSED, 1, Verdict.REROUTE, Verdict.GIVE_UP),
    (REMOVED, 0, Verdict.REROUTE, Verdict.REROUTE),
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
