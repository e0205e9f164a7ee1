"""Two real servers and a front without Ray: one is stopped, killed, or given a request that kills its model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2

from serve_app.dataplane import DataPlane
from serve_app.endpoint import Endpoint
from serve_app.errors import DeadlineExceeded, ModelCrashed, ServeAppError
from serve_app.fleet.supervisor import TritonSupervisor
from serve_app.protocol.messages import InferRequest
from serve_app.protocol.tensor import Tensor
from serve_app.settings import ChannelSettings
from serve_app.triton.member import MemberState
from serve_app.triton.pool import ChannelPool
from serve_app.triton.router import Router
from tests.support.front import running_plane
from tests.support.triton_server import python_config, running_triton, write_model
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

MOODY_PY = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            if (x == -2).any():
                os._exit(3)
            time.sleep(max(float(x.reshape(-1)[0]), 0.0) if x.shape[0] == 1 else 0.0)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)]))
        return answers
"""
REJECTING = """
dynamic_batching {
  default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 60000000 allow_timeout_override: true }
}
"""


@dataclass
class Pair:
    """Two servers and a front over both, told when a server comes or goes."""

    plane: DataPlane
    router: Router
    servers: list[TritonSupervisor]

    @property
    def pids(self) -> list[int]:
        return [server.statistics()["pid"] for server in self.servers]

    async def both(self) -> None:
        """Wait until both are asked."""
        await wait_until(
            lambda: [e.state for e in self.router.statistics().endpoints] == [MemberState.AVAILABLE] * 2,
            timeout_s=60,
            what=lambda: self.router,
        )


def make_request(value: float, *, model: str = "identity", rows: int = 1) -> InferRequest:
    return InferRequest(model, [Tensor.from_numpy("INPUT0", np.full((rows, 4), value, np.float32))])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    repository: Path = tmp_path_factory.mktemp("failover")
    write_model(repository, "identity")
    for name, extra in (("moody", ""), ("plain", ""), ("rejecting", REJECTING)):
        write_model(repository, name, config=python_config(extra=extra), files={"1/model.py": MOODY_PY})
    endpoints: dict[int, Endpoint] = {}
    async with contextlib.AsyncExitStack() as stack:
        plane, router = await stack.enter_async_context(running_plane())

        def listen(index: int, endpoint: Endpoint | None) -> None:
            endpoints.pop(index, None)
            if endpoint is not None:
                endpoints[index] = endpoint
            router.update(list(endpoints.values()))

        servers = await asyncio.gather(
            *(
                stack.enter_async_context(
                    running_triton(repository, on_endpoint=lambda endpoint, index=index: listen(index, endpoint))
                )
                for index in range(2)
            )
        )
        yield Pair(plane, router, list(servers))
        for server in servers:  # which saves the seconds of a soft stop
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.statistics()["pid"], signal.SIGKILL)


class Load:
    """Callers with values of their own."""

    def __init__(self, plane: DataPlane, *, num_callers: int) -> None:
        self._plane, self._num_callers = plane, num_callers
        self._is_on = True
        self.num_ok = 0
        self.errors: list[ServeAppError] = []
        self.longest_s = 0.0

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.ensure_future(self._call(number)) for number in range(self._num_callers)]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_on = False
        await asyncio.gather(*self._tasks)

    async def _call(self, number: int) -> None:
        value = float(number)
        while self._is_on:
            value += self._num_callers
            started = time.monotonic()
            try:
                response = await self._plane.infer(make_request(value), timeout_s=30)
            except ServeAppError as error:
                self.errors.append(error)
            else:
                assert (response.outputs[0].to_numpy() == value).all(), "an answer to somebody else"
                self.num_ok += 1
            self.longest_s = max(self.longest_s, time.monotonic() - started)

    async def more(self, count: int) -> None:
        target = self.num_ok + count
        await wait_until(lambda: self.num_ok >= target, timeout_s=60, what=lambda: (self.num_ok, self.errors[:3]))


