"""System shared memory of clients through the front's own code, with fake servers that really map it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import orjson
import pytest
from starlette.types import ASGIApp
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.dataplane import DataPlane
from serve_app.endpoint import Endpoint
from serve_app.errors import InvalidRequest, NoEndpoint, RequestTooLarge
from serve_app.ingress.grpc_servicer import GrpcServicer
from serve_app.ingress.http_app import http_app
from serve_app.protocol.messages import InferRequest
from serve_app.protocol.server_answers import ServerAnswer
from serve_app.protocol.tensor import Region, Tensor
from serve_app.settings import BatchingSettings, LimitSettings, ModelSettings
from serve_app.triton.fake import FakeModel, FakeTriton
from tests.support.asgi import Answer, request
from tests.support.front import running_plane

LIMITS = LimitSettings()
SHM = "/v2/systemsharedmemory"


class Memory:
    """A piece of `/dev/shm`, removed at the end."""

    def __init__(self, size_bytes: int) -> None:
        self.key = f"/test_{secrets.token_hex(6)}"
        self.path = Path("/dev/shm") / self.key[1:]
        self.path.write_bytes(bytes(size_bytes))
        self.size_bytes = size_bytes

    def write(self, array: np.ndarray[Any, Any]) -> None:
        self.path.write_bytes(array.tobytes().ljust(self.size_bytes, b"\0"))

    def read(self, count: int, *, offset: int = 0) -> list[float]:
        return [float(value) for value in np.frombuffer(self.path.read_bytes(), np.float32, count, offset)]


@pytest.fixture
def memory() -> Iterator[Memory]:
    """256 bytes."""
    made = Memory(256)
    try:
        yield made
    finally:
        made.path.unlink()


class Log:
    """A region log that keeps what it was given."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, str]] = []
        self.is_full = False

    def check(self, model_name: str, size_bytes: int) -> None:
        raise AssertionError(model_name)

    async def record(self, rpc_name: str, message: Any, answers: Sequence[ServerAnswer]) -> None:
        raise AssertionError(rpc_name)

    def check_region(self, name: str) -> None:
        if self.is_full:
            raise RequestTooLarge("shared memory regions", 2, 1, "regions")

    async def record_region(self, rpc_name: str, message: Any, answers: Sequence[ServerAnswer], *, place: str) -> None:
        self.entries.append((rpc_name.removeprefix("SystemSharedMemory"), message.name, place))


class Service(GrpcServicer):
    """The RPCs over a plane."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane


class Front:
    """An application and what is behind it."""

    def __init__(self, plane: DataPlane, fakes: Sequence[FakeTriton], log: Log) -> None:
        self.plane, self.fakes, self.log = plane, fakes, log
        self.app: ASGIApp = http_app(plane, LIMITS)

    async def post(self, path: str, document: object = None) -> Answer:
        return await request(self.app, "POST", path, b"" if document is None else orjson.dumps(document), {})

    async def get(self, path: str) -> Answer:
        return await request(self.app, "GET", path)

    async def register(self, name: str, memory: Memory, **more: object) -> Answer:
        document = {"key": memory.key, "byte_size": memory.size_bytes, **more}
        return await self.post(f"{SHM}/region/{name}/register", document)

    async def infer(self, parameters: dict[str, object], output: dict[str, object] | None = None) -> Answer:
        tensor = {"name": "INPUT0", "shape": [2, 4], "datatype": "FP32", "parameters": parameters}
        outputs = {} if output is None else {"outputs": [{"name": "OUTPUT0", "parameters": output}]}
        return await self.post("/v2/models/identity/infer", {"inputs": [tensor], **outputs})


def region(name: str, size: int = 32, offset: int = 0) -> dict[str, object]:
    return {"shared_memory_region": name, "shared_memory_byte_size": size, "shared_memory_offset": offset}


@contextlib.asynccontextmanager
async def running(
    *nodes: str, is_allowed: bool = True, settings: ModelSettings | None = None, models: Sequence[FakeModel] = ()
) -> AsyncIterator[Front]:
    """A front over one fake server on each of these nodes."""
    async with contextlib.AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeTriton(*models)) for _ in nodes]
        endpoints = [Endpoint(f.address, f.address, node) for f, node in zip(fakes, nodes, strict=True)]
        log = Log()
        plane, _ = await stack.enter_async_context(
            running_plane(*endpoints, settings=settings, change_log=log, allow_client_shm=is_allowed)
        )
        yield Front(plane, fakes, log)


@contextlib.asynccontextmanager
async def stub_of(plane: DataPlane) -> AsyncIterator[Any]:
    """A gRPC stub of the plane's RPCs behind a real server."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(plane), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
    finally:
        await server.stop(None)


