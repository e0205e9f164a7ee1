"""A failed batch in parts, until the guilty request stands alone; and each caller's own copy of an error."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Generic, TypeVar

from serve_app.clock import Deadline
from serve_app.errors import (
    BackendFailed,
    DeadlineExceeded,
    ModelNotFound,
    PermissionDenied,
    PoolClosed,
    RequestCancelled,
    ServeAppError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

T = TypeVar("T")

# None of these is one request's fault, so sending the others again would only fail again. All else is: what the
# backend refused, a sum of sizes that is too large, and errors nobody thought of.
_NOT_ONE_REQUESTS_FAULT = (
    Unavailable,
    DeadlineExceeded,
    RequestCancelled,
    ModelNotFound,
    Unsupported,
    PoolClosed,
    Unauthenticated,
    PermissionDenied,
)


def is_one_requests_fault(error: Exception) -> bool:
    """Whether a merged batch that failed so may succeed without one of its requests."""
    return not isinstance(error, _NOT_ONE_REQUESTS_FAULT)


def error_for_caller(error: Exception, deadline: Deadline, *, model_name: str) -> ServeAppError:
    """A fresh error for one caller of a batch.

    Every caller raises its own instance: a shared one would collect all their tracebacks, and keep their frames and
    tensors alive. A deadline is told in the caller's own budget. What is not a `ServeAppError` is a fault of ours and
    becomes `BackendFailed` with its type, without its text, which may hold data.
    """
    try:
        if isinstance(error, DeadlineExceeded):
            return type(error)(error.what, deadline.timeout_s)
        if isinstance(error, ServeAppError):
            return copy.copy(error)
    except Exception:  # noqa: BLE001  # a class that cannot be copied must not leave its caller without an answer
        return BackendFailed(model_name, f"{type(error).__name__}")
    return BackendFailed(model_name, f"{type(error).__name__} in this server while it handled the batch; see its log")


def max_extra_calls(num_members: int) -> int:
    """Most calls that `Isolation` adds to a failed one of so many requests: `n + 2 * ceil(log2 n)`."""
    if num_members < 2:
        return 0
    return num_members + 2 * (num_members - 1).bit_length()


class Isolation(Generic[T]):
    """Which parts of a batch to send, one after another.

    A part that fails is halved, so that one guilty request among n costs at most `2 * ceil(log2 n)` calls more. When
    so many are guilty that halving might cost more than `max_extra_calls`, the failed part is sent one by one.

    Args:
        members: What the first call is made of, at least one.
    """

    def __init__(self, members: Sequence[T]) -> None:
        self._parts: list[Sequence[T]] = [members]
        self._max_extra_calls = max_extra_calls(len(members))
        self._num_extra_calls = -1

    def next_part(self) -> Sequence[T] | None:
        """What to send next; `None` when all parts have been sent."""
        if not self._parts:
            return None
        self._num_extra_calls += 1
        return self._parts.pop()

    def narrow(self, failed: Sequence[T]) -> None:
        """Send a part that failed again in smaller ones.

        Args:
            failed: Those of the part's members that are still wanted, at least two.
        """
        num_unresolved = len(failed) + sum([len(part) for part in self._parts])
        if self._num_extra_calls + len(self._parts) + 2 + num_unresolved <= self._max_extra_calls:
            middle = (len(failed) + 1) // 2
            self._parts += [failed[middle:], failed[:middle]]
        else:
            self.send_alone(failed)

    def send_alone(self, members: Sequence[T]) -> None:
        """Send each of a part's members by itself, before what is left.

        Args:
            members: Those that are still wanted, at least two.
        """
        self._parts += [[member] for member in reversed(members)]
