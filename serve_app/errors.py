"""The one tree of errors. Where they become HTTP or gRPC statuses is `ingress.http_errors` and `ingress.grpc_errors`.

Every error crosses Ray processes, so each passes all its arguments positionally to `super().__init__` (that is
what pickle replays) and builds its text in `__str__`: one line that says what was wrong and what was expected.
Texts never carry tensor data.
"""

from __future__ import annotations

from collections.abc import Sequence


class ServeAppError(Exception):
    """Root of all errors that this package raises on purpose."""


# --- the caller's fault -------------------------------------------------------------------------------------


class InvalidRequest(ServeAppError):
    """Something in the request is not as it must be.

    Args:
        field: Path of the offending part, for example `inputs[0].shape`.
        got: What was there, short and without tensor data.
        expected: What would have been right.
    """

    def __init__(self, field: str, got: str, expected: str) -> None:
        super().__init__(field, got, expected)
        self.field, self.got, self.expected = field, got, expected

    def __str__(self) -> str:
        return f"{self.field}: got {self.got}, expected {self.expected}"


class TensorNameMismatch(InvalidRequest):
    """A tensor the model does not have, one given twice, or a required one that is missing."""


class TensorDatatypeMismatch(InvalidRequest):
    """A tensor's datatype is not the one in the model's metadata."""


class TensorShapeMismatch(InvalidRequest):
    """A tensor's shape does not fit the model's metadata, or its data does not fill its shape."""


class RequestRejected(InvalidRequest):
    """Triton, or the model's backend in it, found the request invalid; the text is theirs.

    Args:
        model_name: The model that was asked.
        reason: The server's message, one line.
    """

    def __init__(self, model_name: str, reason: str) -> None:
        super().__init__(f"request for model {model_name!r}", "one that Triton refused", "one that it accepts")
        self.args = (model_name, reason)
        self.model_name, self.reason = model_name, reason

    def __str__(self) -> str:
        return self.reason


class RequestTooLarge(ServeAppError):
    """A size is above its limit.

    Args:
        what: What was measured, for example `request body`.
        size: How large it was (or the least it can be, when reading stopped early).
        limit: The largest accepted.
        unit: `bytes`, `rows`, ...
    """

    def __init__(self, what: str, size: int, limit: int, unit: str = "bytes") -> None:
        super().__init__(what, size, limit, unit)
        self.what, self.size, self.limit, self.unit = what, size, limit, unit

    def __str__(self) -> str:
        return f"{self.what}: {self.size} {self.unit}, the limit is {self.limit} {self.unit}"


class ModelNotFound(ServeAppError):
    """No model, or no version of it, by that name."""

    def __init__(self, model_name: str, model_version: str = "") -> None:
        super().__init__(model_name, model_version)
        self.model_name, self.model_version = model_name, model_version

    def __str__(self) -> str:
        version = f" version {self.model_version!r}" if self.model_version else ""
        return f"unknown model {self.model_name!r}{version}"


class SharedMemoryNotFound(ServeAppError):
    """No shared memory region is registered by that name; the text is Triton's."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Unsupported(ServeAppError):
    """A valid demand that this server does not carry out.

    Args:
        what: What was asked for.
        reason: Why it is refused, and what to do instead.
    """

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason

    def __str__(self) -> str:
        return f"{self.what} is not supported: {self.reason}"


class Unauthenticated(ServeAppError):
    """No valid credentials came with the request."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class PermissionDenied(ServeAppError):
    """The caller is known and may not do this."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


# --- not now ------------------------------------------------------------------------------------------------


class Unavailable(ServeAppError):
    """The service cannot answer now; the same request may succeed later."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


class ModelNotReady(Unavailable):
    """The model is known and not loaded (yet, or any more)."""


class ModelCrashed(ModelNotReady):
    """The model's process in Triton died, during this request or before it; Triton itself goes on."""


class NoEndpoint(Unavailable):
    """No Triton server is there to take the request."""


class EndpointUnavailable(Unavailable):
    """A Triton server could not be reached, or went away during the call."""


class EndpointUnreachable(EndpointUnavailable):
    """A Triton server could not be connected to: the request never left, so sending it elsewhere is safe."""


class EndpointStalled(EndpointUnavailable):
    """A Triton server gives no sign of life although its connections stand; what it was sent was given up."""


class Overloaded(Unavailable):
    """A bounded queue is full.

    Args:
        what: Which queue, for example `model 'digits'`.
        reason: Which bound was met, with its value.
        retry_after_s: When a retry has a chance, in seconds.
    """

    def __init__(self, what: str, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(what, reason)
        self.args = (what, reason, retry_after_s)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(ServeAppError):
    """The request's budget ran out.

    Args:
        what: Where it ran out, for example `waiting for a batch`.
        timeout_s: The whole budget in seconds.
    """

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(what, timeout_s)
        self.what, self.timeout_s = what, timeout_s

    def __str__(self) -> str:
        return f"deadline of {self.timeout_s:.3g} s exceeded while {self.what}"


class PoolTimeout(DeadlineExceeded):
    """No channel of the pool became free within the budget."""


class RequestCancelled(ServeAppError):
    """The caller, or the server on the caller's behalf, gave the request up."""

    def __init__(self, what: str = "request") -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} was cancelled"


# --- our side's fault ---------------------------------------------------------------------------------------


class BackendFailed(ServeAppError):
    """Triton, or the model's backend in it, answered with an error or with something that makes no sense.

    Args:
        model_name: The model that was asked.
        reason: The backend's first line, cut to a sane length; never a stack trace.
    """

    def __init__(self, model_name: str, reason: str) -> None:
        super().__init__(model_name, reason)
        self.model_name, self.reason = model_name, reason

    def __str__(self) -> str:
        return f"model {self.model_name!r} failed: {self.reason}"


class AnswerMalformed(BackendFailed):
    """Triton answered with something that is no answer to the request: other rows, names, datatypes or sizes."""


class PoolClosed(ServeAppError):
    """A pool, router or dispatcher was used after `aclose`."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} is closed"


def is_loss(error: BaseException) -> bool:
    """Whether a request that ended so may itself have killed what it was sent to.

    Such a request is sent once more at most, and alone.
    """
    return isinstance(error, EndpointUnavailable | ModelCrashed) and not isinstance(
        error, EndpointUnreachable | EndpointStalled
    )


# --- setting up ---------------------------------------------------------------------------------------------


class PreflightFailed(ServeAppError):
    """The machine is not ready; nothing was started.

    Args:
        problem: One sentence: what is wrong.
        fix: One sentence: what to do.
    """

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem, self.fix = problem, fix

    def __str__(self) -> str:
        return f"{self.problem} Fix: {self.fix}"


class ServerStartFailed(ServeAppError):
    """A tritonserver process did not become ready.

    Args:
        what: Which server.
        reason: What its log or exit status said.
    """

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason

    def __str__(self) -> str:
        return f"{self.what} did not start: {self.reason}"


class ReplicaUnhealthy(ServeAppError):
    """A replica cannot work any more and is to be replaced; Ray Serve does that when a health check raises.

    Args:
        faults: What is wrong with it, each as a sentence.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__(tuple(faults))
        self.faults = tuple(faults)

    def __str__(self) -> str:
        return "; ".join(self.faults)
