"""Who is let in and who is refused unread, by every way in; and that every share comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import orjson
import pytest
import tritonclient.grpc.aio as triton_grpc
from google.rpc import error_details_pb2, status_pb2
from tritonclient.grpc import InferInput, service_pb2

from serve_app.auth.gate import Gate
from serve_app.auth.principal import CALLER, Principal
from serve_app.auth.scopes import Scope
from serve_app.batching.replica_load import ReplicaLoadStatistics
from serve_app.dataplane import DataPlane
from serve_app.errors import Overloaded
from serve_app.ingress.grpc_errors import retry_metadata
from serve_app.ingress.http_app import http_app
from serve_app.settings import (
    BatchingMode,
    BatchingSettings,
    ModelServerConfig,
    ModelSettings,
    QueueSettings,
    ReplicaSettings,
)
from serve_app.triton.fake import FakeModel, FakeTriton
from tests.support.asgi import Answer, request
from tests.support.front import LIMITS, running_plane
from tests.support.guarded_front import grpc_server
from tests.support.keys import key_of, key_store
from tests.support.waiting import wait_until

INFER, GENERATE = "/v2/models/identity/infer", "/v2/models/identity/generate"
ONE_AT_A_TIME = BatchingSettings(mode=BatchingMode.CONTINUOUS, max_batches_in_flight=1, max_batch_rows=1)


def body(*, priority: int | None = None, num_values: int = 1) -> bytes:
    """A JSON request."""
    tensor = {"name": "INPUT0", "shape": [1, num_values], "datatype": "FP32", "data": [0.5] * num_values}
    return orjson.dumps({"inputs": [tensor]} | ({"parameters": {"priority": priority}} if priority else {}))


class Front:
    """A plane whose model holds what it is sent until it is let go, and the HTTP application over it."""

    def __init__(self, plane: DataPlane, fake: FakeTriton) -> None:
        self.plane, self.fake = plane, fake
        self.app = http_app(plane, LIMITS)
        self.model = fake.models["identity"]

    @property
    def load(self) -> ReplicaLoadStatistics:
        return self.plane.admission.load.statistics()

    @property
    def counters(self) -> Any:
        return self.plane.statistics().models["identity"].dispatcher

    def post(self, content: Any = b"", path: str = INFER, **options: Any) -> asyncio.Future[Answer]:
        return asyncio.ensure_future(request(self.app, "POST", path, content or body(), **options))

    async def warm_up(self) -> None:
        assert (await self.post()).status == 200

    async def fill(self, num_waiting: int) -> list[asyncio.Future[Answer]]:
        """One request with the model, and so many behind it."""
        await self.warm_up()
        self.model.latency_s = 60.0
        held = [self.post(leave=asyncio.Event()) for _ in range(1 + num_waiting)]
        await wait_until(
            lambda: self.counters.num_waiting_requests == num_waiting and self.counters.num_batches_in_flight == 1,
            timeout_s=30,
        )
        return held

    def configure(self, *, queue: QueueSettings | None = None, **config: Any) -> None:
        settings = ModelSettings(batching=ONE_AT_A_TIME, queue=queue or QueueSettings())
        self.plane.reconfigure(ModelServerConfig(default=settings, **config))


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    settings = ModelSettings(batching=ONE_AT_A_TIME)
    async with FakeTriton(FakeModel()) as fake, running_plane(fake.endpoint, settings=settings) as (plane, _):
        front = Front(plane, fake)
        front.configure()
        yield front


async def give_up(held: list[asyncio.Future[Answer]]) -> None:
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)


@contextlib.contextmanager
def caller(lane: str | None) -> Iterator[None]:
    token = CALLER.set(Principal("k", frozenset(Scope), lane=lane))
    try:
        yield
    finally:
        CALLER.reset(token)


async def test_requests_of_a_replica_are_bounded(front: Front) -> None:
    """Over all models and ways in: the one too many gets 429, the bound's name and when to come back."""
    held = await front.fill(2)
    front.configure(replica=ReplicaSettings(max_requests=3))
    for path in (INFER, GENERATE):
        answer = await front.post(path=path)
        assert answer.status == 429
        assert answer.json == {"error": "this replica: 3 requests are under way, the limit is 3"}
        assert answer.headers["retry-after"] == "1"
    assert front.load.num_refused == 2
    await give_up(held)
    assert (front.load.num_requests, front.load.num_bytes) == (0, 0)