async def test_everything_is_refused_unless_it_is_allowed(memory: Memory) -> None:
    """Calls and requests alike, in a sentence; no server is asked, and metadata does not offer it."""
    async with running("a", is_allowed=False) as front, stub_of(front.plane) as stub:
        answers = [
            await front.get(f"{SHM}/status"),
            await front.register("r", memory),
            await front.post(f"{SHM}/unregister"),
            await front.infer(region("r")),
            await front.post(
                "/v2/models/identity/infer",
                {
                    "inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}],
                    "outputs": [{"name": "OUTPUT0", "parameters": region("r")}],
                },
            ),
        ]
        assert {(a.status, "send tensors in the request" in a.json["error"]) for a in answers} == {(501, True)}
        for rpc, message in (
            (stub.SystemSharedMemoryStatus, service_pb2.SystemSharedMemoryStatusRequest()),
            (stub.SystemSharedMemoryRegister, service_pb2.SystemSharedMemoryRegisterRequest(name="r")),
            (stub.SystemSharedMemoryUnregister, service_pb2.SystemSharedMemoryUnregisterRequest()),
            (stub.CudaSharedMemoryStatus, service_pb2.CudaSharedMemoryStatusRequest()),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await rpc(message)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert not [name for name in front.fakes[0].rpc_counts if "SharedMemory" in name]
        assert "system_shared_memory" not in (await front.get("/v2")).json["extensions"]


async def test_register_use_and_unregister_over_http(memory: Memory) -> None:
    """On every server of the machine; status in Triton's form; answers without data."""
    async with running("a", "a") as front:
        assert "system_shared_memory" in (await front.get("/v2")).json["extensions"]
        answer = await front.register("r", memory)
        assert (answer.status, answer.body) == (200, b"")
        assert [list(fake.regions.registered) for fake in front.fakes] == [["r"], ["r"]]
        entry = {"name": "r", "key": memory.key, "offset": 0, "byte_size": 256}
        assert (await front.get(f"{SHM}/status")).json == [entry]
        assert (await front.get(f"{SHM}/region/r/status")).json == [entry]
        assert (await front.get(f"{SHM}/region/x/status")).status == 404

        memory.write(np.arange(8, dtype=np.float32))
        answer = await front.infer(region("r"))
        assert answer.json["outputs"][0]["data"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        for _ in range(4):
            answer = await front.infer(region("r"), region("r", 64, 128))
            assert answer.json["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [2, 4]}]
            assert memory.read(8, offset=128) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert [call.rows for call in [*front.fakes[0].calls, *front.fakes[1].calls]] == [2] * 5

        assert (await front.post(f"{SHM}/region/r/unregister")).status == 200
        assert [list(fake.regions.registered) for fake in front.fakes] == [[], []]
        assert (await front.get(f"{SHM}/status")).json == []
        assert (await front.infer(region("r"))).status == 404
        assert front.log.entries == [("Register", "r", "a"), ("Unregister", "r", "a")]
        assert front.plane.shared_memory.statistics() == {"num_regions": 0}


async def test_register_use_and_unregister_over_grpc(memory: Memory) -> None:
    """The same by ModelInfer and by ModelStreamInfer."""
    async with running("a") as front, stub_of(front.plane) as stub:
        await stub.SystemSharedMemoryRegister(
            service_pb2.SystemSharedMemoryRegisterRequest(name="r", key=memory.key, offset=64, byte_size=192)
        )
        status = await stub.SystemSharedMemoryStatus(service_pb2.SystemSharedMemoryStatusRequest())
        assert {name: (r.key, r.offset, r.byte_size) for name, r in status.regions.items()} == {
            "r": (memory.key, 64, 192)
        }
        memory.write(np.arange(64, dtype=np.float32))
        message = service_pb2.ModelInferRequest(model_name="identity", id="7")
        message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
        message.outputs.add(name="OUTPUT0")
        for entry, offset in ((message.inputs[0], 0), (message.outputs[0], 64)):
            entry.parameters["shared_memory_region"].string_param = "r"
            entry.parameters["shared_memory_byte_size"].int64_param = 16
            entry.parameters["shared_memory_offset"].int64_param = offset
        answer = await stub.ModelInfer(message)
        assert (list(answer.outputs[0].shape), list(answer.raw_output_contents)) == ([1, 4], [b""])
        assert memory.read(4, offset=128) == [16.0, 17.0, 18.0, 19.0]
        memory.write(np.arange(64, dtype=np.float32))
        stream = stub.ModelStreamInfer(iter([message]))
        answers = [entry async for entry in stream]
        assert [(a.error_message, list(a.infer_response.raw_output_contents)) for a in answers] == [("", [b""])]
        assert memory.read(4, offset=128) == [16.0, 17.0, 18.0, 19.0]
        message.inputs[0].parameters["shared_memory_region"].string_param = "nobody"
        with pytest.raises(grpc.RpcError) as caught:
            await stub.ModelInfer(message)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await stub.SystemSharedMemoryUnregister(service_pb2.SystemSharedMemoryUnregisterRequest())
        assert not front.fakes[0].regions.registered


async def test_errors_are_of_tritons_classes(memory: Memory) -> None:
    """Its words where the fault is found there; a model that exists is not taken for unknown by any of it."""
    async with running("a") as front:
        await front.register("r", memory)
        cases = [
            ((region("x"), None), 404),
            ((region("r"), region("x")), 404),
            ((region("r", 16), None), 400),
            ((region("r", 64), None), 400),
            ((region("r", 32, 240), None), 400),
            ((region("r"), region("r", 32, 240)), 400),
            ((region("r"), region("r", 16)), 500),
            ((region("serve_app.x"), None), 400),
        ]
        assert [(await front.infer(*case)).status for case, _ in cases] == [status for _, status in cases]
        assert (await front.infer(region("r"))).status == 200
        assert (await front.register("r", memory)).status == 400
        answer = await front.register("again", memory)
        assert (answer.status, "registered under another name" in answer.json["error"]) == (400, True)
        refused = [{}, {"key": memory.key}, {"key": 5, "byte_size": 1}, {"key": memory.key, "byte_size": -1}]
        refused += [{"key": "/nobody", "byte_size": 1}, {"key": memory.key, "byte_size": 1000}]
        refused += [{"key": "/serve_app_1_2_3_4_x", "byte_size": 1}]
        refused += [{"key": "triton_python_backend_shm_region_1", "byte_size": 1}]
        answers = [await front.post(f"{SHM}/region/n/register", document) for document in refused]
        assert [answer.status for answer in answers] == [400] * len(refused)
        assert (
            await front.post(f"{SHM}/region/serve_app.x/register", {"key": memory.key, "byte_size": 1})
        ).status == 400
        assert (await front.post(f"{SHM}/register", {"key": memory.key, "byte_size": 1})).status == 400
        assert list(front.fakes[0].regions.registered) == ["r"]
        front.log.is_full = True
        assert (await front.register("s", memory)).status == 413


async def test_a_region_is_of_one_machine(memory: Memory) -> None:
    """Servers elsewhere cannot map it; requests that use it never go there, and others go anywhere."""
    async with running("a", "b", "a") as front:
        front.fakes[0].regions.is_elsewhere = front.fakes[2].regions.is_elsewhere = True
        assert (await front.register("r", memory)).status == 200
        assert [list(fake.regions.registered) for fake in front.fakes] == [[], ["r"], []]
        assert front.log.entries == [("Register", "r", "b")]
        for _ in range(12):
            assert (await front.infer(region("r"))).status == 200
        assert [len(fake.calls) for fake in front.fakes] == [0, 12, 0]
        front.plane.shared_memory.learn("elsewhere", "a")
        answer = await front.infer(region("r"), region("elsewhere"))
        assert (answer.status, "2 machines" in answer.json["error"]) == (400, True)
        front.plane.shared_memory.learn("elsewhere", None)
        await front.fakes[1].kill()
        assert (await front.infer(region("r"))).status == 503
        assert (await front.infer(region("r"))).status == 503
        assert [len(fake.calls) for fake in front.fakes] == [0, 12, 0]


async def test_memory_that_two_machines_have_is_refused(memory: Memory) -> None:
    """Nobody could say whose it is; nothing stays mapped."""
    async with running("a", "b") as front:
        answer = await front.register("r", memory)
        assert (answer.status, "memory that 2 machines have" in answer.json["error"]) == (400, True)
        assert [list(fake.regions.registered) for fake in front.fakes] == [[], []]
        assert not front.log.entries


async def test_what_one_server_of_the_machine_refuses_none_has(memory: Memory) -> None:
    """A request may go to any of them."""
    async with running("a", "a") as front:
        front.fakes[1].regions.is_elsewhere = True
        assert (await front.register("r", memory)).status == 400
        assert [list(fake.regions.registered) for fake in front.fakes] == [[], []]


async def test_unregistering_all_leaves_what_is_not_the_clients(memory: Memory) -> None:
    """Regions whose names are reserved stay, and are shown to nobody."""
    async with running("a") as front:
        own = service_pb2.SystemSharedMemoryRegisterRequest(name="serve_app.1", key=memory.key, byte_size=8)
        assert front.fakes[0].regions.register(own) is None
        others = [Memory(8), Memory(8)]
        for name, other in zip(("r", "s"), others, strict=True):
            assert (await front.register(name, other)).status == 200
            other.path.unlink()
        assert (await front.register("t", memory)).status == 400  # its key is taken
        assert [entry["name"] for entry in (await front.get(f"{SHM}/status")).json] == ["r", "s"]
        assert (await front.get(f"{SHM}/region/serve_app.1/status")).status == 400
        assert (await front.post(f"{SHM}/region/serve_app.1/unregister")).status == 400
        assert (await front.post(f"{SHM}/unregister")).status == 200
        assert list(front.fakes[0].regions.registered) == ["serve_app.1"]


async def test_a_region_that_is_still_in_use_is_let_go_a_moment_later(memory: Memory) -> None:
    """A request that was answered may hold it so long; the client does not have to ask again."""
    async with running("a") as front:
        await front.register("r", memory)
        front.fakes[0].regions.num_busy = 3
        assert (await front.post(f"{SHM}/region/r/unregister")).status == 200
        assert not front.fakes[0].regions.registered
        await front.register("r", memory)
        front.fakes[0].regions.num_busy = 1000
        answer = await front.post(f"{SHM}/region/r/unregister")
        assert (answer.status, "currently in use" in answer.json["error"]) == (500, True)
        assert front.plane.shared_memory.statistics() == {"num_regions": 1}


async def test_requests_with_regions_go_alone_and_whole(memory: Memory) -> None:
    """Whatever a batch may hold and whoever waits: others are merged, these are not."""
    settings = ModelSettings(batching=BatchingSettings(max_batch_rows=4, max_batches_in_flight=1))
    async with running("a", settings=settings, models=[FakeModel(max_batch_size=8, dims=(1,))]) as front:
        await front.register("r", memory)
        (fake,) = front.fakes
        fake.freeze()
        alone = [
            InferRequest("identity", [Tensor("INPUT0", "FP32", (6, 1), b"", Region("r", 24))], regions=("r",))
            for _ in range(3)
        ]
        others = [InferRequest("identity", [Tensor("INPUT0", "FP32", (2, 1), bytes(8))]) for _ in range(4)]
        tasks = [asyncio.ensure_future(front.plane.infer(each)) for each in [*alone, *others]]
        await fake.wait_for_calls(1)
        fake.thaw()
        answers = await asyncio.gather(*tasks)
        assert [answer.outputs[0].shape for answer in answers] == [(6, 1)] * 3 + [(2, 1)] * 4
        assert sorted(fake.rows) == [4, 4, 6, 6, 6]


async def test_no_server_on_the_machine() -> None:
    """The text says that it is about the machine, where there are other servers."""
    async with running("a") as front:
        front.plane.shared_memory.learn("r", "b")
        message = InferRequest("identity", [Tensor("INPUT0", "FP32", (1, 1), b"", Region("r", 4))], regions=("r",))
        with pytest.raises(NoEndpoint, match="on the machine where the shared memory is"):
            await front.plane.infer(message)
        with pytest.raises(InvalidRequest, match="the name of the region"):
            await front.plane.shared_memory.register(service_pb2.SystemSharedMemoryRegisterRequest(key="/x"))
    assert "regions" in repr(front.plane.shared_memory)
