"""One tree of errors, one table to HTTP and gRPC, the same on every way in."""

from __future__ import annotations

import pickle

import grpc
import orjson
import pytest

from serve_app import errors
from serve_app.ingress.grpc_errors import grpc_status_of
from serve_app.ingress.http_errors import error_response, error_text, http_status_of

EXAMPLES: list[tuple[errors.ServeAppError, int, str]] = [
    (errors.InvalidRequest("id", "7", "a string"), 400, "INVALID_ARGUMENT"),
    (errors.TensorNameMismatch("inputs[0].name", "'x'", "'pixels'"), 400, "INVALID_ARGUMENT"),
    (errors.TensorDatatypeMismatch("inputs[0].datatype", "'INT8'", "'FP32'"), 400, "INVALID_ARGUMENT"),
    (errors.TensorShapeMismatch("inputs[0].shape", "[3]", "[-1, 64]"), 400, "INVALID_ARGUMENT"),
    (errors.RequestRejected("digits", "unexpected shape"), 400, "INVALID_ARGUMENT"),
    (errors.RequestTooLarge("request body", 11, 10), 413, "INVALID_ARGUMENT"),
    (errors.Unauthenticated("no key"), 401, "UNAUTHENTICATED"),
    (errors.PermissionDenied("not yours"), 403, "PERMISSION_DENIED"),
    (errors.ModelNotFound("resnet", "7"), 404, "NOT_FOUND"),
    (errors.SharedMemoryNotFound("Unable to find shared memory region"), 404, "NOT_FOUND"),
    (errors.ModelNotReady("model 'digits'", "not loaded"), 503, "UNAVAILABLE"),
    (errors.ModelCrashed("model 'digits'", "its process died"), 503, "UNAVAILABLE"),
    (errors.NoEndpoint("model 'digits'", "no server"), 503, "UNAVAILABLE"),
    (errors.EndpointUnavailable("127.0.0.1:1", "connection lost"), 503, "UNAVAILABLE"),
    (errors.EndpointUnreachable("127.0.0.1:1", "refused"), 503, "UNAVAILABLE"),
    (errors.EndpointStalled("127.0.0.1:1", "no sign of life"), 503, "UNAVAILABLE"),
    (errors.Overloaded("model 'digits'", "4096 requests wait", 2.5), 429, "RESOURCE_EXHAUSTED"),
    (errors.DeadlineExceeded("waiting", 0.3), 504, "DEADLINE_EXCEEDED"),
    (errors.PoolTimeout("waiting for a channel", 0.3), 504, "DEADLINE_EXCEEDED"),
    (errors.RequestCancelled(), 499, "CANCELLED"),
    (errors.Unsupported("shared memory", "not mapped"), 501, "UNIMPLEMENTED"),
    (errors.BackendFailed("digits", "boom"), 500, "INTERNAL"),
    (errors.AnswerMalformed("digits", "too few rows"), 500, "INTERNAL"),
    (errors.PoolClosed("pool"), 503, "UNAVAILABLE"),
    (errors.PreflightFailed("no disk.", "free some."), 500, "INTERNAL"),
    (errors.ServerStartFailed("tritonserver", "rc 1"), 500, "INTERNAL"),
    (errors.ReplicaUnhealthy(["stuck"]), 500, "INTERNAL"),
]


def every_error() -> set[type[errors.ServeAppError]]:
    found: set[type[errors.ServeAppError]] = set()
    queue = [errors.ServeAppError]
    while queue:
        cls = queue.pop()
        subclasses = cls.__subclasses__()
        queue += subclasses
        if cls.__module__ == errors.__name__ and cls is not errors.ServeAppError and cls is not errors.Unavailable:
            found.add(cls)
    return found


def test_every_error_is_in_the_table() -> None:
    """A new error gets its statuses in the same change."""
    assert {type(error) for error, _, _ in EXAMPLES} == every_error()


@pytest.mark.parametrize(("error", "http", "code"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_statuses(error: errors.ServeAppError, http: int, code: str) -> None:
    """HTTP and gRPC say the same of an error."""
    assert http_status_of(error) == http
    assert grpc_status_of(error) is grpc.StatusCode[code]


@pytest.mark.parametrize("error", [error for error, _, _ in EXAMPLES], ids=lambda error: type(error).__name__)
def test_errors_cross_processes(error: errors.ServeAppError) -> None:
    """Ray pickles errors: type, text and every field survive it."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_a_foreign_error_tells_the_client_nothing() -> None:
    """What the code did not expect may hold anything; the client learns only that it happened."""
    answer = error_response(ValueError("secret path /etc/passwd"))
    assert answer.status_code == 500
    assert orjson.loads(answer.body) == {"error": "internal error"}


def test_error_texts_are_one_bounded_line() -> None:
    """A backend's text of many lines and megabytes does not reach a header or a client like that."""
    text = error_text(errors.BackendFailed("m", "first\nsecond\n" + "x" * 10_000))
    assert "\n" not in text
    assert len(text) <= 2048


def test_overload_says_when_to_retry() -> None:
    """`Retry-After` is whole seconds, rounded up."""
    answer = error_response(errors.Overloaded("model 'm'", "full", 2.1))
    assert answer.headers["retry-after"] == "3"
