"""The router against real loopback servers: shares, ejection, return, retries, blocked models, changes of the set."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from serve_app.endpoint import Endpoint
from serve_app.errors import (
    BackendFailed,
    DeadlineExceeded,
    EndpointUnavailable,
    ModelCrashed,
    ModelNotFound,
    ModelNotReady,
    NoEndpoint,
    PoolClosed,
    RequestRejected,
    ServeAppError,
)
from serve_app.protocol.messages import InferRequest, Parameters
from serve_app.protocol.tensor import Tensor
from serve_app.settings import ChannelSettings
from serve_app.triton.fake import Failure, FakeModel, FakeTriton
from serve_app.triton.member import MemberState
from serve_app.triton.membership import INITIAL_PROBE_PAUSE_S
from serve_app.triton.pool_statistics import PoolState
from serve_app.triton.router import Router

CODE = grpc.StatusCode
SETTINGS = ChannelSettings()


def make_request(
    value: float = 0.0, *, model_name: str = "identity", parameters: Parameters | None = None
) -> InferRequest:
    tensor = Tensor.from_numpy("INPUT0", np.full((1, 4), value, np.float32))
    return InferRequest(model_name, [tensor], id=str(value), parameters=parameters or {})


async def wait_until(is_true: Callable[[], bool], *, timeout_s: float = 8.0) -> None:
    async def poll() -> None:
        while not is_true():  # noqa: ASYNC110  # what is waited for tells nobody
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), timeout_s)


def num_admitted(router: Router) -> int:
    return sum(endpoint.state is MemberState.AVAILABLE for endpoint in router.statistics().endpoints)


@contextlib.asynccontextmanager
async def fleet(
    *fakes: FakeTriton, settings: ChannelSettings = SETTINGS, on_change: Callable[[], None] | None = None
) -> AsyncIterator[Router]:
    """The fakes, started, and a router to all of them, connected."""
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake)
        router = await stack.enter_async_context(Router(settings, rng=random.Random(3), on_change=on_change))
        router.update([fake.endpoint for fake in fakes])
        await wait_until(lambda: num_admitted(router) == len(fakes))
        yield router


async def send_many(router: Router, count: int, *, concurrency: int = 32) -> list[BaseException]:
    """Send requests, check that each gets its own answer, and return the errors."""
    errors: list[BaseException] = []
    values = iter(range(count))

    async def client() -> None:
        for value in values:
            try:
                response = await router.infer(make_request(value), timeout_s=10)
                assert response.outputs[0].to_numpy()[0, 0] == value
            except ServeAppError as error:
                errors.append(error)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return errors


def shares(fakes: Iterable[FakeTriton]) -> list[float]:
    counts = [len(fake.calls) for fake in fakes]
    for fake in fakes:
        fake.calls.clear()
    return [count / sum(counts) for count in counts]


# --- shares -------------------------------------------------------------------------------------------------


async def test_equal_servers_get_equal_shares() -> None:
    """Three equal servers each get a third of 3,000 requests, to within five points."""
    fakes = [FakeTriton(), FakeTriton(), FakeTriton()]
    async with fleet(*fakes) as router:
        assert await send_many(router, 3000) == []
        assert all(abs(share - 1 / 3) < 0.05 for share in shares(fakes))


async def test_added_server_gets_traffic_at_once_and_slow_one_less() -> None:
    """A server added while requests flow takes its share; one made ten times slower takes far less than before."""
    fakes = [FakeTriton(FakeModel(latency_s=0.004)) for _ in range(4)]
    async with fleet(*fakes[:3]) as router, fakes[3]:
        traffic = asyncio.ensure_future(send_many(router, 800, concurrency=12))
        await fakes[0].wait_for_calls(20)
        router.update([fake.endpoint for fake in fakes])
        await fakes[3].wait_for_calls(1, timeout_s=1.0)
        assert await traffic == []
        assert shares(fakes)[3] > 0.1
        fakes[1].models["identity"].latency_s = 0.040
        assert await send_many(router, 600, concurrency=12) == []
        assert shares(fakes)[1] < 0.1
        assert await send_many(router, 30, concurrency=1) == []
        assert shares(fakes)[1] < 0.1


async def test_near_server_is_preferred_and_spills() -> None:
    """The server on this node gets every call until it is busy; then the others get the next ones."""
    near, far = FakeTriton(), FakeTriton()
    async with near, far, Router(SETTINGS, local_node_id="n1") as router:
        router.update([
            Endpoint(far.address, "far", node_id="n2", zone="z"),
            Endpoint(near.address, "near", node_id="n1", zone="z"),
        ])  # fmt: skip
        await wait_until(lambda: num_admitted(router) == 2)
        assert await send_many(router, 20, concurrency=1) == []
        assert (len(near.calls), len(far.calls)) == (20, 0)
        near.freeze()
        far.freeze()
        calls = [asyncio.ensure_future(router.infer(make_request(), timeout_s=5)) for _ in range(6)]
        await wait_until(lambda: near.num_active + far.num_active == 6)
        assert near.num_active == far.num_active == 3
        near.thaw()
        far.thaw()
        await asyncio.gather(*calls)


async def test_sequence_stays_on_one_server() -> None:
    """Every request of a sequence goes to the same server."""
    fakes = [FakeTriton(), FakeTriton(), FakeTriton()]
    async with fleet(*fakes) as router:
        for _ in range(12):
            await router.infer(make_request(parameters={"sequence_id": 42}), timeout_s=5)
        assert sorted(shares(fakes)) == [0.0, 0.0, 1.0]


# --- a server that dies -------------------------------------------------------------------------------------


async def test_killed_server_costs_no_request_when_there_is_another() -> None:
    """One of two servers dies with 64 requests in flight: every client gets its answer, and the dead one is ejected."""
    one, other = FakeTriton(FakeModel(latency_s=0.01)), FakeTriton(FakeModel(latency_s=0.01))
    async with fleet(one, other) as router:
        traffic = asyncio.ensure_future(send_many(router, 1500, concurrency=64))
        await one.wait_until(lambda: one.num_active >= 16)
        await one.kill()
        assert await traffic == []
        assert router.num_endpoints == 1
        statistics = router.statistics()
        assert statistics.num_retries >= 16
        assert statistics.num_ejections == 1
        assert "Socket closed" in statistics.endpoints[0].reason
        assert f"{one.address} ejected 0 active 0 queued 1 ejections" in repr(router)


async def test_callers_that_wait_for_a_dead_servers_channels_go_elsewhere() -> None:
    """Callers queued at a server that dies are sent to the other one at no charge to the retry budget."""
    settings = ChannelSettings(num_channels=1, max_calls_per_channel=1)
    one, other = FakeTriton(), FakeTriton()
    async with fleet(one, other, settings=settings) as router:
        one.freeze()
        other.freeze()
        calls = [asyncio.ensure_future(router.infer(make_request(i), timeout_s=10)) for i in range(40)]
        await wait_until(lambda: router.statistics().num_waiting == 38)
        await one.kill()
        other.thaw()
        await asyncio.gather(*calls)
        assert router.statistics().retry_tokens >= 255


async def test_only_server_dies_and_comes_back() -> None:
    """With one server: typed errors at once while it is gone, and answers again within 2 s of its return."""
    changes: list[int] = []
    fake = FakeTriton()
    async with fleet(fake, on_change=lambda: changes.append(len(changes))) as router:
        fake.freeze()
        call = asyncio.ensure_future(router.infer(make_request(), timeout_s=10))
        await fake.wait_for_active(1)
        before = len(changes)
        await fake.kill()
        with pytest.raises(EndpointUnavailable):
            await call
        assert router.num_endpoints == 0
        assert len(changes) == before + 1
        started = time.monotonic()
        with pytest.raises(NoEndpoint, match="none of 1 servers can be reached"):
            await router.infer(make_request(), timeout_s=10)
        assert not await router.is_ready(timeout_s=10)
        assert time.monotonic() - started < 0.5
        await asyncio.sleep(1.5)  # grpc's backoff has grown to its longest by now
        fake.thaw()
        await fake.restart()
        started = time.monotonic()
        await wait_until(lambda: router.num_endpoints == 1, timeout_s=2.0)
        await router.infer(make_request(), timeout_s=1)
        assert time.monotonic() - started < 2.0
        assert await router.is_ready(timeout_s=1)
        assert len(changes) == before + 2
        assert await send_many(router, 50) == []


async def test_no_probe_storm_while_a_server_is_gone() -> None:
    """A dead server is probed a few times a second, however many requests ask for it."""
    fake = FakeTriton()
    async with fleet(fake) as router:
        await fake.kill()
        errors = await send_many(router, 500)
        assert len(errors) == 500
        assert all(isinstance(error, NoEndpoint | EndpointUnavailable) for error in errors)
        assert router.statistics().num_ejections == 1
        await fake.restart()
        fake.is_live = False
        await asyncio.sleep(0.5)
        assert fake.rpc_counts["ServerLive"] < 20
        assert router.num_endpoints == 0
        fake.is_live = True
        await wait_until(lambda: router.num_endpoints == 1)


async def test_server_that_was_never_there_is_not_asked() -> None:
    """A server that cannot be connected to is ejected without costing a request when there is another."""
    fake = FakeTriton()
    async with fake, Router(SETTINGS) as router:
        router.update([Endpoint.static("127.0.0.1:1"), fake.endpoint])
        assert await send_many(router, 50) == []
        await wait_until(lambda: router.num_endpoints == 1)
        assert "Connection refused" in router.statistics().endpoints[0].reason


async def test_no_server_is_a_typed_error() -> None:
    """Without any server, calls end at once with `NoEndpoint`."""
    async with Router(SETTINGS) as router:
        with pytest.raises(NoEndpoint, match="no server is known"):
            await router.infer(make_request(), timeout_s=5)
        assert not await router.is_ready(timeout_s=5)
        assert repr(router) == "<Router [0 of 0 available] no servers | Requests: 0 done, 1 failed, 0 retries>"


# --- a model that one server cannot serve -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (CODE.NOT_FOUND, "Request for unknown model: 'identity' has no available versions"),
        (CODE.NOT_FOUND, "Request for unknown model: 'identity' is not found"),
        (CODE.UNAVAILABLE, "Request for unknown model: 'identity' has no available versions"),
        (CODE.INTERNAL, "Stub process 'identity_0_0' is not healthy."),
    ],
)
async def test_model_gone_from_one_server_costs_no_request(code: grpc.StatusCode, text: str) -> None:
    """One of two servers stops serving the model under load: no client sees it, and that server is hardly asked."""
    one, other = FakeTriton(), FakeTriton()
    async with fleet(one, other) as router:
        one.fail_when = lambda request: Failure(code, text)
        assert await send_many(router, 600) == []
        assert len(one.calls) < 100
        assert router.statistics().endpoints[0].unavailable_models == ("identity",)
        assert router.num_endpoints == 2
        one.fail_when = None
        one.calls.clear()
        started = time.monotonic()
        while len(one.calls) < 10:
            assert await send_many(router, 20) == []
            assert time.monotonic() - started < 2.0, "the server is not asked again"


async def test_model_that_only_one_server_has_is_found() -> None:
    """Requests and metadata calls for a model find the one server that has it."""
    one, other = FakeTriton(), FakeTriton(FakeModel("rare"))
    async with fleet(one, other) as router:
        for _ in range(20):
            await router.infer(make_request(model_name="rare"), timeout_s=5)
            assert (await router.model_metadata("rare", timeout_s=5)).name == "rare"
            assert (await router.model_config("rare", "1", timeout_s=5)).config.max_batch_size == 8
        assert await router.is_model_ready("rare", timeout_s=5)
        assert not await router.is_model_ready("nope", timeout_s=5)
        index = await router.repository_index(timeout_s=5)
        assert index[0].state == "READY"


async def test_model_that_nobody_has_is_not_found() -> None:
    """An unknown model is `ModelNotFound`, one that is loaded nowhere `ModelNotReady`, after one try on each server."""
    one, other = FakeTriton(), FakeTriton()
    async with fleet(one, other) as router:
        with pytest.raises(ModelNotFound, match="unknown model 'nope'"):
            await router.infer(make_request(model_name="nope"), timeout_s=5)
        assert len(one.calls) == len(other.calls) == 1
        with pytest.raises(ModelNotFound):
            await router.model_metadata("nope", timeout_s=5)
        assert router.statistics().retry_tokens == 256
        one.models["identity"].is_ready = other.models["identity"].is_ready = False
        with pytest.raises(ModelNotReady):
            await router.infer(make_request(), timeout_s=5)
        one.models["identity"].is_ready = True
        started = time.monotonic()
        while await send_many(router, 1):
            assert time.monotonic() - started < 2.0, "the model is not found again"
            await asyncio.sleep(0.01)
        assert await send_many(router, 20) == []


async def test_model_missing_on_one_and_the_other_gone_is_unavailable() -> None:
    """That one server lacks the model is no 404 while the server that may have it went away."""
    one, other = FakeTriton(FakeModel("rare")), FakeTriton()
    async with fleet(one, other) as router:
        one.freeze()
        call = asyncio.ensure_future(router.infer(make_request(model_name="rare"), timeout_s=5))
        await one.wait_for_active(1)
        await one.kill()
        with pytest.raises(EndpointUnavailable):
            await call


async def test_request_that_kills_is_not_sent_to_every_server() -> None:
    """A request whose model process dies is tried on one more server, not on all of them."""
    fakes = [FakeTriton() for _ in range(4)]
    async with fleet(*fakes) as router:
        for fake in fakes:
            fake.fail_when = lambda request: Failure(CODE.INTERNAL, "Stub process 'identity_0_0' is not healthy.")
        with pytest.raises(ModelCrashed):
            await router.infer(make_request(), timeout_s=5)
        assert sum(len(fake.calls) for fake in fakes) == 2


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (CODE.INVALID_ARGUMENT, "unexpected shape", RequestRejected),
        (CODE.INTERNAL, "Failed to process the request(s) for model 'x', message: ValueError: no", BackendFailed),
    ],
)
async def test_the_requests_own_fault_is_not_retried(
    code: grpc.StatusCode, text: str, expected: type[Exception]
) -> None:
    """What is wrong with the request, or fails in the model, is answered by one server alone."""
    fakes = [FakeTriton(), FakeTriton()]
    async with fleet(*fakes) as router:
        for fake in fakes:
            fake.fail_next(code, text)
        with pytest.raises(expected):
            await router.infer(make_request(), timeout_s=5)
        assert router.statistics().num_retries == 0


async def test_sequence_is_never_sent_twice() -> None:
    """A sequence's request whose server dies is an error, since its state died too."""
    fakes = [FakeTriton(), FakeTriton()]
    async with fleet(*fakes) as router:
        for fake in fakes:
            fake.freeze()
        call = asyncio.ensure_future(router.infer(make_request(parameters={"sequence_id": "s1"}), timeout_s=5))
        await wait_until(lambda: any(fake.num_active for fake in fakes))
        await next(fake for fake in fakes if fake.num_active).kill()
        with pytest.raises(EndpointUnavailable):
            await call


