"""A small Serve application with the V2 addresses that the launcher asks, for tests of the launcher alone."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import JSONResponse


class TinyV2:
    """Answers as a ModelServer with one model `tiny` would; `/settings` tells what is in force.

    Args:
        start_error: Raised at start where it is not empty.
        shared_memory: A file in `/dev/shm` that is made, mapped and never removed.
    """

    def __init__(self, start_error: str = "", shared_memory: str = "") -> None:
        if start_error:
            raise RuntimeError(start_error)
        self._config: dict[str, Any] = {}
        if shared_memory:
            with Path(shared_memory).open("w+b") as file:
                file.truncate(4096)
                self._mapping = mmap.mmap(file.fileno(), 4096)

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
