"""What has to happen before Ray Serve sees an HTTP request; named in `cluster/serve.env`.

`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` lets middlewares into Serve's own HTTP servers: those of the replicas in
HAProxy mode, those of the proxies else.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

SERVE_TIMEOUT_HEADER = "x-request-timeout-seconds"
"""What clients send; Ray Serve's own name for a request's budget."""

BUDGET_HEADER = "x-serve-app-budget-seconds"
"""The same once it is past Ray Serve."""

_SERVE_TIMEOUT = SERVE_TIMEOUT_HEADER.encode()
_BUDGET = BUDGET_HEADER.encode()


class KeepBudget:
    """Keeps a request's budget from Ray Serve, so that it ends where it is known what was waited for.

    Serve would answer 408 with a text of its own and cancel the request; the data plane answers 504 in the V2 form,
    like gRPC and the handle.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Rename the header and pass the request on."""
        if scope["type"] == "http":
            headers = scope["headers"]
            for index, (name, value) in enumerate(headers):
                if name == _SERVE_TIMEOUT:
                    scope = {**scope, "headers": [*headers[:index], (_BUDGET, value), *headers[index + 1 :]]}
                    break
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Ray Serve calls for its list."""
    return [Middleware(KeepBudget)]
