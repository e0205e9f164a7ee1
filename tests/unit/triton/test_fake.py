"""The fake Triton does what its tests' authors rely on."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.triton.fake import Failure, FakeModel, FakeTriton, Lie


def make_request(rows: int = 1, model_name: str = "identity") -> Any:
    array = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    request = service_pb2.ModelInferRequest(model_name=model_name, id="r")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=array.shape)
    request.raw_input_contents.append(array.tobytes())
    return request


def connect(fake: FakeTriton) -> Any:
    return grpc.aio.insecure_channel(fake.address, options=[("grpc.use_local_subchannel_pool", 1)])


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def test_identity_answers_its_input() -> None:
    """A request's tensor comes back unchanged, and the call is on record."""
    async with FakeTriton() as fake, connect(fake) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        response = await stub.ModelInfer(make_request(3), timeout=5)
        assert response.raw_output_contents[0] == make_request(3).raw_input_contents[0]
        assert list(response.outputs[0].shape) == [3, 2]
        call = fake.calls[0]
        assert (call.rows, call.id, call.size_bytes) == (3, "r", 24)
        assert call.timeout_s is not None
        assert 4.5 < call.timeout_s < 5.1  # grpc rounds it up on the wire
        assert repr(fake).endswith("[running] Models: identity | Calls: 0 active, 1 seen, 0 cancelled>")
        metadata = await stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="identity"))
        assert list(metadata.inputs[0].shape) == [-1, -1]
        config = await stub.ModelConfig(service_pb2.ModelConfigRequest(name="identity"))
        assert config.config.max_batch_size == 8


async def test_refuses_what_triton_refuses() -> None:
    """Too many rows and unknown models end with Triton's own status and text."""
    async with FakeTriton() as fake, connect(fake) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        code, text = await status_of(stub.ModelInfer(make_request(9)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text == "[request id: r] inference request batch-size must be <= 8 for 'identity'"
        assert (await status_of(stub.ModelInfer(make_request(1, "nope"))))[0] is grpc.StatusCode.NOT_FOUND


async def test_faults_on_demand() -> None:
    """Ordered failures, poisoned requests and lies each change the answer as told."""
    async with FakeTriton() as fake, connect(fake) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        fake.fail_next(grpc.StatusCode.INTERNAL, "boom")
        assert await status_of(stub.ModelInfer(make_request())) == (grpc.StatusCode.INTERNAL, "boom")
        fake.fail_when = lambda request: Failure(grpc.StatusCode.INTERNAL, "odd") if request.id == "r" else None
        assert await status_of(stub.ModelInfer(make_request())) == (grpc.StatusCode.INTERNAL, "odd")
        fake.fail_when = None
        fake.models["identity"].lie = Lie.ROW_COUNT
        assert list((await stub.ModelInfer(make_request(3))).outputs[0].shape) == [2, 2]


async def test_cancelled_calls_are_counted() -> None:
    """A call that its client gives up while the server is frozen counts as cancelled."""
    async with FakeTriton() as fake, connect(fake) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        fake.freeze()
        call = stub.ModelInfer(make_request())
        await fake.wait_for_calls(1)
        call.cancel()
        await fake.wait_until(lambda: fake.num_cancelled == 1)
        assert fake.num_active == 0


async def test_kill_breaks_calls_and_restart_keeps_the_port() -> None:
    """`kill` looks like a killed process to clients, and `restart` like its successor on the same port."""
    async with FakeTriton(FakeModel()) as fake, connect(fake) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        fake.freeze()
        call = asyncio.ensure_future(status_of(stub.ModelInfer(make_request())))
        await fake.wait_for_active(1)
        address = fake.address
        await fake.kill()
        code, text = await call
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "Socket closed" in text or "reset" in text
        assert (await status_of(stub.ModelInfer(make_request())))[0] is grpc.StatusCode.UNAVAILABLE
        fake.thaw()
        await fake.restart()
        assert fake.address == address
        await stub.ModelInfer(make_request(), wait_for_ready=True, timeout=5)
        assert fake.num_cancelled == 0


async def test_stream_limit_is_per_connection() -> None:
    """With one stream per connection, one channel never has two calls running."""
    async with FakeTriton(FakeModel(latency_s=0.01), max_concurrent_streams=1) as fake, connect(fake) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await asyncio.gather(*(stub.ModelInfer(make_request()) for _ in range(3)))
        assert fake.max_active == 1
        assert len(fake.peers) == 1