@pytest.mark.parametrize("path", [INFER, GENERATE])
async def test_a_body_without_room_is_not_read(front: Front, path: str) -> None:
    """By what it declares before its first byte, and by what has come of one that declares nothing."""
    await front.warm_up()
    front.configure(replica=ReplicaSettings(max_bytes=100))
    with front.plane.admission.load.enter(60):
        num_asked = 0

        async def receive() -> Any:
            nonlocal num_asked
            num_asked += 1
            return {"type": "http.request", "body": b"x" * 16, "more_body": True}

        async def answer_of(headers: dict[str, str]) -> int:
            sent: list[Any] = []

            async def send(message: Any) -> None:
                sent.append(message)

            fields = [(name.encode(), value.encode()) for name, value in headers.items()]
            scope = {"type": "http", "method": "POST", "path": path, "headers": fields, "query_string": b""}
            await front.app(scope, receive, send)
            return int(sent[0]["status"])

        assert await answer_of({"content-length": "50"}) == 429
        assert num_asked == 0
        assert await answer_of({}) == 429
        assert num_asked == 3
        assert await answer_of({"content-length": "101"}) == 413
        assert front.load.num_bytes == 60
    assert front.load.num_bytes == 0


@pytest.mark.parametrize("num_values", [50_000, 1_000_000])  # unpacked on the loop, and in a thread
async def test_what_unpacks_to_more_than_there_is_room_for(front: Front, num_values: int) -> None:
    """A packed body counts as it grows, so that many small ones cannot fill the memory."""
    await front.warm_up()
    plain = body(num_values=num_values)
    packed = gzip.compress(plain, 0 if num_values > 50_000 else 9)
    front.configure(replica=ReplicaSettings(max_bytes=len(plain) + len(packed) + 10))
    with front.plane.admission.load.enter(len(plain) // 2):
        answer = await front.post(packed, headers={"content-encoding": "gzip"})
        assert answer.status == 429
        assert "bytes of requests are held" in answer.json["error"]
    assert (await front.post(packed, headers={"content-encoding": "gzip"})).status == 200
    assert (front.load.num_requests, front.load.num_bytes) == (0, 0)


async def test_a_full_queue_refuses_unread(front: Front) -> None:
    """What asks for no priority is not parsed; what does is, for others may have to leave for it."""
    front.configure(queue=QueueSettings(max_requests=2))
    held = await front.fill(2)
    answer = await front.post(b"not even JSON")
    assert answer.status == 429
    assert "2 requests are waiting, 1 more are above the limit of 2" in answer.json["error"]
    assert (await front.post(b'"priority" without sense')).status == 400
    urgent = front.post(body(priority=1), leave=asyncio.Event())
    await wait_until(lambda: any(task.done() for task in held), timeout_s=30)  # the newest has made room
    assert [task.result().status for task in held if task.done()] == [429]
    assert (await front.post(body(priority=20))).status == 429
    await give_up([*held, urgent])
    assert (front.load.num_requests, front.load.num_bytes) == (0, 0)


async def test_a_lane_is_refused_before_its_body_comes(front: Front) -> None:
    """Whose key cannot make others leave is answered without a look at the body."""
    front.configure(queue=QueueSettings(max_requests=2), lanes={"batch": 20, "interactive": 5})
    held = await front.fill(2)
    with caller("batch"):
        answer = await front.post([b"never", b"read"], headers={"content-length": "9"}, disconnect_after=0)
        assert answer.status == 429  # and not 499, which reading would have found
    with caller("interactive"):
        urgent = [front.post(leave=asyncio.Event()) for _ in range(2)]
        await wait_until(lambda: sum(task.done() for task in held) == 2, timeout_s=30)
        assert (await front.post(body(priority=1))).status == 429  # in its lane, it is no more urgent than those
    await give_up([*held, *urgent])


async def test_a_lane_that_nobody_set_is_told_of(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    """Once, by the key's name; its requests are served as plain ones."""
    with caller("nowhere"):
        for _ in range(2):
            assert (await front.post(body(priority=1))).status == 200
    assert [record.message for record in caplog.records if "lane" in record.message] == [
        "key 'k' is in lane 'nowhere', which the setting `lanes` does not have"
    ]


async def test_shares_come_back_on_every_path(front: Front) -> None:
    """Answered, wrong, unknown, refused, too late, left while reading, left while waiting: zero in the end."""
    await front.warm_up()
    big = body(num_values=3000)
    assert (await front.post(b"{")).status == 400
    assert (await front.post(path="/v2/models/nobody/infer")).status == 404
    assert (await front.post(path="/v2/models/nobody/generate", content=b"{}")).status == 404
    assert (await front.post([big[:100], big[100:]], disconnect_after=1)).status == 499
    assert (await front.post(b"{}", path="/v2/repository/index")).status == 200
    front.model.latency_s = 60.0
    assert (await front.post(headers={"x-request-timeout-seconds": "0.05"})).status == 504
    held = [front.post(big, leave=asyncio.Event()) for _ in range(5)]
    await wait_until(lambda: front.load.num_requests == 5 and front.load.num_bytes == 5 * len(big), timeout_s=30)
    await give_up(held)
    left = asyncio.Event()
    waiting = front.post(b'{"INPUT0": [1.0]}', path=GENERATE, leave=left)
    await wait_until(lambda: front.load.num_requests == 1, timeout_s=30)
    left.set()
    await asyncio.wait([waiting])
    assert (front.load.num_requests, front.load.num_bytes) == (0, 0)


def test_when_to_come_back_in_grpcs_own_forms() -> None:
    """`RetryInfo` for applications, and a pushback for gRPC's own retries; never zero, which would mean at once."""
    metadata = dict(retry_metadata(Overloaded("model 'm'", "full", 2.5)))
    assert metadata["grpc-retry-pushback-ms"] == "2500"
    assert dict(retry_metadata(Overloaded("m", "full", 0.0)))["grpc-retry-pushback-ms"] == "1"
    assert retry_of(metadata) == (8, "model 'm': full", 2.5)


def retry_of(metadata: Any) -> tuple[int, str, float]:
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    return status.code, status.message, retry.retry_delay.ToMilliseconds() / 1e3


async def test_overload_over_grpc(front: Front) -> None:
    """RESOURCE_EXHAUSTED with the delay, by a bound of the model and of the replica, and in a stream by a message."""
    front.configure(queue=QueueSettings(max_requests=1))
    held = await front.fill(1)
    async with grpc_server(front.plane, None) as address, triton_grpc.InferenceServerClient(address) as client:
        value = InferInput("INPUT0", [1, 1], "FP32").set_data_from_numpy(np.zeros((1, 1), np.float32))
        large = InferInput("INPUT0", [1, 50_000], "FP32").set_data_from_numpy(np.zeros((1, 50_000), np.float32))

        async def refusal(tensor: InferInput) -> tuple[str, float]:
            with pytest.raises(triton_grpc.InferenceServerException) as caught:
                await client.infer("identity", [tensor])
            error = caught.value.__context__
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            code, message, delay_s = retry_of(dict(error.trailing_metadata() or ()))
            assert (code, message) == (8, error.details())
            return message, delay_s

        message, delay_s = await refusal(value)
        assert "1 requests are waiting" in message
        assert delay_s > 0
        front.configure(replica=ReplicaSettings(max_bytes=1_000_000))
        with front.plane.admission.load.enter(1_000_000 - 200):
            assert "bytes of requests are held" in (await refusal(large))[0]

            async def requests() -> AsyncIterator[Any]:
                yield {"model_name": "identity", "inputs": [large], "request_id": "7"}

            _, error = await anext(aiter(client.stream_infer(requests())))
            assert "bytes of requests are held" in str(error)
    await give_up(held)
    assert (front.load.num_requests, front.load.num_bytes) == (0, 0)


async def test_keys_wait_in_their_lane(front: Front) -> None:
    """Over HTTP and gRPC alike: requests of a key in a lane of low priority make way for plain ones."""
    front.configure(queue=QueueSettings(max_requests=2), lanes={"batch": 20})
    gate, key = Gate(key_store()), f"Bearer {key_of('runner')}"
    guarded = http_app(front.plane, LIMITS, gate=gate)
    held = await front.fill(0)
    async with grpc_server(front.plane, gate) as address, triton_grpc.InferenceServerClient(address) as client:
        value = InferInput("INPUT0", [1, 1], "FP32").set_data_from_numpy(np.zeros((1, 1), np.float32))
        over_http = asyncio.ensure_future(
            request(guarded, "POST", INFER, body(priority=1), {"authorization": key}, leave=asyncio.Event())
        )
        over_grpc = asyncio.ensure_future(client.infer("identity", [value], headers={"authorization": key}))
        await wait_until(lambda: front.counters.num_waiting_requests == 2, timeout_s=30)
        held += [front.post(leave=asyncio.Event()) for _ in range(2)]
        assert (await over_http).status == 429
        with pytest.raises(triton_grpc.InferenceServerException, match="higher priority"):
            await over_grpc
    await give_up(held)
    assert (front.load.num_requests, front.load.num_bytes) == (0, 0)


async def test_callers_of_a_stream_that_leave_give_back(front: Front) -> None:
    """A stream that is cut off while its requests are with the model leaves nothing behind."""
    await front.warm_up()
    front.model.latency_s = 60.0
    message = service_pb2.ModelInferRequest(model_name="identity", id="1")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    message.raw_input_contents.append(bytes(4))
    async with grpc_server(front.plane, None) as address, grpc.aio.insecure_channel(address) as channel:
        stub = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        call = stub()
        for _ in range(3):
            await call.write(message)
        await wait_until(lambda: front.load.num_requests == 3, timeout_s=30)
        call.cancel()
        await wait_until(lambda: front.load.num_requests == 0, timeout_s=30)
    assert front.load.num_bytes == 0


def test_a_refusal_crosses_processes() -> None:
    """Handle callers get the same error, with its delay."""
    error = pickle.loads(pickle.dumps(Overloaded("this replica", "full", 2.0)))
    assert (str(error), error.retry_after_s) == ("this replica: full", 2.0)
