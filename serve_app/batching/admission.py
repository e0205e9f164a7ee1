"""Whether a queue has room for more, who goes first, and the errors that say which bound was met."""

from __future__ import annotations

from typing import NamedTuple

from serve_app.errors import Overloaded, RequestTooLarge
from serve_app.protocol.messages import InferRequest
from serve_app.settings import QueueSettings


class Load(NamedTuple):
    """What waits, or asks to."""

    num_requests: int
    num_rows: int
    num_bytes: int

    def plus(self, other: Load) -> Load:
        """Both together."""
        return Load(
            self.num_requests + other.num_requests, self.num_rows + other.num_rows, self.num_bytes + other.num_bytes
        )

    def minus(self, other: Load) -> Load:
        """This without `other`, which is part of it."""
        return Load(
            self.num_requests - other.num_requests, self.num_rows - other.num_rows, self.num_bytes - other.num_bytes
        )


NOTHING = Load(0, 0, 0)


def check_request_size(load: Load, bounds: QueueSettings, *, what: str) -> None:
    """Check that one request could ever fit the queue.

    Raises:
        RequestTooLarge: Not even an empty queue has room for it.
    """
    for size, limit, unit in ((load.num_rows, bounds.max_rows, "rows"), (load.num_bytes, bounds.max_bytes, "bytes")):
        if size > limit:
            raise RequestTooLarge(f"request for the queue of {what}", size, limit, unit)


def has_room(waiting: Load, more: Load, bounds: QueueSettings) -> bool:
    """Whether the queue has room for `more` beside what waits now."""
    return (
        waiting.num_requests + more.num_requests <= bounds.max_requests
        and waiting.num_rows + more.num_rows <= bounds.max_rows
        and waiting.num_bytes + more.num_bytes <= bounds.max_bytes
    )


def overload(waiting: Load, more: Load, bounds: QueueSettings, *, what: str, retry_after_s: float) -> Overloaded:
    """The error for who found no room: which bound was met, with its value, and when to come back."""
    limits = (bounds.max_requests, bounds.max_rows, bounds.max_bytes)
    loads = zip(waiting, more, limits, ("requests", "rows", "bytes"), strict=True)
    now, new, limit, unit = next(load for load in loads if load[0] + load[1] > load[2])
    return Overloaded(what, f"{now} {unit} are waiting, {new} more are above the limit of {limit}", retry_after_s)


def too_long(num_rows_ahead: int, wait_s: float, may_wait_s: float, *, what: str) -> Overloaded:
    """The error for who would wait in vain: what is before it, and when the queue will be short enough."""
    reason = f"{num_rows_ahead} rows go first, which takes about {wait_s:.3g} s, and it may wait {may_wait_s:.3g} s"
    return Overloaded(what, reason, max(wait_s - may_wait_s, 0.0))


def out_of_time(what: str, left_s: float, takes_s: float, retry_after_s: float) -> Overloaded:
    """The error for who has waited so long that the model cannot answer it in time any more."""
    reason = (
        f"it has waited too long: an answer takes {takes_s:.3g} s, and {max(left_s, 0.0):.3g} s of its budget are left"
    )
    return Overloaded(what, reason, retry_after_s)


def displaced(what: str, *, retry_after_s: float) -> Overloaded:
    """The error for who made room for something more urgent."""
    return Overloaded(what, "requests of higher priority have taken its place in the queue", retry_after_s)


def priority_of(request: InferRequest, settings: QueueSettings) -> int:
    """How urgent a request is: Triton's `priority`, where 1 goes first; 0, like none, is its lane's or the default."""
    return int(request.parameters.get("priority") or request.priority or settings.default_priority)
