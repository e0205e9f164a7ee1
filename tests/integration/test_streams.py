"""Streams of the real server: unchanged Triton clients, generate beside Triton's own, handles, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_aio

from serve_app.client import ModelClient
from serve_app.errors import BackendFailed, InvalidRequest, Unsupported
from tests.support.stack import Stack
from tests.support.waiting import wait_until_sync
from tests.support.ways_in import client_inputs

pytestmark = pytest.mark.integration

PIXELS = np.zeros((1, 64), np.float32)


def counts(count: int, *, delay_ms: int = 0) -> dict[str, Any]:
    return {"COUNT": np.array([count], np.int32), "DELAY_MS": np.array([delay_ms], np.int32)}


def repeat_inputs(count: int, *, delay_ms: int = 0) -> list[Any]:
    return client_inputs(triton_grpc, counts(count, delay_ms=delay_ms))


@pytest.fixture(autouse=True, scope="module")
def one_server(stack: Stack) -> None:
    """`num_cancelled` asks a model what it has counted; with more servers another one might answer."""
    stack.scale_fleet(1)


def num_cancelled(stack: Stack) -> int:
    answer = requests.post(f"http://{stack.http}/v2/models/repeat/generate", json={"COUNT": 1}, timeout=20)
    return int(answer.json()["CANCELLED"])


async def drain(responses: AsyncIterator[Any], into: list[Any]) -> None:
    async for response in responses:
        into.append(response)


class Received:
    """The callback of a stream, and what it was called with."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __call__(self, result: Any, error: Any) -> None:
        self._queue.put((result, error))

    def take(self, num: int) -> list[tuple[Any, Any]]:
        return [self._queue.get(timeout=20) for _ in range(num)]


def test_tritons_client_streams_a_decoupled_model(stack: Stack) -> None:
    """Every response of every request, those of one request in order, and an empty last one where asked for."""
    received = Received()
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        client.start_stream(received)
        for number in range(3):
            client.async_stream_infer(
                "repeat", repeat_inputs(4), request_id=f"{number}", enable_empty_final_response=number == 2
            )
        by_id: dict[str, list[Any]] = {}
        for result, error in received.take(13):
            assert error is None
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            by_id.setdefault(response.id, []).append("end" if final else int(result.as_numpy("INDEX")[0]))
        client.stop_stream()
    assert by_id == {"0": [0, 1, 2, 3], "1": [0, 1, 2, 3], "2": [0, 1, 2, 3, "end"]}


def test_tritons_client_streams_a_batching_model(stack: Stack) -> None:
    """One response for each request, in the order of the requests; errors in their places, and the stream goes on."""
    received = Received()
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        client.start_stream(received)
        for number in range(20):
            pixels = PIXELS[:, :63] if number == 7 else PIXELS
            client.async_stream_infer("digits", client_inputs(triton_grpc, {"pixels": pixels}), request_id=f"{number}")
        client.async_stream_infer("nothing", client_inputs(triton_grpc, {"pixels": PIXELS}))
        answers = received.take(21)
        client.stop_stream()
    errors = [error for _, error in answers if error is not None]
    assert len(errors) == 2
    assert any("pixels" in str(error) for error in errors)
    assert any("nothing" in str(error) for error in errors)
    results = [result.get_response() for result, error in answers if error is None]
    assert [response.id for response in results] == [f"{number}" for number in range(20) if number != 7]
    assert all(response.parameters["triton_final_response"].bool_param for response in results)


async def test_tritons_aio_client_streams(stack: Stack) -> None:
    """`stream_infer` gives responses while requests are still to come; cancelling it cancels the model's work."""
    before = num_cancelled(stack)
    async with triton_aio.InferenceServerClient(stack.grpc) as client:
        got: asyncio.Queue[int] = asyncio.Queue()

        async def send() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "repeat", "inputs": repeat_inputs(1)}
            await got.get()
            yield {"model_name": "repeat", "inputs": repeat_inputs(10_000, delay_ms=20)}
            await asyncio.Event().wait()

        stream = client.stream_infer(send())
        indexes = []
        async for result, error in stream:
            assert error is None
            indexes.append(int(result.as_numpy("INDEX")[0]))
            got.put_nowait(1)
            if len(indexes) == 4:
                break
        stream.cancel()
    assert indexes == [0, 0, 1, 2]
    await asyncio.to_thread(wait_until_sync, lambda: num_cancelled(stack) > before, timeout_s=10)


