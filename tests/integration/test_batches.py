"""Batches form under load and cost nothing without it; cancelled callers leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import requests

from tests.support import sample_inputs
from tests.support.stack import Stack
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration


def digits_body() -> dict[str, Any]:
    pixels = sample_inputs.digits()[0][:1]
    return {"inputs": [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": pixels.ravel().tolist()}]}


@pytest.fixture
def wide(stack: Stack) -> Iterator[str]:
    """A model whose executions take as long whoever else uses this machine, with room for 64 rows in each."""
    url = f"http://{stack.http}/v2/repository/models/slow/load"
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    config = {
        "backend": "python",
        "max_batch_size": 64,
        "input": [{"name": "INPUT0", **tensor}],
        "output": [{"name": "OUTPUT0", **tensor}],
    }
    requests.post(url, json={"parameters": {"config": json.dumps(config)}}, timeout=60).raise_for_status()
    yield "slow"
    requests.post(url, timeout=60).raise_for_status()


@pytest.mark.parametrize("mode", ["serve_batch", "continuous"])
async def test_batches_form_at_sixty_four_in_flight(stack: Stack, wide: str, mode: str) -> None:
    """At 64 one-row requests in flight, at least 8 rows a ModelInfer reach Triton on average."""
    stack.configure({"default": {"batching": {"mode": mode}}})
    url = f"http://{stack.http}/v2/models/{wide}/infer"
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [100.0]}]}

    async def caller(client: aiohttp.ClientSession, num_requests: int) -> None:
        for _ in range(num_requests):
            async with client.post(url, json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as client:
        await asyncio.gather(*(caller(client, 1) for _ in range(64)))
        before = stack.triton_statistics(wide)
        await asyncio.gather(*(caller(client, 10) for _ in range(64)))
    sent = stack.sent_since(before, wide, num_rows=64 * 10)
    assert sent.num_rows == 64 * 10
    assert sent.num_rows / sent.num_requests >= 8.0, sent


async def test_a_lone_request_waits_for_no_window(stack: Stack) -> None:
    """With a window of ten seconds, a request that finds its model idle is answered long before that."""
    stack.configure({"default": {"batching": {"mode": "serve_batch", "window_s": 10.0}}})
    async with aiohttp.ClientSession() as client:
        for _ in range(3):
            started = time.monotonic()
            async with client.post(f"http://{stack.http}/v2/models/digits/infer", json=digits_body()) as answer:
                assert answer.status == 200
            assert time.monotonic() - started < 5.0


async def test_eighty_percent_of_five_hundred_are_cancelled(stack: Stack) -> None:
    """Callers that leave at random moments take nothing with them: the next hundred are answered, nothing is left."""
    stack.configure({"default": {"batching": {"mode": "serve_batch"}}})
    url = f"http://{stack.http}/v2/models/slow/infer"
    rng = random.Random(11)

    def body(value: float) -> dict[str, Any]:
        return {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.0, value]}]}

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=500)) as client:

        async def call(value: float) -> list[float]:
            async with client.post(url, json=body(value)) as answer:
                document = await answer.json()
                assert answer.status == 200, document
                data: list[float] = document["outputs"][0]["data"]
                return data

        async def call_and_leave(value: float) -> None:
            task = asyncio.create_task(call(value))
            await asyncio.sleep(rng.random() * 0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        calls = [call_and_leave(index) if index % 5 else call(index) for index in range(500)]
        answers = await asyncio.gather(*calls)
        assert [answer for answer in answers if answer is not None] == [[1.0, float(i)] for i in range(0, 500, 5)]
        assert await asyncio.gather(*(call(index) for index in range(100))) == [[1.0, float(i)] for i in range(100)]

    def is_empty() -> bool:
        text = stack.model_server_statistics()["repr"]
        return "Requests: 0 running" in text and "0 queued, 0 in flight" in text

    await wait_until(is_empty, timeout_s=20, what=lambda: stack.model_server_statistics()["repr"])
    router = stack.model_server_statistics()["router"]
    assert all(endpoint.num_active == 0 for endpoint in router.endpoints), router


async def test_settings_change_in_place(stack: Stack) -> None:
    """`serve deploy` of a changed file: the same processes, and the new batch size in force."""
    pids = stack.replica_pids()
    for max_batch_rows, num_requests in ((2, 8), (8, 2), (4, 4)):
        stack.configure(
            {"default": {"batching": {"mode": "continuous", "max_batch_rows": max_batch_rows}}}, by_command=True
        )
        before = stack.triton_statistics("identity")
        answer = stack.client.infer("identity", {"INPUT0": np.zeros((16, 3), np.float32)})
        assert answer["OUTPUT0"].shape == (16, 3)
        assert stack.sent_since(before, "identity", num_rows=16).num_requests == num_requests
    assert stack.replica_pids() == pids


async def test_wrong_settings_are_refused_and_the_old_ones_stay(stack: Stack) -> None:
    """One slip in a deployed file does not end the service: same processes, same settings, and the refusal to read."""
    good = {"default": {"batching": {"mode": "continuous", "max_batch_rows": 4}}}
    stack.configure(good)
    pids, config = stack.replica_pids(), stack.model_server_statistics()["config"]
    stack.deploy_user_config({"default": {"batching": {"max_batch_row": 2}}})
    await wait_until(lambda: "max_batch_row" in stack.model_server_statistics()["refused_config"], timeout_s=30)
    assert stack.model_server_statistics()["config"] == config
    assert stack.client.infer("identity", {"INPUT0": np.zeros((1, 3), np.float32)})["OUTPUT0"].shape == (1, 3)
    stack.configure({"default": {"batching": {"mode": "continuous", "max_batch_rows": 8}}})
    assert stack.model_server_statistics()["refused_config"] == ""
    assert stack.replica_pids() == pids
