"""System shared memory by unchanged tritonclient calls, over a front without Ray and a real tritonserver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
import tritonclient.utils.shared_memory as shm
import uvicorn
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from serve_app.clock import MonotonicClock
from serve_app.dataplane import DataPlane
from serve_app.deployments.change_log import FleetChanges
from serve_app.deployments.registry import EndpointRegistry
from serve_app.endpoint import Endpoint
from serve_app.ingress.grpc_servicer import GrpcServicer
from serve_app.ingress.http_app import http_app
from serve_app.runner import ModelRunner
from serve_app.settings import ChannelSettings, LimitSettings, ModelServerConfig
from serve_app.triton.router import Router
from tests.support.other_clients import perf_analyzer
from tests.support.triton_server import python_config, running_triton, write_model
from tests.support.waiting import wait_until, wait_until_sync

pytestmark = pytest.mark.integration

SHM = Path("/dev/shm")
VALUES = np.arange(16, dtype=np.float32).reshape(2, 8)


class Service(GrpcServicer):
    """The RPCs over a plane."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane


@dataclass
class Wired:
    """Where a front listens, and the server behind it."""

    http: str
    grpc: str
    triton: Callable[[], Endpoint | None]


@contextlib.asynccontextmanager
async def open_front(repository: Path) -> AsyncIterator[tuple[DataPlane, Callable[[], Endpoint | None]]]:
    """A data plane over one supervised tritonserver, whose later lives are told what the earlier ones were."""
    clock, limits, registry = MonotonicClock(), LimitSettings(), EndpointRegistry()
    routers: list[Router] = []
    changes = FleetChanges(registry.record, lambda: routers[0], is_static=True, on_change=lambda name: None)

    def on_endpoint(endpoint: Endpoint | None) -> None:
        routers[0].update([] if endpoint is None else [endpoint])

    async with contextlib.AsyncExitStack() as stack:
        router = Router(ChannelSettings(), clock=clock, prepare=changes.prepare)
        routers.append(await stack.enter_async_context(router))
        plane = await stack.enter_async_context(
            DataPlane(
                router,
                lambda spec, settings: ModelRunner(
                    spec,
                    settings,
                    send=lambda request, timeout_s: router.infer(request, timeout_s=timeout_s),
                    num_endpoints=lambda: router.num_endpoints,
                    limits=limits,
                    clock=clock,
                    open_stream=lambda request, response_timeout_s, timeout_s: router.stream(
                        request, response_timeout_s=response_timeout_s, timeout_s=timeout_s
                    ),
                ),
                config=ModelServerConfig(),
                clock=clock,
                change_log=changes,
                allow_client_shm=True,
            )
        )
        supervisor = await stack.enter_async_context(running_triton(repository, on_endpoint=on_endpoint))
        yield plane, lambda: supervisor.endpoint


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wired]:
    """HTTP and gRPC in front of a real server, in a loop of their own."""
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "identity")
    write_model(repository, "texts", config=python_config(datatype="TYPE_STRING"))
    found: queue.Queue[Wired] = queue.Queue()
    ends: list[Callable[[], object]] = []

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))
        async with open_front(repository) as (plane, triton):
            server = grpc.aio.server()
            service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(plane), server)
            grpc_port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            config = uvicorn.Config(http_app(plane, LimitSettings()), port=0, log_level="error", lifespan="off")
            http = uvicorn.Server(config)
            serving = asyncio.ensure_future(http.serve())
            await wait_until(lambda: http.started, timeout_s=30)
            http_port = http.servers[0].sockets[0].getsockname()[1]
            found.put(Wired(f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", triton))
            await stop.wait()
            http.should_exit = True
            await serving
            await server.stop(None)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="front")
    thread.start()
    try:
        yield found.get(timeout=90)
    finally:
        for end in ends:
            end()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, front: Wired) -> Iterator[Any]:
    """The two synchronous clients; both have the same methods."""
    with client_of(front, request.param) as chosen:
        yield chosen
        chosen.unregister_system_shared_memory()


def client_of(front: Wired, way: str) -> Any:
    library = triton_http if way == "http" else triton_grpc
    return library.InferenceServerClient(front.http if way == "http" else front.grpc)


def library_of(client: Any) -> Any:
    return triton_http if isinstance(client, triton_http.InferenceServerClient) else triton_grpc


