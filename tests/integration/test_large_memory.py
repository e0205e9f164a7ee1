"""What large tensors cost a replica in memory, and that what is too large is refused before it is read."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
from collections.abc import AsyncIterator

import grpc
import psutil
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2

from benchmarks.large_tensors import MIB, WAYS, measure, most_bytes, warm_up
from tests.support.front_process import ROOT, FrontProcess, running_front_process
from tests.support.triton_server import running_triton

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

LIMIT = 8 * MIB
NEEDED_BYTES = 12 * 1024**3
PATH = "/v2/models/identity/infer"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def triton() -> AsyncIterator[str]:
    """Address of a real tritonserver with the identity."""
    async with running_triton(ROOT / "model_repository", args={"models": ["identity"]}) as server:
        assert server.endpoint is not None
        yield server.endpoint.address


@pytest.mark.parametrize("megabytes", [64, 512])
async def test_a_large_tensor_is_held_a_few_times(triton: str, megabytes: int) -> None:
    """There and back, over HTTP and gRPC, again and again: never more than the bound that the documents state."""
    available = psutil.virtual_memory().available
    if megabytes > 64 and available < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES >> 30} GiB of memory for all processes, {available >> 30} GiB are available")
    await asyncio.to_thread(_check_memory, triton, megabytes)


def _check_memory(triton: str, megabytes: int) -> None:
    with running_front_process(triton) as front:
        warm_up(front)
        before = front.resident_bytes()
        bound = most_bytes(megabytes * MIB, megabytes * MIB)
        for _ in range(2 if megabytes <= 64 else 1):
            for way in WAYS:
                cost = measure(front, way, megabytes)
                assert cost.peak_bytes <= bound, f"{way}: {cost}"
        assert front.resident_bytes() - before <= bound // 2


async def test_what_is_too_large_is_refused_before_it_is_read(triton: str) -> None:
    """By its declared length before a byte of it is asked for, else at the limit; size and limit are named."""

    def check() -> None:
        with running_front_process(triton, max_request_bytes=LIMIT) as front:
            warm_up(front)
            front.forget_peak()
            before = front.resident_bytes()
            _check_declared(front)
            _check_chunked(front)
            _check_packed(front)
            assert front.peak_bytes() - before < 4 * LIMIT
            code, text = _send_grpc(front, 2 * LIMIT)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert text == f"input tensors: {2 * LIMIT} bytes, the limit is {LIMIT} bytes"

    await asyncio.to_thread(check)


async def test_a_grpc_message_that_is_too_large_is_refused_unread(triton: str) -> None:
    """By the length in front of it, in grpc's words, which name size and limit; the replica never holds it."""

    def check() -> None:
        with running_front_process(triton, max_message_bytes=LIMIT) as front:
            warm_up(front)
            front.forget_peak()
            before = front.resident_bytes()
            code, text = _send_grpc(front, 16 * LIMIT)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            sizes = [int(number) for number in re.findall(r"\d{4,}", text)]
            assert sizes[1] == LIMIT, text
            assert 16 * LIMIT < sizes[0] < 16 * LIMIT + 100
            assert front.peak_bytes() - before < LIMIT

    await asyncio.to_thread(check)


def _check_declared(front: FrontProcess) -> None:
    for expect in ("", "Expect: 100-continue\r\n"):
        answer = _send_http(front, f"Content-Length: {2**40}\r\n{expect}", [])
        assert answer == (413, f"request body: {2**40} bytes, the limit is {LIMIT} bytes")


def _check_chunked(front: FrontProcess) -> None:
    chunk = b"%x\r\n%s\r\n" % (MIB, bytes(MIB))
    status, text = _send_http(front, "Transfer-Encoding: chunked\r\n", [chunk] * 9)  # and no end of it
    assert status == 413
    assert text.startswith("request body: ")
    assert text.endswith(f"the limit is {LIMIT} bytes")


def _check_packed(front: FrontProcess) -> None:
    body = gzip.compress(bytes(512 * MIB), 1)
    headers = f"Content-Encoding: gzip\r\nContent-Length: {len(body)}\r\n"
    assert _send_http(front, headers, [body]) == (
        413,
        f"unpacked request body: {LIMIT + 1} bytes, the limit is {LIMIT} bytes",
    )


def _send_http(front: FrontProcess, headers: str, pieces: list[bytes]) -> tuple[int, str]:
    """The status and error of a request that is sent so far and no further."""
    with socket.create_connection(("127.0.0.1", front.http_port), timeout=60) as connection:
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        while not answer.endswith(b"}"):
            part = connection.recv(65536)
            assert part, answer
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def _send_grpc(front: FrontProcess, size: int) -> tuple[grpc.StatusCode, str]:
    """The status of a `ModelInfer` with a tensor of so many bytes."""
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, size // 4])
    message = service_pb2.ModelInferRequest(model_name="identity", inputs=[tensor], raw_input_contents=[bytes(size)])
    with grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}") as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            infer(message, timeout=60)
    return caught.value.code(), caught.value.details()
