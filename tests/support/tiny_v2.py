"""A small Serve application with the V2 addresses that the launcher asks, for tests of the launcher alone."""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import JSONResponse


class TinyV2:
    """Answers as a ModelServer with one model `tiny` would; `/settings` tells what is in force.

    Args:
        start_error: Raised at start where it is not empty.
    """

    def __init__(self, start_error: str = "") -> None:
        if start_error:
            raise RuntimeError(start_error)
        self._config: dict[str, Any] = {}

    def reconfigure(self, config: dict[str, Any]) -> None:
        self._config = config

    async def __call__(self, request: Request) -> JSONResponse:
        path = request.url.path
        if path == "/v2/repository/index":
            return JSONResponse([{"name": "tiny", "version": "1", "state": "READY", "reason": ""}])
        if path in ("/v2/health/ready", "/v2/models/tiny/ready"):
            return JSONResponse({})
        if path == "/settings":
            return JSONResponse({"pid": os.getpid(), "config": self._config, "environ": dict(os.environ)})
        return JSONResponse({"error": f"nothing at {path}"}, status_code=404)

    async def size(self, array: Any) -> int:
        return int(array.nbytes)


def build(args: dict[str, str]) -> Application:
    """The application; see `TinyV2` for `args`."""
    # The decorator's type knows no use as a function with options.
    app: Application = serve.deployment(name="TinyV2", ray_actor_options={"num_cpus": 0.1})(TinyV2).bind(**args)
    return app