async def test_a_stopped_server_costs_nobody_an_answer(pair: Pair) -> None:
    """SIGSTOP under load: it is ejected, what was on it is answered by the other, and it comes back with SIGCONT."""
    await pair.both()
    async with Load(pair.plane, num_callers=24) as load:
        await load.more(200)
        os.kill(pair.pids[0], signal.SIGSTOP)
        try:
            await wait_until(lambda: pair.router.num_endpoints == 1, timeout_s=20, what=lambda: pair.router)
            await load.more(300)
        finally:
            os.kill(pair.pids[0], signal.SIGCONT)
        await pair.both()
        await load.more(100)
    assert load.errors == []
    assert load.longest_s < 15, "half of the callers' budget"
    assert sum(endpoint.num_stalls for endpoint in pair.router.statistics().endpoints) >= 1
    print(f"longest answer with a stopped server: {load.longest_s:.2f} s")


async def test_a_killed_server_costs_nobody_an_answer(pair: Pair) -> None:
    """SIGKILL under load of merged requests: all are answered, those that were lost one by one."""
    await pair.both()
    async with Load(pair.plane, num_callers=48) as load:
        await load.more(200)
        os.kill(pair.pids[1], signal.SIGKILL)
        await load.more(500)
        await pair.both()
    assert load.errors == []


async def test_a_request_that_kills_its_model_takes_nobody_along(pair: Pair) -> None:
    """One poisoned request among eight in a batch: it alone fails, after two tries; the fleet heals."""
    await pair.both()
    for _ in range(4):
        await pair.plane.infer(make_request(0, model="moody"), timeout_s=30)
    healed = sum(server.num_healed for server in pair.servers)
    values = [0.0, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0, 0.0]
    answers = await asyncio.gather(
        *(pair.plane.infer(make_request(value, model="moody"), timeout_s=60) for value in values),
        return_exceptions=True,
    )
    assert [isinstance(answer, BaseException) for answer in answers] == [value < 0 for value in values], answers
    assert isinstance(answers[3], ModelCrashed)
    await wait_until(lambda: sum(server.num_healed for server in pair.servers) > healed, timeout_s=30)
    assert sum(server.num_healed for server in pair.servers) - healed <= 2, "the poison was sent twice at most"
    for _ in range(10):
        await pair.plane.infer(make_request(0, model="moody"), timeout_s=60)
    assert all(psutil.pid_exists(pid) for pid in pair.pids)


@pytest.mark.parametrize(("model", "is_rejected"), [("plain", False), ("rejecting", True)])
async def test_what_tritons_timeout_does(pair: Pair, model: str, is_rejected: bool) -> None:
    """Behind a busy instance: a queue policy that lets it count drops what has expired; without one it runs anyway."""
    await pair.both()
    endpoint = pair.servers[0].endpoint
    assert endpoint is not None
    async with ChannelPool(endpoint, ChannelSettings()) as pool:
        before = await executions(pool, model)
        busy = []
        for _ in range(3):  # one runs, one is at hand for the instance, and no queue policy looks at either any more
            busy.append(asyncio.ensure_future(pool.infer(make_request(0.4, model=model), timeout_s=30)))
            await asyncio.sleep(0.05)
        late = make_request(0.0, model=model)
        late.parameters["timeout"] = 100_000  # microseconds
        if is_rejected:
            with pytest.raises(DeadlineExceeded):
                await pool.infer(late, timeout_s=30)
        else:
            await pool.infer(late, timeout_s=30)
        await asyncio.gather(*busy)
        assert await executions(pool, model) - before == (3 if is_rejected else 4)


async def executions(pool: ChannelPool, model: str) -> int:
    """Rows that a server has run of a model."""
    request = service_pb2.ModelStatisticsRequest(name=model)
    answer = await pool.call("ModelStatistics", lambda left_s: request, timeout_s=10)
    return int(answer.model_stats[0].inference_count)


@pytest.mark.parametrize("model", ["plain", "rejecting"])
async def test_a_budget_ends_a_call_whatever_the_model_does(pair: Pair, model: str) -> None:
    """A call of 300 ms ends then, and what only waited in Triton is not run after it."""
    await pair.both()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await pair.plane.infer(make_request(1.5, model=model), timeout_s=0.3)
    assert 0.29 <= time.monotonic() - started < 1.4, "before the model is done"
