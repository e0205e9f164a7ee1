"""Which gRPC status each of our errors is."""

from __future__ import annotations

import grpc

from serve_app import errors

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
