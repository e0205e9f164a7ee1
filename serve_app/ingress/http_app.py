"""The ASGI application of a ModelServer replica."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.auth.gate import Gate
from serve_app.auth.scopes import Operation
from serve_app.dataplane import DataPlane
from serve_app.errors import ServeAppError
from serve_app.ingress.guard import credentials_of, guard_routes
from serve_app.ingress.http_errors import error_response, json_response
from serve_app.ingress.http_routes import v2_routes
from serve_app.ingress.openapi import document_routes
from serve_app.settings import LimitSettings

_MAX_PATH = 256
"""Characters of a path that an error repeats."""


def http_app(plane: DataPlane, limits: LimitSettings, *, gate: Gate | None = None) -> ASGIApp:
    """The V2 application over a data plane, which it borrows.

    Args:
        plane: Answers the requests; the caller closes it after the last one.
        limits: Sizes beyond which a request is refused.
        gate: Asked about every request; borrowed. `None`: everyone may do everything.
    """
    routes = v2_routes(plane, limits)
    routes += document_routes(routes, has_keys=gate is not None)
    if gate is not None:
        guard_routes(routes, gate)

    async def refuse(request: Request, error: Exception) -> Response:
        if gate is not None:  # which paths there are is nothing for those who have no key
            try:
                gate.admit(credentials_of(request.headers), Operation.SERVER_METADATA)
            except ServeAppError as refusal:
                return error_response(refusal)
        return await _http_exception(request, error)

    app = Starlette(routes=routes, exception_handlers={HTTPException: refuse})
    app.router.redirect_slashes = False  # `/v2/` is unknown to Triton too; a redirect would lose a POST's body
    return FullPath(app)


class FullPath:
    """Lets the V2 routes see the whole V2 path, whatever prefix the app is deployed under.

    Ray Serve mounts an app by its `route_prefix`. For a model's own app at `/v2/models/<name>` that prefix is part
    of the V2 path itself, so the mount has to end before it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, its root path cut before `/v2`."""
        root_path = scope.get("root_path", "")
        if root_path:
            start = f"{root_path}/".find("/v2/")
            if start >= 0:
                scope = {**scope, "root_path": root_path[:start]}
        await self._app(scope, receive, send)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods in the V2 error form, which says what was asked for."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    path = request.url.path if len(request.url.path) <= _MAX_PATH else f"{request.url.path[:_MAX_PATH]}..."
    text = {
        404: f"unknown path {path!r}; V2 paths start with /v2",
        405: f"method {request.method[:16]} is not allowed for {path!r}",
    }.get(status, "request refused")
    return json_response({"error": text}, status_code=status, headers=headers)
