"""What one replica has taken on, over all models and ways in, and the bounds on it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType

from serve_app.errors import Overloaded, RequestTooLarge
from serve_app.settings import ReplicaSettings

WHAT = "this replica"
RETRY_AFTER_S = 1.0
"""What refused callers are told: how soon one of all models' requests ends cannot be foreseen."""


@dataclass(frozen=True, slots=True)
class ReplicaLoadStatistics:
    """A replica's load at one moment.

    Attributes:
        num_requests: Requests under way: being received, queued, in flight or about to be answered.
        num_bytes: Bytes of these, as they came or as tensors.
        num_refused: Requests refused because of a bound of the replica.
    """

    num_requests: int
    num_bytes: int
    num_refused: int


class ReplicaLoad:
    """Counts what is under way; each request holds a `Share` from its first look to its answer.

    Shares may grow in any thread. All mutable state is the three counts and the bounds in force.

    Args:
        settings: The bounds.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._num_requests = self._num_bytes = self._num_refused = 0

    def reconfigure(self, settings: ReplicaSettings) -> None:
        """Put other bounds in force for what comes next; what is under way goes on."""
        self._settings = settings

    def enter(self, size_bytes: int = 0) -> Share:
        """Take on one more request.

        Args:
            size_bytes: Bytes that it holds already.

        Raises:
            Overloaded: As many are under way as may be, or there is no room for its bytes.
            RequestTooLarge: Not even an idle replica has room for it.
        """
        with self._lock:
            if self._num_requests >= self._settings.max_requests:
                self._num_refused += 1
                reason = f"{self._num_requests} requests are under way, the limit is {self._settings.max_requests}"
                raise Overloaded(WHAT, reason, RETRY_AFTER_S)
            self._check_bytes(size_bytes, size_bytes)
            self._num_requests += 1
            self._num_bytes += size_bytes
        return Share(self, size_bytes)

    def _check_bytes(self, more: int, size_bytes: int) -> None:
        limit = self._settings.max_bytes
        if self._num_bytes + more <= limit:
            return
        if size_bytes > limit:
            raise RequestTooLarge("request for this replica", size_bytes, limit)
        self._num_refused += 1
        reason = f"{self._num_bytes} bytes of requests are held, {more} more are above the limit of {limit}"
        raise Overloaded(WHAT, reason, RETRY_AFTER_S)

    def expect(self, share: Share, size_bytes: int) -> None:
        """See `Share.expect`."""
        if self._num_bytes + size_bytes <= self._settings.max_bytes:  # for the many; no lock is needed to read
            return
        with self._lock:
            self._check_bytes(size_bytes - share.size_bytes, size_bytes)

    def hold(self, share: Share, size_bytes: int) -> None:
        """See `Share.hold`."""
        more = size_bytes - share.size_bytes
        with self._lock:
            if share.is_released:  # its caller has left while a thread goes on
                return
            if more > 0:
                self._check_bytes(more, size_bytes)
            share.size_bytes = size_bytes
            self._num_bytes += more

    def leave(self, share: Share) -> None:
        """See `Share.release`."""
        with self._lock:
            if not share.is_released:
                share.is_released = True
                self._num_requests -= 1
                self._num_bytes -= share.size_bytes

    def statistics(self) -> ReplicaLoadStatistics:
        """The counts now."""
        return ReplicaLoadStatistics(self._num_requests, self._num_bytes, self._num_refused)

    def __repr__(self) -> str:
        bounds = self._settings
        return (
            f"<ReplicaLoad {self._num_requests} of {bounds.max_requests} requests, "
            f"{self._num_bytes} of {bounds.max_bytes} bytes, {self._num_refused} refused>"
        )


class Share:
    """One request's part of a replica's load; `with`, so that it is given back on every path.

    Args:
        load: Made it.
        size_bytes: What it holds from the beginning.

    Attributes:
        size_bytes: Bytes held for it.
        is_released: Whether it is over.
    """

    __slots__ = ("_load", "is_released", "size_bytes")

    def __init__(self, load: ReplicaLoad, size_bytes: int) -> None:
        self._load = load
        self.size_bytes = size_bytes
        self.is_released = False

    def expect(self, size_bytes: int) -> None:
        """Check that there is room for what a client says that it will send; nothing is held for words.

        Raises:
            Overloaded: Not now.
            RequestTooLarge: Never.
        """
        self._load.expect(self, size_bytes)

    def hold(self, size_bytes: int) -> None:
        """Hold so many bytes in all from now on; may be called in any thread.

        Raises:
            Overloaded: There is no room for that many now.
            RequestTooLarge: There never is.
        """
        self._load.hold(self, size_bytes)

    def release(self) -> None:
        """Give it back; once is enough, and again does nothing."""
        self._load.leave(self)

    def __enter__(self) -> Share:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Share {self.size_bytes} bytes{' released' if self.is_released else ''}>"
