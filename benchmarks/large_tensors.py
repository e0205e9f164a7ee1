"""What one large tensor costs a replica: `python -m benchmarks.large_tensors --megabytes 64 512`.

Starts a real tritonserver with model `identity` and a replica's insides as a process of their own, sends tensors there
and back over HTTP (binary data) and gRPC, and prints the replica's peak of resident memory above what it held before,
as a multiple of the tensor, and what it still holds afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
from tritonclient.grpc import service_pb2

from tests.support.front_process import ROOT, FrontProcess, running_front_process
from tests.support.triton_server import running_triton

MIB = 1024 * 1024
TIMEOUT_S = 300.0
SETTLE_S = 1.0
"""How long after an answer memory is looked at that is kept."""
_BLOCK = bytes(range(256)) * (MIB // 1024) + bytes(reversed(range(256))) * (MIB // 256 - MIB // 1024)


@dataclass(frozen=True)
class Cost:
    """What a request did to the replica's memory, all in bytes.

    Attributes:
        size_bytes: Of the tensor, which went there and came back.
        peak_bytes: Most of memory held at once, above what was held before.
        kept_bytes: Held once it was answered, above what was held before.
        seconds: From the first byte sent to the last one received.
    """

    size_bytes: int
    peak_bytes: int
    kept_bytes: int
    seconds: float

    @property
    def factor(self) -> float:
        """The peak as a multiple of the tensor."""
        return self.peak_bytes / self.size_bytes


def over_http(front: FrontProcess, megabytes: int) -> None:
    """A tensor there and back as binary data; neither side of it is ever whole in this process.

    Raises:
        AssertionError: What came back is not what was sent.
    """
    shape = [1, megabytes * MIB // 4]
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "INPUT0",
                    "datatype": "FP32",
                    "shape": shape,
                    "parameters": {"binary_data_size": megabytes * MIB},
                }
            ],
            "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
        }
    ).encode()

    def body() -> Iterator[bytes]:
        yield head
        for _ in range(megabytes):
            yield _BLOCK

    connection = http.client.HTTPConnection("127.0.0.1", front.http_port, timeout=TIMEOUT_S)
    try:
        connection.request(
            "POST",
            "/v2/models/identity/infer",
            body(),
            {
                "Inference-Header-Content-Length": str(len(head)),
                "Content-Length": str(len(head) + megabytes * MIB),
                "x-request-timeout-seconds": f"{TIMEOUT_S:g}",
            },
        )
        answer = connection.getresponse()
        text = answer.read(int(answer.getheader("Inference-Header-Content-Length") or answer.length or 0))
        assert answer.status == 200, text
        assert json.loads(text)["outputs"][0]["shape"] == shape
        for _ in range(megabytes):
            assert answer.read(MIB) == _BLOCK
        assert answer.read() == b""
    finally:
        connection.close()


def over_grpc(front: FrontProcess, megabytes: int) -> None:
    """The same by `ModelInfer`; this process holds the tensor several times.

    Raises:
        AssertionError: What came back is not what was sent.
    """
    shape = [1, megabytes * MIB // 4]
    head = service_pb2.ModelInferRequest(
        model_name="identity",
        inputs=[service_pb2.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=shape)],
        raw_input_contents=[_BLOCK * megabytes],
    )
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}", options=options) as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        )
        answer = infer(head, timeout=TIMEOUT_S)
        del head
    left = service_pb2.ModelInferResponse.FromString(answer)
    del answer
    assert list(left.outputs[0].shape) == shape
    view = memoryview(left.raw_output_contents[0])
    assert len(view) == megabytes * MIB
    assert all(view[start : start + MIB] == _BLOCK for start in range(0, len(view), MIB))


WAYS: dict[str, Callable[[FrontProcess, int], None]] = {"HTTP": over_http, "gRPC": over_grpc}


def measure(front: FrontProcess, way: str, megabytes: int) -> Cost:
    """Send one tensor of so many megabytes and look at the front's memory."""
    before = front.resident_bytes()
    front.forget_peak()
    started = time.perf_counter()
    WAYS[way](front, megabytes)
    seconds = time.perf_counter() - started
    peak = front.peak_bytes()
    time.sleep(SETTLE_S)
    return Cost(megabytes * MIB, peak - before, front.resident_bytes() - before, seconds)


def most_bytes(input_bytes: int, output_bytes: int) -> int:
    """The bound of `docs/protocol.md`: what one large request adds to its replica's memory at most, in bytes."""
    return int(1.15 * max(3 * input_bytes, input_bytes + 3 * output_bytes)) + 64 * MIB


def warm_up(front: FrontProcess) -> None:
    """Let the front open what it opens once: the model, its connections, and what its allocator keeps."""
    for way in WAYS.values():
        way(front, 1)


async def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 4, 64, 512])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    arguments = parser.parse_args()
    async with running_triton(ROOT / "model_repository", args={"models": ["identity"]}) as server:
        assert server.endpoint is not None
        await asyncio.to_thread(_measure_all, server.endpoint.address, arguments.megabytes, arguments.ways)


def _measure_all(triton: str, sizes: list[int], ways: list[str]) -> None:
    with running_front_process(triton) as front:
        warm_up(front)
        print(f"{'way':5} {'tensor':>9} {'peak':>10} {'x tensor':>9} {'kept':>10} {'time':>8}")
        for megabytes in sizes:
            for way in ways:
                cost = measure(front, way, megabytes)
                print(
                    f"{way:5} {megabytes:6} MB {cost.peak_bytes / MIB:7.0f} MB {cost.factor:8.1f}x "
                    f"{cost.kept_bytes / MIB:7.0f} MB {cost.seconds:6.1f} s"
                )


if __name__ == "__main__":
    asyncio.run(main())
