"""Triton's own clients and curl, unchanged, at our address: every call of theirs that asks, describes or infers."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import grpc
import numpy as np
import orjson
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.stack import Stack
from tests.support.ways_in import client_inputs

pytestmark = pytest.mark.integration

VALUES = np.array([[1.5, 2.0, 3.0]], np.float32)
INPUTS = {"INPUT0": VALUES}

# Calls without side effects, and what is true of what they give; JSON in both libraries' words.
ASKING: dict[str, tuple[tuple[Any, ...], Any]] = {
    "is_server_live": ((), lambda answer: answer is True),
    "is_server_ready": ((), lambda answer: answer is True),
    "is_model_ready": (("digits", "1"), lambda answer: answer is True),
    "get_server_metadata": ((), lambda answer: answer["name"] == "serve_app"),
    "get_model_metadata": (("digits",), lambda answer: answer["inputs"][0]["name"] == "pixels"),
    "get_model_config": (("digits",), lambda answer: answer.get("config", answer)["name"] == "digits"),
    "get_model_repository_index": ((), lambda answer: "digits" in str(answer)),
    "get_inference_statistics": (("digits",), lambda answer: answer["model_stats"][0]["name"] == "digits"),
}


def _options(library: Any, call: str) -> dict[str, Any]:
    return {"as_json": True} if "grpc" in library.__name__ and call.startswith("get_") else {}


def _address(stack: Stack, library: Any) -> str:
    return stack.grpc if "grpc" in library.__name__ else stack.http


@pytest.mark.parametrize("call", ASKING)
@pytest.mark.parametrize("library", [triton_http, triton_grpc], ids=["http", "grpc"])
def test_the_clients_ask(stack: Stack, library: Any, call: str) -> None:
    """Each call gives what it gives with Triton."""
    arguments, is_right = ASKING[call]
    with library.InferenceServerClient(_address(stack, library)) as client:
        assert is_right(getattr(client, call)(*arguments, **_options(library, call)))


@pytest.mark.parametrize("library", [triton_http_aio, triton_grpc_aio], ids=["http", "grpc"])
async def test_the_asynchronous_clients_ask_and_infer(stack: Stack, library: Any) -> None:
    """The same calls, awaited."""
    async with library.InferenceServerClient(_address(stack, library)) as client:
        for call, (arguments, is_right) in ASKING.items():
            assert is_right(await getattr(client, call)(*arguments, **_options(library, call))), call
        answer = await client.infer("identity", client_inputs(library, INPUTS), request_id="7")
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), VALUES)


def test_calls_that_do_not_wait(stack: Stack) -> None:
    """`async_infer` of both libraries: one gives a future, the other calls back."""
    with triton_http.InferenceServerClient(stack.http, concurrency=2) as client:
        pending = [client.async_infer("identity", client_inputs(triton_http, INPUTS)) for _ in range(4)]
        for future in pending:
            np.testing.assert_array_equal(future.get_result().as_numpy("OUTPUT0"), VALUES)
    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        for _ in range(4):
            client.async_infer(
                "identity", client_inputs(triton_grpc, INPUTS), lambda result, error: answers.put((result, error))
            )
        for _ in range(4):
            result, error = answers.get(timeout=20)
            assert error is None
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), VALUES)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_packed_both_ways_by_the_client(stack: Stack, algorithm: str) -> None:
    """The HTTP client's two options."""
    with triton_http.InferenceServerClient(stack.http) as client:
        answer = client.infer(
            "identity",
            client_inputs(triton_http, {"INPUT0": np.ones((1, 4000), np.float32)}),
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
    assert answer.as_numpy("OUTPUT0").sum() == 4000


def test_metadata_is_tritons_to_the_byte(stack: Stack) -> None:
    """The -1 of the batch dimension included, which perf_analyzer insists on."""
    address = stack.model_server_statistics()["router"].endpoints[0].endpoint.address
    with grpc.insecure_channel(stack.grpc) as ours, grpc.insecure_channel(address) as tritons:
        for model in ("identity", "minilm", "echo", "unbatched"):
            asked = service_pb2.ModelMetadataRequest(name=model)
            here, there = (
                service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelMetadata(asked, timeout=20)
                for channel in (ours, tritons)
            )
            assert here.SerializeToString(deterministic=True) == there.SerializeToString(deterministic=True)


async def test_different_shapes_at_the_same_time(stack: Stack) -> None:
    """`[1, 5]` and `[1, 9]` never meet in one batch; each gets its own back."""
    async with triton_grpc_aio.InferenceServerClient(stack.grpc) as client:

        async def ask(index: int) -> None:
            values = np.full((1, 5 if index % 2 else 9), index, np.float32)
            answer = await client.infer("identity", client_inputs(triton_grpc_aio, {"INPUT0": values}))
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), values)

        await asyncio.gather(*(ask(index) for index in range(100)))


async def test_a_batch_of_large_requests(stack: Stack) -> None:
    """Eight of 4.9 MB at once: what Triton is sent and sends back is far above gRPC's own 4 MB."""
    async with triton_grpc_aio.InferenceServerClient(stack.grpc) as client:

        async def ask(index: int) -> None:
            values = np.full((1, 3 * 640 * 640), index, np.float32)
            answer = await client.infer("identity", client_inputs(triton_grpc_aio, {"INPUT0": values}))
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), values)

        await asyncio.gather(*(ask(index) for index in range(8)))


BODY = orjson.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 300_000], "data": [0.5] * 300_000}]}
)


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "text/plain", "nonsense"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
def test_any_content_type_whole_or_chunked(stack: Stack, content_type: str | None, is_chunked: bool) -> None:
    """What curl sends when nobody tells it what a body is, 1.2 MB of it."""
    call = requests.Request(
        "POST",
        f"http://{stack.http}/v2/models/identity/infer",
        data=iter([BODY[:1000], BODY[1000:]]) if is_chunked else BODY,
        headers={} if content_type is None else {"Content-Type": content_type},
    )
    with requests.Session() as session:
        answer = session.send(session.prepare_request(call), timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["shape"] == [1, 300_000]


async def test_a_body_that_waits_to_be_asked_for(stack: Stack) -> None:
    """`Expect: 100-continue`, as curl sends it above 1 MB: the body goes out once the server has said so."""
    host, port = stack.http.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v2/models/identity/infer HTTP/1.1\r\nHost: {stack.http}\r\nContent-Length: {len(BODY)}\r\n"
    writer.write(f"{head}Expect: 100-continue\r\nConnection: close\r\n\r\n".encode())
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).startswith(b"HTTP/1.1 100 ")
    writer.write(BODY)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).startswith(b"HTTP/1.1 200 ")
    writer.close()
    await writer.wait_closed()
