"""The front without Ray: HTTP app, data plane, runners and router, with a fake Triton behind them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

import uvicorn

from serve_app.dataplane import DataPlane
from serve_app.ingress.http_app import http_app
from serve_app.settings import LimitSettings
from serve_app.triton.fake import FakeModel, FakeTriton
from tests.support.front import running_plane
from tests.support.waiting import wait_until_sync


@contextlib.asynccontextmanager
async def open_plane(limits: LimitSettings) -> AsyncIterator[tuple[DataPlane, FakeTriton]]:
    """A data plane with model `identity` served and ready."""
    async with (
        FakeTriton(FakeModel()) as fake,
        running_plane(fake.endpoint, limits=limits, names=["identity"]) as (plane, _),
    ):
        yield plane, fake


@contextlib.contextmanager
def serve_front(limits: LimitSettings) -> Iterator[str]:
    """The front behind a real HTTP server of its own thread and loop; gives its URL."""
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with open_plane(limits) as (plane, _):
            config = uvicorn.Config(http_app(plane, limits), port=0, log_level="error", lifespan="off", ws="none")
            servers.append(uvicorn.Server(config))
            await servers[0].serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="front")
    thread.start()
    try:
        wait_until_sync(lambda: bool(servers) and servers[0].started, timeout_s=30, what="the HTTP server")
        host, port = servers[0].servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        if servers:
            servers[0].should_exit = True
        thread.join(30)
        assert not thread.is_alive()