# --- budgets ------------------------------------------------------------------------------------------------


async def test_budget_reaches_triton_and_bounds_the_call() -> None:
    """The budget goes along as `timeout` in microseconds unless the request has a shorter one, and ends the call."""
    fake = FakeTriton()
    async with fleet(fake) as router:
        await router.infer(make_request(), timeout_s=2.0)
        await router.infer(make_request(parameters={"timeout": 1000}), timeout_s=2.0)
        await router.infer(make_request(parameters={"timeout": 9_000_000}), timeout_s=2.0)
        assert [call.parameters["timeout"] for call in fake.calls] == [2_000_000, 1000, 2_000_000]
        fake.freeze()
        with pytest.raises(DeadlineExceeded):
            await router.infer(make_request(), timeout_s=0.05)
        await fake.wait_until(lambda: fake.num_cancelled == 1)
        assert router.num_endpoints == 1


async def test_cancelled_request_is_cancelled_on_the_server() -> None:
    """A caller that goes away frees its channel, and the server hears of it; nothing is retried."""
    fakes = [FakeTriton(), FakeTriton()]
    async with fleet(*fakes) as router:
        for fake in fakes:
            fake.freeze()
        calls = [asyncio.ensure_future(router.infer(make_request(), timeout_s=10)) for _ in range(10)]
        await wait_until(lambda: sum(fake.num_active for fake in fakes) == 10)
        for call in calls:
            call.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*calls, return_exceptions=True))
        await wait_until(lambda: sum(fake.num_cancelled for fake in fakes) == 10)
        statistics = router.statistics()
        assert (statistics.num_active, statistics.num_waiting, statistics.num_retries) == (0, 0, 0)


