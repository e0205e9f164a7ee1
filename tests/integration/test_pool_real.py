"""The pool and the router against real tritonservers: kill -9 under load, a dead stub, errors in Triton's own words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from serve_app.endpoint import Endpoint
from serve_app.errors import (
    BackendFailed,
    DeadlineExceeded,
    EndpointUnavailable,
    ModelNotFound,
    NoEndpoint,
    RequestRejected,
    ServeAppError,
)
from serve_app.fleet.supervisor import TritonSupervisor
from serve_app.protocol.messages import InferRequest
from serve_app.protocol.tensor import Tensor
from serve_app.settings import ChannelSettings
from serve_app.triton.pool import ChannelPool
from serve_app.triton.router import Router
from tests.support.triton_server import python_config, running_triton, write_model

pytestmark = pytest.mark.integration

MOODY_PY = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            mood = float(x.reshape(-1)[0])
            if mood == -1:
                raise ValueError("no negative numbers")
            if mood == -2:
                os._exit(3)
            time.sleep(max(mood, 0.0))
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)]))
        return answers
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An identity, and a model that raises, dies or sleeps as its input says."""
    folder = tmp_path_factory.mktemp("repository")
    write_model(folder, "identity")
    write_model(folder, "moody", config=python_config(), files={"1/model.py": MOODY_PY})
    return folder


def make_request(value: float, *, model_name: str = "identity", rows: int = 1) -> InferRequest:
    tensor = Tensor.from_numpy("INPUT0", np.full((rows, 4), value, np.float32))
    return InferRequest(model_name, [tensor])


class Fleet:
    """Supervised servers, and a router that is told whenever one comes or goes."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.servers: list[TritonSupervisor] = []
        self._endpoints: dict[int, Endpoint] = {}

    def listen(self, index: int, endpoint: Endpoint | None) -> None:
        if endpoint is None:
            self._endpoints.pop(index, None)
        else:
            self._endpoints[index] = endpoint
        self.router.update(list(self._endpoints.values()))

    def kill(self, index: int) -> None:
        """SIGKILL the server's process; its supervisor starts another."""
        pid = self.servers[index].statistics()["pid"]
        os.kill(pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def running_fleet(repository: Path, num_servers: int) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        fleet = Fleet(await stack.enter_async_context(Router(ChannelSettings())))
        for index in range(num_servers):
            server = await stack.enter_async_context(
                running_triton(repository, on_endpoint=lambda endpoint, index=index: fleet.listen(index, endpoint))
            )
            fleet.servers.append(server)
        yield fleet


class Load:
    """Clients that send without pause and note how each request ended."""

    def __init__(self, router: Router, *, num_clients: int) -> None:
        self._router, self._num_clients = router, num_clients
        self._is_on = True
        self.ended: Counter[str] = Counter()
        self.errors: list[ServeAppError] = []
        self.failed = asyncio.Event()
        self.last_error_at = 0.0

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.ensure_future(self._client(number)) for number in range(self._num_clients)]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_on = False
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        value = float(number)
        while self._is_on:
            value += self._num_clients
            try:
                response = await self._router.infer(make_request(value), timeout_s=10)
            except ServeAppError as error:
                self.errors.append(error)
                self.failed.set()
                self.last_error_at = time.monotonic()
                await asyncio.sleep(0.02)
            else:
                assert (response.outputs[0].to_numpy() == value).all()
                self.ended["ok"] += 1

    async def wait_for(self, count: int, *, timeout_s: float = 30.0) -> None:
        """Return when `count` more requests were answered."""
        target = self.ended["ok"] + count
        deadline = time.monotonic() + timeout_s
        while self.ended["ok"] < target:
            assert time.monotonic() < deadline, f"{self._router!r} answered {self.ended['ok']}"
            await asyncio.sleep(0.01)


async def test_kill_of_one_of_two_servers_is_not_seen(repository: Path) -> None:
    """kill -9 of each of two servers in turn, with 64 requests in flight: no client sees an error."""
    async with running_fleet(repository, 2) as fleet, Load(fleet.router, num_clients=64) as load:
        for index in (0, 1):
            await load.wait_for(500)
            fleet.kill(index)
            await load.wait_for(500)
            deadline = time.monotonic() + 20
            while fleet.router.num_endpoints < 2:
                assert time.monotonic() < deadline, f"not back: {fleet.router!r}"
                await asyncio.sleep(0.02)
        await load.wait_for(200)
    assert load.errors == []
    assert fleet.router.statistics().num_retries > 0


async def test_kill_of_the_only_server_is_a_typed_error_and_soon_over(repository: Path) -> None:
    """kill -9 of the only server under load: errors say that it is gone, and answers flow again within 5 s."""
    async with running_fleet(repository, 1) as fleet, Load(fleet.router, num_clients=32) as load:
        await load.wait_for(200)
        killed_at = time.monotonic()
        fleet.kill(0)
        await load.failed.wait()
        await load.wait_for(200)
        assert load.last_error_at - killed_at < 5.0
        num_errors = len(load.errors)
        await load.wait_for(200)
        assert len(load.errors) == num_errors
    assert all(isinstance(error, EndpointUnavailable | NoEndpoint) for error in load.errors)


async def test_dead_stub_of_one_server_is_not_seen(repository: Path) -> None:
    """A model's Python process dies on one of two servers: requests for it are answered by the other."""
    async with running_fleet(repository, 2) as fleet, Load(fleet.router, num_clients=4) as load:
        await load.wait_for(200)
        server = psutil.Process(fleet.servers[0].statistics()["pid"])
        stubs = [p for p in server.children(recursive=True) if "identity" in " ".join(p.cmdline())]
        assert stubs, [p.cmdline() for p in server.children(recursive=True)]
        for stub in stubs:
            stub.kill()
        await load.wait_for(1000)
    assert load.errors == []


async def test_errors_in_tritons_own_words(repository: Path) -> None:
    """What the real server says becomes the right error, and the pool answers the next request."""
    async with running_triton(repository) as server:
        assert server.endpoint is not None
        async with ChannelPool(server.endpoint, ChannelSettings()) as pool:
            for request, expected, text in (
                (make_request(0, model_name="nope"), ModelNotFound, "unknown model 'nope'"),
                (make_request(0, rows=9), RequestRejected, "batch-size must be <= 8"),
                (make_request(-1, model_name="moody"), BackendFailed, "ValueError: no negative numbers$"),
            ):
                with pytest.raises(expected, match=text):
                    await pool.infer(request, timeout_s=10)
            with pytest.raises(DeadlineExceeded):
                await pool.infer(make_request(0.5, model_name="moody"), timeout_s=0.1)
            assert (await pool.infer(make_request(7), timeout_s=10)).outputs[0].shape == (1, 4)
            assert "Requests: 0 active, 0 queued" in repr(pool)


def num_connections(port: int) -> int:
    connections = psutil.Process().net_connections("tcp")
    return sum(bool(c.raddr) and c.raddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in connections)


async def test_pool_of_four_is_four_connections(repository: Path) -> None:
    """Four channels are four TCP connections at the real server."""
    async with running_triton(repository) as server:
        assert server.endpoint is not None
        port = int(server.endpoint.address.rpartition(":")[2])
        before = num_connections(port)  # the supervisor looks after its server, too
        async with ChannelPool(server.endpoint, ChannelSettings(num_channels=4)) as pool:
            await asyncio.gather(*(pool.infer(make_request(i), timeout_s=10) for i in range(16)))
            assert num_connections(port) == before + 4
        for _ in range(200):
            if num_connections(port) == before:
                break
            await asyncio.sleep(0.01)
        assert num_connections(port) == before
