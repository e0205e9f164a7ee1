"""Asks the gate about every HTTP request and every RPC, before anything of it is read or looked up."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.auth.credentials import Credentials, parse_credentials
from serve_app.auth.gate import Gate
from serve_app.auth.principal import CALLER, Principal
from serve_app.auth.scopes import Operation
from serve_app.errors import ServeAppError
from serve_app.ingress.http_errors import error_response
from serve_app.ingress.operations import OF_SERVER_WITHOUT_MODEL, RPCS, operation_of_route

Message = Any

# What a route or an RPC that nobody listed is.
_UNLISTED = Operation.OTHER


class GuardedEndpoint:
    """A route's application behind the gate.

    Args:
        app: What answers those who are let in.
        gate: Borrowed.
        path: The route's, with names in braces.
        methods: The route's.
    """

    def __init__(self, app: ASGIApp, gate: Gate, *, path: str, methods: Iterable[str]) -> None:
        self._app = app
        self._gate = gate
        self._operations = {method: operation_of_route(method, path) or _UNLISTED for method in methods}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403; its body is not read for that."""
        headers = Headers(scope=scope)
        operation = self._operations.get(scope["method"], _UNLISTED)
        try:
            credentials = credentials_of(headers)
            principal = self._gate.admit(credentials, operation, scope["path_params"].get("name", ""))
            if credentials is not None and credentials.is_basic and is_cross_site(headers):
                self._gate.refuse_forgery(principal)
        except ServeAppError as error:
            await error_response(error)(scope, receive, send)
            return
        token = CALLER.set(principal)
        try:
            await self._app(scope, receive, send)
        finally:
            CALLER.reset(token)


def guard_routes(routes: Iterable[Route], gate: Gate) -> None:
    """Put every route behind the gate."""
    for route in routes:
        route.app = GuardedEndpoint(route.app, gate, path=route.path_format, methods=route.methods or ("GET",))


def credentials_of(headers: Headers) -> Credentials | None:
    """The key of an HTTP request."""
    return parse_credentials(headers.get("x-api-key"), headers.get("authorization"))


def is_cross_site(headers: Headers) -> bool:
    """Whether a browser says that a page of another site made the request."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host", "")


class RpcGuard:
    """The same for RPCs.

    Args:
        gate: Borrowed.
        server_names: Names of services in health checks that mean the server itself.
    """

    def __init__(self, gate: Gate, *, server_names: Collection[str]) -> None:
        self._gate = gate
        self._server_names = server_names

    def admit(self, rpc_name: str, request: Message, grpc_context: Any) -> Principal | None:
        """Let a call in; see `Gate.admit` for the errors.

        Args:
            rpc_name: Name of the method.
            request: Its request; `None` for a stream of them, of which each is let in by `admit_message`.
            grpc_context: For the metadata.
        """
        operation, model_name = self._asked(rpc_name, request)
        return self._gate.admit(credentials_of_rpc(grpc_context), operation, model_name)

    def admit_message(self, principal: Principal | None, rpc_name: str, request: Message) -> Principal | None:
        """Let one more message of a stream in, by the keys that are in force now; errors as `admit`."""
        operation, model_name = self._asked(rpc_name, request)
        return self._gate.admit_again(principal, operation, model_name)

    def _asked(self, rpc_name: str, request: Message) -> tuple[Operation, str]:
        rpc = RPCS.get(rpc_name)
        if rpc is None:
            return _UNLISTED, ""
        if not rpc.model_field:
            return rpc.operation, ""
        if request is None:  # a stream: any key may open it
            return Operation.SERVER_METADATA, ""
        name = getattr(request, rpc.model_field)
        if not name or (rpc.model_field == "service" and name in self._server_names):
            return OF_SERVER_WITHOUT_MODEL.get(rpc_name, rpc.operation), ""
        return rpc.operation, name


def credentials_of_rpc(grpc_context: Any) -> Credentials | None:
    """The key in an RPC's metadata, under the names that HTTP has for it."""
    found: dict[str, str] = {}
    for name, value in grpc_context.invocation_metadata() or ():
        if name in ("x-api-key", "authorization") and isinstance(value, str):
            found.setdefault(name, value)
    return parse_credentials(found.get("x-api-key"), found.get("authorization"))


@contextlib.contextmanager
def answering_for(principal: Principal | None) -> Iterator[None]:
    """Within it, this task's calls are the principal's; not for generators, whose steps have contexts of their own."""
    token = CALLER.set(principal)
    try:
        yield
    finally:
        CALLER.reset(token)