async def test_statistics_are_the_truth() -> None:
    """In flight and waiting, per server, are exactly what frozen servers see and what they do not see yet."""
    settings = ChannelSettings(num_channels=2, max_calls_per_channel=3)
    fakes = [FakeTriton(), FakeTriton()]
    async with fleet(*fakes, settings=settings) as router:
        for fake in fakes:
            fake.freeze()
        calls = [asyncio.ensure_future(router.infer(make_request(), timeout_s=10)) for _ in range(20)]
        await wait_until(lambda: all(fake.num_active == 6 for fake in fakes))
        statistics = router.statistics()
        assert [(e.num_active, e.num_waiting) for e in statistics.endpoints] == [(6, 4), (6, 4)]
        assert repr(router).count("available 6 active 4 queued") == 2
        for fake in fakes:
            fake.thaw()
        await asyncio.gather(*calls)
        assert sum(len(fake.calls) for fake in fakes) == router.statistics().num_done == 20


# --- changes of the set -------------------------------------------------------------------------------------


async def test_removed_server_finishes_its_calls() -> None:
    """Calls on a removed server are answered; then its channels are closed, and new calls go elsewhere."""
    old, new = FakeTriton(), FakeTriton()
    async with fleet(old, new) as router:
        router.update([old.endpoint])
        old.freeze()
        call = asyncio.ensure_future(router.infer(make_request(5.0), timeout_s=10))
        await old.wait_for_active(1)
        router.update([new.endpoint])
        assert "draining 1 active" in repr(router)
        await wait_until(lambda: router.num_endpoints == 1)
        await router.infer(make_request(), timeout_s=5)
        old.thaw()
        assert (await call).outputs[0].to_numpy()[0, 0] == 5.0
        await wait_until(lambda: "draining" not in repr(router))
        assert len(router.statistics().endpoints) == 1


