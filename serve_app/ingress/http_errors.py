"""Which HTTP status each of our errors is, and the body it travels in."""

from __future__ import annotations

import math

import orjson
from starlette.responses import Response

from serve_app import errors

# The same table for gRPC is `grpc_errors.GRPC_STATUS`; both are looked up along the class's `__mro__`.
HTTP_STATUS: dict[type[BaseException], int] = {
    errors.InvalidRequest: 400,
    errors.Unauthenticated: 401,
    errors.PermissionDenied: 403,
    errors.ModelNotFound: 404,
    errors.SharedMemoryNotFound: 404,
    errors.RequestTooLarge: 413,
    errors.Overloaded: 429,
    errors.RequestCancelled: 499,
    errors.BackendFailed: 500,
    errors.ServeAppError: 500,
    errors.Unsupported: 501,
    errors.Unavailable: 503,
    errors.PoolClosed: 503,
    errors.DeadlineExceeded: 504,
}

CHALLENGE = 'Bearer realm="serve_app", Basic realm="serve_app", charset="UTF-8"'
"""`WWW-Authenticate` of a 401: a key as a Bearer token; Basic is what browsers ask people for."""

_MAX_TEXT = 2048


def http_status_of(error: BaseException) -> int:
    """The status of an error; 500 for one that is not ours."""
    for cls in type(error).__mro__:
        status = HTTP_STATUS.get(cls)
        if status is not None:
            return status
    return 500


def error_text(error: BaseException) -> str:
    """What a client may read of an error: one line, bounded; nothing at all of an error that is not ours."""
    if not isinstance(error, errors.ServeAppError):
        return "internal error"
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


def error_response(error: BaseException) -> Response:
    """The V2 error answer `{"error": "..."}`, with `Retry-After` in whole seconds where a retry may help."""
    headers = {}
    if isinstance(error, errors.Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = CHALLENGE
    return json_response({"error": error_text(error)}, status_code=http_status_of(error), headers=headers)


def json_response(content: object, *, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer of compact JSON."""
    return Response(orjson.dumps(content), status_code, headers, media_type="application/json")
