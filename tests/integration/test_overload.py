"""Several times what a real model can do, asked at once: only answers and refusals, and no work in vain."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import orjson
import pytest
import tritonclient.grpc as triton_grpc
from google.rpc import error_details_pb2, status_pb2
from starlette.types import ASGIApp

from serve_app.dataplane import DataPlane
from serve_app.ingress.http_app import http_app
from serve_app.settings import ModelSettings, QueueSettings
from tests.support.asgi import Answer, request
from tests.support.front import LIMITS, running_plane
from tests.support.stack import ROOT, Stack
from tests.support.triton_server import running_triton

pytestmark = pytest.mark.integration

MODELS = ROOT / "tests" / "support" / "model_repository"
MAX_REQUESTS, BATCH_ROWS, NUM_CALLERS, NUM_ROUNDS = 24, 8, 200, 5
SLEEP_MS = 20.0


@pytest.fixture
async def front() -> AsyncIterator[tuple[DataPlane, ASGIApp]]:
    """A front whose queues hold `MAX_REQUESTS`, before a real server."""
    settings = ModelSettings(queue=QueueSettings(max_requests=MAX_REQUESTS))
    async with running_triton(MODELS, args={"models": ["slow", "unbatched"]}) as server:
        assert server.endpoint is not None
        async with running_plane(server.endpoint, settings=settings) as (plane, _):
            yield plane, http_app(plane, LIMITS)


def body(number: int, milliseconds: float = SLEEP_MS) -> bytes:
    tensor = {"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [milliseconds, float(number)]}
    return orjson.dumps({"inputs": [tensor]})


async def test_a_flood_gets_answers_and_refusals_alone(front: tuple[DataPlane, ASGIApp]) -> None:
    """Each of a thousand callers hears 200 with its own rows, or 429 with a time; the model runs what is answered.

    Counted in executions rather than in seconds: every row that Triton ran was somebody's answer, and all batches but
    the first and the last of each wave were full. The queue never grew above its bound, and in the end nothing is held.
    """
    plane, app = front
    path = "/v2/models/slow/infer"
    most_waiting = 0

    async def ask(number: int) -> Answer:
        nonlocal most_waiting
        answer = await request(app, "POST", path, body(number), leave=asyncio.Event())
        most_waiting = max(most_waiting, plane.statistics().models["slow"].dispatcher.num_waiting_requests)
        return answer

    answers: list[Answer] = []
    for wave in range(NUM_ROUNDS):
        numbers = range(wave * NUM_CALLERS, (wave + 1) * NUM_CALLERS)
        answers += await asyncio.gather(*(ask(number) for number in numbers))
    statuses = Counter(answer.status for answer in answers)
    assert set(statuses) == {200, 429}
    assert statuses.total() == NUM_ROUNDS * NUM_CALLERS
    for number, answer in enumerate(answers):
        if answer.status == 200:
            assert answer.json["outputs"][0]["data"] == [SLEEP_MS, number]
        else:
            assert int(answer.headers["retry-after"]) >= 1
    assert 0 < most_waiting <= MAX_REQUESTS
    # Of each wave a queue full is answered, and what had gone to the model when it was full.
    assert statuses[200] >= NUM_ROUNDS * MAX_REQUESTS
    statistics = await counted(plane, statuses[200])
    assert statistics.inference_count == statuses[200]
    assert statistics.execution_count <= statuses[200] / BATCH_ROWS + 4 * NUM_ROUNDS
    load = plane.statistics().load
    assert (load.num_requests, load.num_bytes) == (0, 0)


async def counted(plane: DataPlane, num_rows: int) -> Any:
    """What Triton says of the model once it has counted so many rows: it counts after it has answered."""
    ends_at = time.monotonic() + 10.0
    while True:
        statistics = (await plane.control.model_statistics("slow", "")).model_stats[0]
        if statistics.inference_count >= num_rows or time.monotonic() > ends_at:
            return statistics
        await asyncio.sleep(0.02)


async def test_another_model_is_served_in_a_flood(front: tuple[DataPlane, ASGIApp]) -> None:
    """A model whose neighbour's queue is full answers everybody all the same."""
    _, app = front
    assert (await request(app, "POST", "/v2/models/slow/infer", body(0))).status == 200
    flood = [
        asyncio.ensure_future(request(app, "POST", "/v2/models/slow/infer", body(n, 1000.0), leave=asyncio.Event()))
        for n in range(200)
    ]
    await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)  # a refusal: its queue is full
    tensor = {"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}
    others = [
        request(app, "POST", "/v2/models/unbatched/infer", orjson.dumps({"inputs": [tensor]}), leave=asyncio.Event())
        for _ in range(20)
    ]
    answers = await asyncio.gather(*others)
    assert [answer.status for answer in answers] == [200] * 20
    assert {task.result().status for task in flood if task.done()} <= {200, 429}
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


def test_grpc_says_when_to_come_back(stack: Stack) -> None:
    """Through Ray Serve's ingress, by an unchanged client: a retry delay in both of gRPC's forms."""
    stack.configure({"models": {"slow": {"queue": {"max_requests": 1}}}})
    values = np.array([[500.0, 1.0]], np.float32)
    with triton_grpc.InferenceServerClient(stack.grpc) as client, ThreadPoolExecutor(32) as threads:
        tensor = triton_grpc.InferInput("INPUT0", [1, 2], "FP32").set_data_from_numpy(values)

        def ask(_: int) -> BaseException | None:
            try:
                client.infer("slow", [tensor])
            except triton_grpc.InferenceServerException as error:
                cause: BaseException | None = error.__context__
                return cause
            return None

        refusals = [error for error in threads.map(ask, range(64)) if error is not None]
    assert refusals
    for error in refusals:
        assert isinstance(error, grpc.RpcError)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata = dict(error.trailing_metadata())
        status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
        retry = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(retry)
        assert status.message == error.details()
        assert int(metadata["grpc-retry-pushback-ms"]) == retry.retry_delay.ToMilliseconds() > 0