async def test_same_server_keeps_its_channels_and_a_new_life_gets_new_ones() -> None:
    """An update that repeats a server leaves its connections alone; another server id means another pool."""
    fake = FakeTriton()
    async with fake, Router(SETTINGS) as router:
        for server_id in ("a", "a", "b"):
            router.update([Endpoint(fake.address, server_id)])
            await wait_until(lambda: num_admitted(router) == 1)
            assert await send_many(router, 20) == []
        assert len(fake.peers) == 4


async def test_close_ends_everything() -> None:
    """Closing waits for calls up to its bound, closes draining pools too, and later calls get `PoolClosed`."""
    one, other = FakeTriton(), FakeTriton()
    async with fleet(one, other) as router:
        one.freeze()
        other.freeze()
        calls = [asyncio.ensure_future(router.infer(make_request(), timeout_s=10)) for _ in range(4)]
        await wait_until(lambda: one.num_active + other.num_active == 4)
        router.update([other.endpoint])
        closing = asyncio.ensure_future(router.aclose(grace_s=30))
        await asyncio.sleep(0.01)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, EndpointUnavailable | PoolClosed)
        with pytest.raises(PoolClosed):
            await router.infer(make_request(), timeout_s=5)
        with pytest.raises(PoolClosed):
            router.update([])
        assert repr(router).startswith("<Router [closed]")


