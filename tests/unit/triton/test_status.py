"""Each status and text that Triton and grpc are known to send becomes the right error."""

from __future__ import annotations

import pickle

import grpc
import pytest

from serve_app import errors
from serve_app.triton.status import MAX_TEXT_CHARS, CallContext, telling_line, translate

CODE = grpc.StatusCode
CONTEXT = CallContext("10.0.0.7:8001", "m", "2", 1.5)
RAISED = (
    "Failed to process the request(s) for model 'm_0_0', message: ValueError: bad thing\nsecond line\n\nAt:\n"
    "  /models/m/1/model.py(8): execute\n"
)
REFUSED = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:8001: Failed to connect to remote host: "
    "Connection refused"
)

# (status, text, class, text of ours)
TABLE = [
    (CODE.NOT_FOUND, "Request for unknown model: 'm' is not found", errors.ModelNotFound, "unknown model 'm'"),
    (CODE.NOT_FOUND, "Request for unknown model: 'm' version 2 is not found", errors.ModelNotFound, "version '2'"),
    (CODE.INVALID_ARGUMENT, "requested model 'm' is not available", errors.ModelNotFound, "unknown model 'm'"),
    (CODE.NOT_FOUND, "Request for unknown model: 'm' has no available versions", errors.ModelNotReady, "no available"),
    (CODE.UNAVAILABLE, "Request for unknown model: 'm' has no available versions", errors.ModelNotReady, "'m'"),
    (CODE.UNAVAILABLE, "the database of this model is down", errors.ModelNotReady, "database"),
    (CODE.INTERNAL, "Stub process 'm_0_0' is not healthy.", errors.ModelCrashed, "not healthy"),
    (
        CODE.INVALID_ARGUMENT,
        "[request id: x] inference request batch-size must be <= 8 for 'm'",
        errors.RequestRejected,
        "inference request batch-size must be <= 8 for 'm'",
    ),
    (CODE.INVALID_ARGUMENT, "custom error", errors.RequestRejected, "custom error"),
    (CODE.INTERNAL, RAISED, errors.BackendFailed, "model 'm' failed: ValueError: bad thing"),
    (CODE.INTERNAL, "recv from database: socket closed", errors.BackendFailed, "socket closed"),
    (CODE.UNKNOWN, "", errors.BackendFailed, "no reason given"),
    (CODE.DATA_LOSS, "checksum", errors.BackendFailed, "checksum"),
    (CODE.UNAVAILABLE, "[request id: x] Exceeds maximum queue size", errors.Overloaded, "queue in Triton is full"),
    (CODE.UNAVAILABLE, "Request timeout expired", errors.DeadlineExceeded, "1.5 s"),
    (CODE.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineExceeded, "1.5 s"),
    (CODE.CANCELLED, "CANCELLED", errors.EndpointUnavailable, "CANCELLED"),
    (CODE.CANCELLED, "the model gave up", errors.RequestCancelled, "request to model 'm' was cancelled"),
    (CODE.UNAVAILABLE, REFUSED, errors.EndpointUnreachable, "Triton at 10.0.0.7:8001: UNKNOWN: ipv4:10.0.0.7:8001"),
    (CODE.UNAVAILABLE, "errors resolving no.such:1: Domain name not found", errors.EndpointUnreachable, "no.such"),
    (CODE.UNAVAILABLE, "Stream removed (Socket closed)", errors.EndpointUnavailable, "Socket closed"),
    (CODE.UNAVAILABLE, "recvmsg:Connection reset by peer", errors.EndpointUnavailable, "reset"),
    (CODE.UNAVAILABLE, "Cancelling all calls", errors.EndpointUnavailable, "Cancelling"),
    (CODE.INTERNAL, "Received RST_STREAM with error code 2", errors.EndpointUnavailable, "RST_STREAM"),
    (CODE.CANCELLED, "Received RST_STREAM with error code 8", errors.EndpointUnavailable, "RST_STREAM"),
    (CODE.UNIMPLEMENTED, "Received http2 header with status: 404", errors.EndpointUnavailable, "HTTP status 404"),
    (CODE.UNAVAILABLE, "Received http2 header with status: 503", errors.EndpointUnavailable, "HTTP status 503"),
    (
        CODE.UNIMPLEMENTED,
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
        errors.Unsupported,
        "decoupled",
    ),
    (
        CODE.RESOURCE_EXHAUSTED,
        "CLIENT: Sent message larger than max (16037 vs. 1000)",
        errors.RequestTooLarge,
        "16037 bytes, the limit is 1000 bytes",
    ),
    (
        CODE.RESOURCE_EXHAUSTED,
        "SERVER: Received message larger than max (16037 vs. 1000)",
        errors.RequestTooLarge,
        "16037 bytes",
    ),
    (
        CODE.RESOURCE_EXHAUSTED,
        "CLIENT: Received message larger than max (16037 vs. 1000)",
        errors.BackendFailed,
        "too large to receive",
    ),
    (CODE.RESOURCE_EXHAUSTED, "no more memory", errors.Overloaded, "no more memory"),
    (CODE.UNAVAILABLE, "This protocol is restricted, expecting header 'k'", errors.BackendFailed, "restricted"),
    (
        CODE.UNAVAILABLE,
        "explicit model load / unload is not allowed if polling is enabled",
        errors.Unsupported,
        "polling",
    ),
]


@pytest.mark.parametrize(("code", "text", "expected", "ours"), TABLE, ids=lambda value: str(value)[:40])
def test_table(code: grpc.StatusCode, text: str, expected: type[errors.ServeAppError], ours: str) -> None:
    """The class is exactly the expected one, the text tells why on one line, and it survives pickling."""
    error = translate(code, text, CONTEXT)
    assert type(error) is expected
    assert ours in str(error)
    assert "\n" not in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (expected, str(error))


@pytest.mark.parametrize("code", [code for code in CODE if code is not CODE.OK])
@pytest.mark.parametrize("text", [None, "", "x" * 100_000, "\n\n"])
def test_every_status_has_an_error(code: grpc.StatusCode, text: str | None) -> None:
    """No status and no text, however long, leaves the translator without a short answer."""
    error = translate(code, text, CONTEXT)
    assert isinstance(error, errors.ServeAppError)
    assert len(str(error)) < MAX_TEXT_CHARS + 200


def test_traceback_is_reduced_to_its_exception() -> None:
    """Of a Python traceback only the line that names the exception is kept."""
    text = "Traceback (most recent call last):\n  File \"m.py\", line 3, in execute\n    boom()\nKeyError: 'pixels'\n"
    assert telling_line(text) == "KeyError: 'pixels'"
