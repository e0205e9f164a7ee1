"""How urgent a request is, of what it asks for itself and of the lane that its caller's key is in."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.protocol.messages import InferRequest

MOST_URGENT = 1
"""The number that goes before all others, as in Triton."""


def priority_in_lane(asked: int, lane: str | None, lanes: Mapping[str, int], *, default: int) -> int:
    """The priority that a request gets.

    A lane gives the priority of requests that name none, and the most urgent one that others may name. A lane that
    nobody has set is one of the default priority, so that a slip in a name makes nobody more urgent.

    Args:
        asked: What the request names; 0 for none.
        lane: Its key's lane; `None` for callers without one, who may ask for anything.
        lanes: Priorities by lane.
        default: The model's.
    """
    if lane is None:
        return asked or default
    of_lane = lanes.get(lane, default)
    return max(asked, of_lane) if asked else of_lane


def put_in_lane(request: InferRequest, lane: str, lanes: Mapping[str, int], *, default: int) -> None:
    """Give a request its lane's priority; a `priority` that is above its lane becomes the lane's, in Triton too."""
    asked = int(request.parameters.get("priority") or 0)
    priority = priority_in_lane(asked, lane, lanes, default=default)
    if asked:
        request.parameters["priority"] = priority
    else:
        request.priority = priority