class Memory:
    """A region of a client: the first half for inputs, the second for outputs."""

    def __init__(self, size_bytes: int = 512) -> None:
        self.name = f"r{secrets.token_hex(6)}"
        self.key = f"/test_{self.name}"
        self.size_bytes = size_bytes
        self.handle = shm.create_shared_memory_region(self.name, self.key, size_bytes)

    def register(self, client: Any) -> None:
        client.register_system_shared_memory(self.name, self.key, self.size_bytes)

    def output(self, shape: list[int], dtype: Any = np.float32) -> Any:
        return shm.get_contents_as_numpy(self.handle, dtype, shape, offset=self.size_bytes // 2)


@pytest.fixture
def memory() -> Iterator[Memory]:
    """512 bytes, with `VALUES` at the start."""
    made = Memory()
    shm.set_shared_memory_region(made.handle, [VALUES])
    try:
        yield made
    finally:
        shm.destroy_shared_memory_region(made.handle)


def tensors(
    library: Any, memory: Memory, *, size: int = 64, offset: int = 0, out: tuple[str, int, int] | None = None
) -> tuple[list[Any], list[Any]]:
    tensor = library.InferInput("INPUT0", [2, 8], "FP32")
    tensor.set_shared_memory(memory.name, size, offset)
    output = library.InferRequestedOutput("OUTPUT0")
    output.set_shared_memory(*(out or (memory.name, memory.size_bytes // 2, memory.size_bytes // 2)))
    return [tensor], [output]


def test_inputs_and_outputs_in_regions(client: Any, memory: Memory) -> None:
    """Triton reads and writes the client's memory; no data is in the answer, name and shape are."""
    memory.register(client)
    inputs, outputs = tensors(library_of(client), memory)
    for step in (1.0, 2.0):
        shm.set_shared_memory_region(memory.handle, [VALUES * np.float32(step)])
        answer = client.infer("identity", inputs, outputs=outputs)
        found = answer.get_output("OUTPUT0")
        assert list(found["shape"] if isinstance(found, dict) else found.shape) == [2, 8]
        assert np.array_equal(memory.output([2, 8]), VALUES * np.float32(step))
    assert np.array_equal(client.infer("identity", inputs).as_numpy("OUTPUT0"), VALUES * np.float32(2.0))


def test_texts_in_regions(client: Any) -> None:
    """BYTES, whose size is not known from its shape."""
    memory, texts = Memory(), np.array([[b"a", b"", "\u00e9".encode()]], dtype=np.object_)
    try:
        shm.set_shared_memory_region(memory.handle, [serialize_byte_tensor(texts)])
        memory.register(client)
        library = library_of(client)
        tensor = library.InferInput("INPUT0", [1, 3], "BYTES")
        tensor.set_shared_memory(memory.name, 15)
        output = library.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory(memory.name, 100, 256)
        client.infer("texts", [tensor], outputs=[output])
        assert memory.output([1, 3], np.object_).tolist() == texts.tolist()
    finally:
        client.unregister_system_shared_memory(memory.name)
        shm.destroy_shared_memory_region(memory.handle)


def test_status_is_tritons(front: Wired, client: Any, memory: Memory) -> None:
    """What the server itself says, in the form of each protocol; unregistered regions are gone from it."""
    memory.register(client)
    with triton_grpc.InferenceServerClient(address(front)) as direct:
        for name in ("", memory.name):
            theirs = direct.get_system_shared_memory_status(name)
            ours = client.get_system_shared_memory_status(name)
            region = theirs.regions[memory.name]
            assert (region.key, region.offset, region.byte_size) == (memory.key, 0, 512)
            if library_of(client) is triton_grpc:
                assert ours == theirs
            else:
                assert ours == [{"name": memory.name, "key": memory.key, "offset": 0, "byte_size": 512}]
        client.unregister_system_shared_memory(memory.name)
        client.unregister_system_shared_memory("nobody")
        assert not direct.get_system_shared_memory_status().regions
    assert "system_shared_memory" in str(client.get_server_metadata())


def address(front: Wired) -> str:
    endpoint = front.triton()
    assert endpoint is not None
    return endpoint.address


@pytest.mark.parametrize("library", [triton_http_aio, triton_grpc_aio], ids=["http", "grpc"])
async def test_the_asynchronous_clients(front: Wired, memory: Memory, library: Any) -> None:
    """Several at once, each with its own memory."""
    others = [Memory() for _ in range(4)]
    plain = triton_http if library is triton_http_aio else triton_grpc
    try:
        async with library.InferenceServerClient(front.http if plain is triton_http else front.grpc) as client:

            async def ask(number: int, each: Memory) -> None:
                shm.set_shared_memory_region(each.handle, [VALUES + np.float32(number)])
                await client.register_system_shared_memory(each.name, each.key, each.size_bytes)
                inputs, outputs = tensors(plain, each)
                await client.infer("identity", inputs, outputs=outputs)
                assert np.array_equal(each.output([2, 8]), VALUES + np.float32(number))
                await client.unregister_system_shared_memory(each.name)

            await asyncio.gather(*(ask(number, each) for number, each in enumerate([memory, *others])))
    finally:
        for each in others:
            shm.destroy_shared_memory_region(each.handle)


def test_a_stream(front: Wired, memory: Memory) -> None:
    """Inputs and outputs in regions by `ModelStreamInfer`, and an error that leaves the stream as it is."""
    answers: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
    with triton_grpc.InferenceServerClient(front.grpc) as client:
        memory.register(client)
        client.start_stream(lambda result, error: answers.put((result, error)))
        inputs, outputs = tensors(triton_grpc, memory)
        client.async_stream_infer("identity", inputs, outputs=outputs, request_id="1")
        result, error = answers.get(timeout=30)
        assert error is None
        assert result.get_response().id == "1"
        assert np.array_equal(memory.output([2, 8]), VALUES)
        inputs[0].set_shared_memory("nobody", 64)
        client.async_stream_infer("identity", inputs, outputs=outputs)
        _, error = answers.get(timeout=30)
        assert "Unable to find shared memory region" in str(error)
        client.stop_stream()
        client.unregister_system_shared_memory(memory.name)


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call()
    return str(caught.value.status()).removeprefix("StatusCode.")


def wrong_calls(client: Any, memory: Memory, other: Memory) -> list[Callable[[], object]]:
    """What a client can do wrong with a registered region, and with memory that is not registered."""
    library = library_of(client)

    def infer(**options: Any) -> Callable[[], object]:
        def call() -> object:
            inputs, outputs = tensors(library, memory, **options)
            return client.infer("identity", inputs, outputs=outputs)

        return call

    nobody = Memory.__new__(Memory)
    nobody.name, nobody.size_bytes = "nobody", 512
    unknown_in, unknown_out = tensors(library, nobody)
    known_in, _ = tensors(library, memory)
    return [
        lambda: client.infer("identity", unknown_in),
        lambda: client.infer("identity", known_in, outputs=unknown_out),
        infer(size=32),
        infer(size=128),
        infer(offset=500),
        infer(out=(memory.name, 64, 500)),
        infer(out=(memory.name, 32, 256)),
        lambda: client.get_system_shared_memory_status("nobody"),
        lambda: client.register_system_shared_memory("n", other.key, 5000),
        lambda: client.register_system_shared_memory("n", other.key, 64, offset=5000),
    ]


def test_errors_are_of_the_same_class_as_tritons(front: Wired, client: Any, memory: Memory) -> None:
    """The same mistakes, made here and at the server itself; and the model goes on being served."""
    memory.register(client)
    other = Memory()
    try:
        with triton_grpc.InferenceServerClient(address(front)) as direct:
            theirs = [code_of(call) for call in wrong_calls(direct, memory, other)]
        ours = [code_of(call) for call in wrong_calls(client, memory, other)]
    finally:
        shm.destroy_shared_memory_region(other.handle)
    status = {"NOT_FOUND": "404", "INVALID_ARGUMENT": "400", "INTERNAL": "500"}
    is_grpc = library_of(client) is triton_grpc
    assert ours == (theirs if is_grpc else [status[code] for code in theirs])
    assert code_of(lambda: memory.register(client)) == ("INVALID_ARGUMENT" if is_grpc else "400")
    assert code_of(lambda: client.register_system_shared_memory("n", "/nobody", 8)) == (
        "INVALID_ARGUMENT" if is_grpc else "400"
    )
    # Triton 2.51 would take this for a file of another number by now, and close that.
    again = code_of(lambda: client.register_system_shared_memory("n", memory.key, 64))
    assert again == ("INVALID_ARGUMENT" if is_grpc else "400")
    inputs, outputs = tensors(library_of(client), memory)
    client.infer("identity", inputs, outputs=outputs)


def test_the_memory_of_python_models_is_not_for_clients(client: Any) -> None:
    """Triton 2.51 would let a client map it; its names begin as we have them begin."""
    own = [path.name for path in SHM.iterdir() if path.name.startswith("serve_app_")]
    assert own
    for key in own:
        with pytest.raises(InferenceServerException, match="memory that Triton uses itself"):
            client.register_system_shared_memory("own", f"/{key}", 64)


def test_nothing_is_left_in_shared_memory_after_many_calls(front: Wired) -> None:
    """300 calls with regions made, registered, used and removed: as many entries as before, and none is known."""
    with client_of(front, "grpc") as grpc_client, client_of(front, "http") as http_client:
        before = set(SHM.iterdir())
        for number in range(300):
            client = grpc_client if number % 2 else http_client
            memory = Memory()
            try:
                shm.set_shared_memory_region(memory.handle, [VALUES + np.float32(number)])
                memory.register(client)
                inputs, outputs = tensors(library_of(client), memory)
                client.infer("identity", inputs, outputs=outputs)
                assert np.array_equal(memory.output([2, 8]), VALUES + np.float32(number))
                client.unregister_system_shared_memory(memory.name)
            finally:
                shm.destroy_shared_memory_region(memory.handle)
        assert not [path.name for path in set(SHM.iterdir()) - before if path.name.startswith("test_r")]
        assert not http_client.get_system_shared_memory_status()
    (server,) = [p for p in psutil.process_iter() if is_server(p, front)]
    assert not [m.path for m in server.memory_maps() if "/dev/shm/test_r" in m.path]


def is_server(process: psutil.Process, front: Wired) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("tritonserver") and any(
            f"--grpc-port={address(front).rpartition(':')[2]}" == argument for argument in process.cmdline()
        )
    return False


def test_curl_lines(front: Wired, memory: Memory) -> None:
    """Empty answers to changes, and a list, as in Triton's documentation of the extension."""
    root = f"http://{front.http}/v2/systemsharedmemory"
    body = {"key": memory.key, "offset": 0, "byte_size": 512}
    answer = requests.post(f"{root}/region/{memory.name}/register", json=body, timeout=30)
    assert (answer.status_code, answer.content) == (200, b"")
    assert requests.get(f"{root}/status", timeout=30).json() == [{"name": memory.name, **body}]
    answer = requests.post(f"{root}/unregister", timeout=30)
    assert (answer.status_code, answer.content) == (200, b"")
    assert requests.get(f"{root}/status", timeout=30).content == b"[]"


@pytest.mark.parametrize("interface", ["http", "grpc"])
def test_perf_analyzer(front: Wired, tmp_path: Path, interface: str) -> None:
    """perf_analyzer, unchanged, with its tensors in shared memory; it lets go of them at its end."""
    options = ("--shared-memory", "system", "--output-shared-memory-size", "64", "--shape", "INPUT0:8")
    address_of = front.http if interface == "http" else front.grpc
    assert perf_analyzer(tmp_path, "identity", address_of, "-i", interface, *options, num_requests=50)
    with client_of(front, interface) as client:
        status = client.get_system_shared_memory_status()
        assert not (status if interface == "http" else status.regions)


def test_a_server_that_restarts_has_the_regions(front: Wired, client: Any, memory: Memory) -> None:
    """Those that were registered, and not those that were unregistered, before it gets a request."""
    gone = Memory()
    try:
        gone.register(client)
        client.unregister_system_shared_memory(gone.name)
        memory.register(client)
        before = front.triton()
        (server,) = [p for p in psutil.process_iter() if is_server(p, front)]
        os.kill(server.pid, signal.SIGKILL)
        wait_until_sync(lambda: front.triton() not in (None, before), timeout_s=60)
        wait_until_sync(client.is_server_ready, timeout_s=60)
        inputs, outputs = tensors(library_of(client), memory)
        client.infer("identity", inputs, outputs=outputs)
        assert np.array_equal(memory.output([2, 8]), VALUES)
        with triton_grpc.InferenceServerClient(address(front)) as direct:
            assert list(direct.get_system_shared_memory_status().regions) == [memory.name]
    finally:
        shm.destroy_shared_memory_region(gone.handle)