async def test_closed_router_stays_closed_when_calls_were_cut_off() -> None:
    """A call that closing cuts off looks like a lost server; it is not probed, which would connect to it again."""
    fake = FakeTriton()
    async with fleet(fake) as router:
        fake.freeze()
        call = asyncio.ensure_future(router.infer(make_request(), timeout_s=10))
        await fake.wait_for_active(1)
        await router.aclose(grace_s=0)
        with pytest.raises(EndpointUnavailable):
            await call
        assert router.statistics().num_ejections == 0
        await asyncio.sleep(3 * INITIAL_PROBE_PAUSE_S)
        (endpoint,) = router.statistics().endpoints
        assert (endpoint.pool.state, endpoint.pool.num_channels) == (PoolState.CLOSED, 0)


async def test_close_does_not_wait_longer_for_removed_servers() -> None:
    """The bound given to `aclose` holds for servers that were removed before, too."""
    fake = FakeTriton()
    async with fleet(fake) as router:
        fake.freeze()
        call = asyncio.ensure_future(router.infer(make_request(), timeout_s=60))
        await fake.wait_for_active(1)
        router.update([])
        started = time.monotonic()
        await router.aclose(grace_s=0.05)
        assert time.monotonic() - started < 2.0
        with pytest.raises(EndpointUnavailable):
            await call


async def test_listener_that_raises_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    """An error in `on_change` is logged; the servers are what they are."""

    def listen() -> None:
        raise RuntimeError("listener")

    fake = FakeTriton()
    async with fleet(fake, on_change=listen) as router:
        assert await send_many(router, 5) == []
    assert "listener" in caplog.text


async def test_control_calls_by_name() -> None:
    """Any unary call can be made by its name."""
    fake = FakeTriton()
    async with fleet(fake) as router:
        answer: Any = await router.call("ServerMetadata", service_pb2.ServerMetadataRequest(), timeout_s=5)
        assert answer.version == "2.51.0"
