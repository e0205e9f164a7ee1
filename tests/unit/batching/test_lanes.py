"""Which priority a request gets, of what it asks for and of its key's lane."""

from __future__ import annotations

import pytest

from serve_app.batching.admission import priority_of
from serve_app.batching.lanes import priority_in_lane, put_in_lane
from serve_app.protocol.messages import InferRequest
from serve_app.settings import QueueSettings

LANES = {"interactive": 5, "batch": 20}


@pytest.mark.parametrize(
    ("asked", "lane", "priority"),
    [
        (0, None, 10),  # as the model says
        (1, None, 1),  # without a lane anything goes
        (0, "interactive", 5),
        (1, "interactive", 5),  # no more urgent than the lane
        (7, "interactive", 7),  # less urgent is everybody's choice
        (0, "batch", 20),
        (10, "batch", 20),
        (0, "misspelt", 10),
        (1, "misspelt", 10),  # a slip makes nobody more urgent
    ],
)
def test_a_lane_is_default_and_bound(asked: int, lane: str | None, priority: int) -> None:
    """The lane's number is that of who asks for none, and the most urgent that others get."""
    assert priority_in_lane(asked, lane, LANES, default=10) == priority
    request = InferRequest("m", [], parameters={"priority": asked} if asked else {})
    if lane is not None:
        put_in_lane(request, lane, LANES, default=10)
    assert priority_of(request, QueueSettings(default_priority=10)) == priority


def test_triton_hears_what_was_asked_for_and_granted() -> None:
    """A request that names no priority gets none for Triton; one that asks for too much is cut down there too."""
    plain, urgent = InferRequest("m", []), InferRequest("m", [], parameters={"priority": 1})
    for request in (plain, urgent):
        put_in_lane(request, "batch", LANES, default=10)
    assert plain.parameters == {}
    assert urgent.parameters == {"priority": 20}