def test_unary_calls_of_a_decoupled_model_are_refused(stack: Stack) -> None:
    """UNIMPLEMENTED and 501, as in Triton, with what to do instead."""
    with triton_grpc.InferenceServerClient(stack.grpc) as client, pytest.raises(Exception, match="stream") as raised:
        client.infer("repeat", repeat_inputs(1))
    assert raised.value.status() == "StatusCode.UNIMPLEMENTED"  # type: ignore[attr-defined]  # InferenceServerException
    body = {"inputs": [{"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [1]}]}
    answer = requests.post(f"http://{stack.http}/v2/models/repeat/infer", json=body, timeout=20)
    assert (answer.status_code, "generate_stream" in answer.json()["error"]) == (501, True)


def test_events_arrive_one_by_one(stack: Stack) -> None:
    """The first one is there long before the last, and a client that leaves stops the model's work."""
    before = num_cancelled(stack)
    url = f"http://{stack.http}/v2/models/repeat/generate_stream"
    started = time.monotonic()
    with requests.post(url, json={"COUNT": 10_000, "DELAY_MS": 20}, stream=True, timeout=20) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = answer.iter_lines()
        assert [next(lines)[:5] for _ in range(4)] == [b"data:", b"", b"data:", b""]
        assert time.monotonic() - started < 15
    wait_until_sync(lambda: num_cancelled(stack) > before, timeout_s=10, what="the model's work to be cancelled")


def test_an_error_among_events(stack: Stack) -> None:
    """It is the last event; before the first one it is a status."""
    url = f"http://{stack.http}/v2/models/repeat/generate_stream"
    answer = requests.post(url, json={"COUNT": 666}, timeout=20)
    assert answer.status_code == 200
    assert answer.text.splitlines()[-2] == 'data: {"error":"model \'repeat\' failed: this model does not count to 666"}'
    assert requests.post(url, json={"COUNT": [1, 2]}, timeout=20).status_code == 400


def test_the_handle_and_the_client_stream(stack: Stack) -> None:
    """An async generator on the handle, an async iterator of the client's; errors are ours; leaving cancels."""

    async def run() -> None:
        handle = stack.handle.options(stream=True)
        answers = [int(a["INDEX"][0]) async for a in handle.stream.remote("repeat", counts(3))]
        assert answers == [0, 1, 2]
        async with ModelClient(stack.app_name) as client:
            assert [int(a["INDEX"][0]) async for a in client.stream("repeat", counts(5))] == list(range(5))
            assert [a["label"].shape async for a in client.stream("digits", {"pixels": PIXELS})] == [(1, 1)]
            got: list[Any] = []
            with pytest.raises(BackendFailed, match="666"):
                await drain(client.stream("repeat", counts(666)), got)
            assert len(got) == 1
            with pytest.raises(InvalidRequest):
                await drain(client.stream("repeat", {"COUNT": np.array([1, 2], np.int32)}), got)
            with pytest.raises(Unsupported):
                await client.ainfer("repeat", counts(1))
            async with contextlib.aclosing(client.stream("repeat", counts(10_000, delay_ms=20))) as responses:
                await anext(responses)

    before = num_cancelled(stack)
    asyncio.run(run())
    wait_until_sync(lambda: num_cancelled(stack) > before, timeout_s=10, what="the model's work to be cancelled")
    wait_until_sync(lambda: stack.model_server_statistics()["plane"].num_running == 0, timeout_s=10)


def test_nothing_is_left_of_any_stream(stack: Stack) -> None:
    """No channel is held, no stream counted."""
    statistics = stack.model_server_statistics()
    assert statistics["plane"].num_running == 0
    assert statistics["plane"].models["repeat"].num_streams == 0
    assert statistics["router"].num_active == 0
