"""The two sides of the contract: a real tritonserver, and us in front of it or of another one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import uvicorn

from serve_app.fleet.supervisor import TritonSupervisor
from serve_app.ingress.http_app import http_app
from serve_app.protocol.arrays import request_of_arrays
from serve_app.protocol.messages import Arrays
from tests.contract.asking import Server
from tests.support.echo_models import write_echo_models
from tests.support.front import LIMITS, running_plane
from tests.support.grpc_front import grpc_server_of
from tests.support.stack import ROOT
from tests.support.triton_server import running_triton
from tests.support.waiting import wait_until

_START_S = 90.0


def write_repository(folder: Path) -> None:
    """Every model of the table: those of `echo_models`, and those that the product's own tests serve."""
    write_echo_models(folder)
    for model in (ROOT / "tests" / "support" / "model_repository").iterdir():
        shutil.copytree(model, folder / model.name)
    for name in ("identity", "digits", "minilm"):
        shutil.copytree(ROOT / "model_repository" / name, folder / name)


class Truth:
    """A supervised tritonserver that is asked without us; when it ends it comes again, at other addresses.

    Args:
        supervisor: Running.
    """

    def __init__(self, supervisor: TritonSupervisor) -> None:
        self._supervisor = supervisor

    @property
    def num_ready(self) -> int:
        """How many times it was started, once it is ready; 0 while it is not."""
        return int(self._supervisor.statistics()["num_starts"]) if self._supervisor.endpoint is not None else 0

    @contextlib.contextmanager
    def connect(self) -> Iterator[Server]:
        """It, where it listens now."""
        assert self._supervisor.endpoint is not None
        server = Server(_http_address(self._supervisor), self._supervisor.endpoint.address)
        try:
            yield server
        finally:
            server.close()


@contextlib.contextmanager
def triton_itself(repository: Path) -> Iterator[Truth]:
    """A tritonserver, asked without us."""
    with _loop() as loop:
        context = running_triton(repository, args={"allow_http": True})
        supervisor = _run(loop, context.__aenter__())
        try:
            yield Truth(supervisor)
        finally:
            _run(loop, context.__aexit__(None, None, None))


@contextlib.contextmanager
def front_and_triton(repository: Path) -> Iterator[tuple[Server, Server]]:
    """Us without Ray, and the tritonserver that is behind us."""
    with _loop() as loop:
        context = _front_and_triton(repository, loop)
        ours, theirs = _run(loop, context.__aenter__())
        try:
            yield ours, theirs
        finally:
            ours.close()
            theirs.close()
            _run(loop, context.__aexit__(None, None, None))


def _http_address(supervisor: TritonSupervisor) -> str:
    """Where a server's own HTTP endpoint listens."""
    line = psutil.Process(supervisor.statistics()["pid"]).cmdline()
    return "127.0.0.1:" + next(word.partition("=")[2] for word in line if word.startswith("--http-port="))


@contextlib.asynccontextmanager
async def _front_and_triton(repository: Path, loop: asyncio.AbstractEventLoop) -> AsyncIterator[tuple[Server, Server]]:
    async with contextlib.AsyncExitStack() as stack:
        supervisor = await stack.enter_async_context(running_triton(repository, args={"allow_http": True}))
        endpoint = supervisor.endpoint
        assert endpoint is not None
        plane, _ = await stack.enter_async_context(running_plane(endpoint))
        http = uvicorn.Server(
            uvicorn.Config(http_app(plane, LIMITS), port=0, log_level="error", lifespan="off", ws="none")
        )
        serving = asyncio.ensure_future(http.serve())
        rpcs, port = grpc_server_of(plane)
        await rpcs.start()
        await wait_until(lambda: http.started, timeout_s=_START_S)
        host, http_port = http.servers[0].sockets[0].getsockname()[:2]

        def call(model_name: str, inputs: Arrays, *, timeout_s: float, **options: Any) -> Arrays:
            async def infer() -> Arrays:
                request = request_of_arrays(model_name, inputs, **options)
                answer = await plane.infer(request, timeout_s=timeout_s)
                return {tensor.name: tensor.to_numpy() for tensor in answer.outputs}

            return asyncio.run_coroutine_threadsafe(infer(), loop).result()

        yield (
            Server(f"{host}:{http_port}", f"127.0.0.1:{port}", call),
            Server(_http_address(supervisor), endpoint.address),
        )
        http.should_exit = True
        await serving
        await rpcs.stop(None)


@contextlib.contextmanager
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="contract-servers")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _run(loop: asyncio.AbstractEventLoop, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, loop).result(_START_S)
