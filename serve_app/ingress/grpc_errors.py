"""Which gRPC status each of our errors is, and what it says beside the status."""

from __future__ import annotations

import math
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from serve_app import errors
from serve_app.ingress.http_errors import error_text

GRPC_STATUS: dict[type[BaseException], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.SharedMemoryNotFound: grpc.StatusCode.NOT_FOUND,
    errors.RequestTooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RequestCancelled: grpc.StatusCode.CANCELLED,
    errors.BackendFailed: grpc.StatusCode.INTERNAL,
    errors.ServeAppError: grpc.StatusCode.INTERNAL,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.PoolClosed: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def grpc_status_of(error: BaseException) -> grpc.StatusCode:
    """The status of an error; INTERNAL for one that is not ours."""
    for cls in type(error).__mro__:
        status = GRPC_STATUS.get(cls)
        if status is not None:
            return status
    return grpc.StatusCode.INTERNAL


def tell_error(error: BaseException, grpc_context: Any) -> None:
    """Put an error's status, its text and, where a retry may help, the delay on a call."""
    grpc_context.set_code(grpc_status_of(error))
    grpc_context.set_details(error_text(error))
    if isinstance(error, errors.Overloaded):
        grpc_context.set_trailing_metadata(retry_metadata(error))


def retry_metadata(error: errors.Overloaded) -> list[tuple[str, str | bytes]]:
    """When to come back, in the two forms that clients know.

    `grpc-status-details-bin` is a `google.rpc.Status` with a `RetryInfo`, which applications read;
    `grpc-retry-pushback-ms` is read by gRPC itself where a client has a retry policy for this status
    (https://github.com/grpc/proposal/blob/master/A6-client-retries.md).
    """
    milliseconds = max(1, math.ceil(error.retry_after_s * 1e3))
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(milliseconds)
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    code: int = grpc_status_of(error).value[0]
    status = status_pb2.Status(code=code, message=error_text(error), details=[detail])
    return [
        ("grpc-retry-pushback-ms", str(milliseconds)),
        ("grpc-status-details-bin", status.SerializeToString()),
    ]
