"""Whether a failed call is sent again, to another server: a pure function, and the budget that bounds it."""

from __future__ import annotations

from enum import Enum

from serve_app.errors import (
    AnswerMalformed,
    EndpointStalled,
    EndpointUnreachable,
    ModelNotFound,
    ModelNotReady,
    PoolClosed,
    ServeAppError,
    is_loss,
)
from serve_app.settings import ChannelSettings

MIN_REMAINING_S = 0.001
"""Budget below which another try cannot end well."""

MAX_LOSSES = 2
"""Tries that may end with a dead server or a dead model process before the request is given up.

The second try saves the innocent; a third would let a request that kills what it touches go through the fleet.
"""

MAX_FAULTS = 2
"""Tries that may end with a malformed answer: a model that always gives such answers is not asked everywhere."""

RETRY_RATIO = 0.1
"""Retries that each request earns: over time at most one in ten calls is a retry."""


class Verdict(Enum):
    """What is to become of a failed call."""

    GIVE_UP = "give_up"
    """The caller gets the error."""
    RETRY = "retry"
    """Another server is asked, if the budget allows."""
    REROUTE = "reroute"
    """Another server is asked, at no charge: the first one did not begin with the request."""


def judge(
    error: ServeAppError,
    *,
    num_losses: int,
    is_sequence: bool,
    remaining_s: float,
    num_faults: int = 0,
    num_callers: int = 1,
    is_stranger: bool = False,
) -> Verdict:
    """Whether a call that failed with `error` is to be tried on another server.

    Only failures that lie with the server count: it could not be reached, it went away, it hangs, it does not have the
    model now, it answered nonsense. Never a sequence's request, whose state is on the one server, once that may have
    run it. Requests that are merged are not sent again together once they were lost together.

    Args:
        error: How the last try ended.
        num_losses: Tries so far for which `is_loss` was true, this one included.
        is_sequence: Whether the request belongs to a sequence.
        remaining_s: Budget left, in seconds.
        num_faults: Tries so far that ended with a malformed answer, this one included.
        num_callers: Requests that are merged in the call.
        is_stranger: Whether the server refused it because it does not know the sequence.
    """
    if remaining_s < MIN_REMAINING_S:
        return Verdict.GIVE_UP
    if isinstance(error, PoolClosed):
        return Verdict.REROUTE
    if is_sequence:
        return Verdict.REROUTE if is_stranger else Verdict.GIVE_UP
    if isinstance(error, EndpointUnreachable | ModelNotFound):
        return Verdict.REROUTE
    if is_loss(error):
        return Verdict.RETRY if num_losses < MAX_LOSSES and num_callers == 1 else Verdict.GIVE_UP
    if isinstance(error, AnswerMalformed):
        return Verdict.RETRY if num_faults < MAX_FAULTS else Verdict.GIVE_UP
    if isinstance(error, ModelNotReady | EndpointStalled):
        return Verdict.RETRY
    return Verdict.GIVE_UP


class RetryBudget:
    """Tokens that retries cost and requests earn.

    A tenth of a token for each request keeps a struggling fleet from being asked twice for everything. The burst is
    what one dying server can cause at once: every call that its channels carry fails together, and none of their
    callers is to notice.

    Args:
        burst: Tokens at the start, and the most there can be.
    """

    def __init__(self, burst: int) -> None:
        self.burst = burst
        self.tokens = float(burst)

    @classmethod
    def for_channels(cls, settings: ChannelSettings) -> RetryBudget:
        """A budget that covers two servers lost together with every channel full, and at least 256 retries."""
        return cls(max(256, 2 * settings.num_channels * settings.max_calls_per_channel))

    def deposit(self) -> None:
        """Called for each request."""
        if self.tokens < self.burst:
            self.tokens = min(self.tokens + RETRY_RATIO, self.burst)

    def withdraw(self) -> bool:
        """Take the price of one retry; false when there is not enough."""
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True

    def __repr__(self) -> str:
        return f"<RetryBudget {self.tokens:.1f} of {self.burst} tokens>"
