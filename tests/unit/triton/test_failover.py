"""Servers that hang, lie, lag, go away or drop connections: the other one answers, and nobody gets a wrong row."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from serve_app.endpoint import Endpoint
from serve_app.errors import (
    AnswerMalformed,
    DeadlineExceeded,
    EndpointUnavailable,
    RequestRejected,
    ServeAppError,
)
from serve_app.protocol.messages import InferRequest, ModelSpec, Parameters, TensorSpec
from serve_app.protocol.tensor import Tensor
from serve_app.settings import ChannelSettings
from serve_app.triton.fake import Failure, FakeModel, FakeTriton, Lie
from serve_app.triton.member import MemberState
from serve_app.triton.resolver import EndpointResolver
from serve_app.triton.router import Router
from tests.support.faulty_link import FaultyLink

CODE = grpc.StatusCode
SPEC = ModelSpec(
    name="identity",
    version="",
    versions=("1",),
    platform="python",
    inputs={"INPUT0": TensorSpec("INPUT0", "FP32", (-1, -1))},
    outputs={"OUTPUT0": TensorSpec("OUTPUT0", "FP32", (-1, -1))},
    max_batch_size=8,
)


def make_request(value: float = 0.0, *, size: int = 4, parameters: Parameters | None = None) -> InferRequest:
    tensor = Tensor.from_numpy("INPUT0", np.full((2, size), value, np.float32))
    return InferRequest("identity", [tensor], id=str(value), parameters=parameters or {})


async def wait_until(is_true: Callable[[], bool], *, timeout_s: float = 15.0) -> None:
    async def poll() -> None:
        while not is_true():  # noqa: ASYNC110  # what is waited for tells nobody
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), timeout_s)


async def connected(router: Router, count: int) -> None:
    await wait_until(lambda: [e.state for e in router.statistics().endpoints] == [MemberState.AVAILABLE] * count)


@contextlib.asynccontextmanager
async def fleet(*fakes: FakeTriton) -> AsyncIterator[Router]:
    """The fakes, started, and a router to all of them, connected."""
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake)
        router = await stack.enter_async_context(Router(ChannelSettings(), rng=random.Random(3)))
        router.update([fake.endpoint for fake in fakes])
        await connected(router, len(fakes))
        yield router


async def ask(router: Router, value: float, **options: Any) -> None:
    """One request; its answer is its own."""
    response = await router.infer(make_request(value), **{"timeout_s": 20.0, "spec": SPEC, **options})
    assert (response.outputs[0].to_numpy() == value).all()


async def ask_many(router: Router, count: int, *, concurrency: int = 8, **options: Any) -> list[ServeAppError]:
    """Requests with values of their own; the errors."""
    errors: list[ServeAppError] = []
    values = iter(range(count))

    async def client() -> None:
        for value in values:
            try:
                await ask(router, value, **options)
            except ServeAppError as error:
                errors.append(error)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return errors


# --- a server that hangs --------------------------------------------------------------------------------------


async def test_what_hangs_with_a_server_is_answered_by_the_other() -> None:
    """Requests on a server that stops answering anything are repeated elsewhere long before their deadline."""
    one, other = FakeTriton(), FakeTriton()
    async with fleet(one, other) as router:
        one.hang()
        started = time.monotonic()
        assert await ask_many(router, 100, concurrency=32, timeout_s=30.0) == []
        assert time.monotonic() - started < 15.0, "half of the budget of those that hung"
        hung = router.statistics().endpoints[0]
        assert (hung.state, hung.num_stalls) == (MemberState.EJECTED, 1)
        assert "no sign of life" in hung.reason
        assert hung.num_retried > 0
        one.resume()
        await wait_until(lambda: router.num_endpoints == 2)
        assert await ask_many(router, 20) == []


async def test_a_call_that_reaches_its_deadline_brings_a_hung_server_under_suspicion() -> None:
    """With deadlines shorter than any watch, the server is ejected all the same."""
    one, other = FakeTriton(), FakeTriton()
    async with fleet(one, other) as router:
        one.hang()
        while router.num_endpoints == 2:
            with contextlib.suppress(DeadlineExceeded):
                await ask(router, 1.0, timeout_s=0.1)
        assert router.statistics().endpoints[0].num_stalls == 1


async def test_a_long_call_is_no_hanging_server() -> None:
    """A server that works on one call for longer than the watch's patience, and answers pings, is left in peace."""
    fakes = [FakeTriton(FakeModel(latency_s=1.5)), FakeTriton(FakeModel(latency_s=1.5))]
    async with fleet(*fakes) as router:
        assert await ask_many(router, 4, concurrency=4) == []
        statistics = router.statistics()
        assert (statistics.num_ejections, statistics.num_retries) == (0, 0)
        assert all(fake.rpc_counts["ServerLive"] > 2 for fake in fakes), "it was asked"


async def test_the_last_server_stays_although_it_hangs() -> None:
    """There is nobody better to ask; its calls end when it comes back."""
    fake = FakeTriton()
    async with fleet(fake) as router:
        fake.hang()
        call = asyncio.ensure_future(ask(router, 1.0))
        await asyncio.sleep(1.0)
        assert router.num_endpoints == 1
        fake.resume()
        await call


async def test_a_sequence_is_not_repeated_when_its_server_hangs() -> None:
    """It waits for its server, whose state cannot be moved, and nobody else is asked."""
    fakes = [FakeTriton(), FakeTriton()]
    async with fleet(*fakes) as router:
        start = make_request(parameters={"sequence_id": 7, "sequence_start": True})
        await router.infer(start, timeout_s=5.0)
        keeper = next(fake for fake in fakes if fake.calls)
        keeper.hang()
        call = asyncio.ensure_future(router.infer(make_request(parameters={"sequence_id": 7}), timeout_s=20.0))
        await wait_until(lambda: router.num_endpoints == 1)
        keeper.resume()
        await call
        assert [len(fake.calls) for fake in fakes if fake is not keeper] == [0]


# --- a server that lies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", [lie for lie in Lie if lie is not Lie.NONE])
async def test_a_lying_server_is_not_believed_and_left_out(lie: Lie) -> None:
    """Wrong rows, datatypes, names, shapes and truncated data: the other server answers, and gets all of it soon."""
    liar, other = FakeTriton(FakeModel(lie=lie)), FakeTriton()
    async with fleet(liar, other) as router:
        assert await ask_many(router, 100) == []
        assert router.statistics().endpoints[0].unavailable_models == ("identity",)
        assert len(liar.calls) < 40
        other.models["identity"].lie = lie
        errors = await ask_many(router, 20)
        assert {type(error) for error in errors} == {AnswerMalformed}
        assert all(str(error).startswith("model 'identity' failed: ") for error in errors)


class Garbage(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Answers everything but ServerLive with bytes that are no message."""

    def service(self, details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            is_live = details.method.endswith("ServerLive")
            return service_pb2.ServerLiveResponse(live=True).SerializeToString() if is_live else b"\xff\xff\xff\x07"

        async def stream(requests: Any, context: Any) -> AsyncIterator[bytes]:
            yield await answer(b"", context)

        if details.method.endswith("ModelStreamInfer"):
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(answer)


async def test_bytes_that_are_no_message_are_no_answer() -> None:
    """From one server the other is asked; from the only one it is a typed error, for every kind of call."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Garbage(),))
    broken = Endpoint.static(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    try:
        async with FakeTriton() as fake, Router(ChannelSettings()) as router:
            router.update([broken])
            await connected(router, 1)
            with pytest.raises(AnswerMalformed, match="cannot be read"):
                await ask(router, 1.0)
            with pytest.raises(AnswerMalformed, match="ModelMetadata cannot be read"):
                await router.model_metadata("identity", timeout_s=5.0)
            with pytest.raises(AnswerMalformed, match="cannot be read"):
                async for _ in router.stream(make_request(), response_timeout_s=5.0):
                    pass
            router.update([broken, fake.endpoint])
            await connected(router, 2)
            assert await ask_many(router, 50) == []
    finally:
        await server.stop(None)


async def test_an_answer_that_fits_what_the_server_now_declares_is_believed() -> None:
    """A model that was loaded with other outputs a moment ago is no liar."""
    fake = FakeTriton(FakeModel(datatype="INT32"))
    async with fleet(fake) as router:
        tensor = Tensor.from_numpy("INPUT0", np.ones((2, 4), np.int32))
        response = await router.infer(InferRequest("identity", [tensor]), timeout_s=5.0, spec=SPEC)
        assert response.outputs[0].datatype == "INT32"
        assert fake.rpc_counts["ModelMetadata"] == 1


# --- a server that lags ---------------------------------------------------------------------------------------


async def test_a_server_that_is_far_slower_is_left_out_and_tried_again() -> None:
    """Twenty-five times the others' latency: hardly asked; once it is fast again, it gets its share again."""
    fakes = [FakeTriton(FakeModel(latency_s=0.01)) for _ in range(3)]
    async with fleet(*fakes) as router:
        fakes[0].models["identity"].latency_s = 0.25
        while not router.statistics().endpoints[0].unavailable_models:
            assert await ask_many(router, 90, concurrency=9) == []
        assert router.num_endpoints == 3
        fakes[0].calls.clear()
        assert await ask_many(router, 150, concurrency=6) == []
        assert len(fakes[0].calls) < 15
        fakes[0].models["identity"].latency_s = 0.01
        await wait_until_served(router, fakes[0])


async def wait_until_served(router: Router, fake: FakeTriton) -> None:
    fake.calls.clear()
    deadline = time.monotonic() + 30.0
    while len(fake.calls) < 30:
        assert time.monotonic() < deadline, router
        assert await ask_many(router, 30, concurrency=6) == []


async def test_half_of_the_servers_at_most_are_left_out() -> None:
    """Three of four slow ones: at least two are asked."""
    fakes = [FakeTriton(FakeModel(latency_s=0.15 if index else 0.005)) for index in range(4)]
    async with fleet(*fakes) as router:
        for _ in range(3):
            assert await ask_many(router, 120, concurrency=24) == []
            left_out = [e for e in router.statistics().endpoints if e.unavailable_models]
            assert len(left_out) <= 2


# --- connections that break -----------------------------------------------------------------------------------


async def test_goaway_costs_no_request() -> None:
    """Servers that close connections with GOAWAY, one after the other and again, under load."""
    one, other = FakeTriton(FakeModel(latency_s=0.002)), FakeTriton(FakeModel(latency_s=0.002))
    async with fleet(one, other) as router:
        traffic = asyncio.ensure_future(ask_many(router, 1200, concurrency=16))
        ends = []
        for fake in (one, other, one):
            await fake.wait_for_calls(len(fake.calls) + 100, timeout_s=30.0)
            ends.append(await fake.go_away())
            await wait_until(lambda: router.num_endpoints == 2 or traffic.done())
        assert await traffic == []
        await asyncio.gather(*ends)


@pytest.mark.parametrize("num_bytes", [0, 1, 9, 300_000])
async def test_a_connection_that_breaks_inside_an_answer_costs_no_request(num_bytes: int) -> None:
    """Wherever an answer is cut off, the caller gets a whole one from the other server."""
    one, other = FakeTriton(), FakeTriton()
    async with one, other, FaultyLink(one.address) as link, Router(ChannelSettings()) as router:
        router.update([Endpoint.static(link.address)])
        await connected(router, 1)
        router.update([Endpoint.static(link.address), other.endpoint])
        await connected(router, 2)
        other_calls = len(other.calls)
        while not link.num_resets:
            link.cut_after(num_bytes)
            response = await router.infer(make_request(3.0, size=100_000), timeout_s=20.0, spec=SPEC)
            assert (response.outputs[0].to_numpy() == 3.0).all()
        assert len(other.calls) > other_calls


async def test_resets_under_load_cost_no_request() -> None:
    """RST on every connection of one server, five times."""
    one, other = FakeTriton(FakeModel(latency_s=0.002)), FakeTriton(FakeModel(latency_s=0.002))
    async with one, other, FaultyLink(one.address) as link, Router(ChannelSettings()) as router:
        router.update([Endpoint.static(link.address), other.endpoint])
        await connected(router, 2)
        traffic = asyncio.ensure_future(ask_many(router, 2000, concurrency=16))
        for _ in range(5):
            await wait_until(lambda: router.num_endpoints == 2 or traffic.done())
            await one.wait_for_calls(len(one.calls) + 20, timeout_s=30.0)
            link.reset()
        assert await traffic == []


async def test_a_name_that_points_elsewhere_is_followed_under_load() -> None:
    """DNS moves from one server to another while requests flow: all are answered, and the new one takes over."""
    one, other = FakeTriton(FakeModel(latency_s=0.002)), FakeTriton(FakeModel(latency_s=0.002))
    async with one, other, Router(ChannelSettings()) as router:
        port = int(one.address.rpartition(":")[2])
        async with FaultyLink(other.address) as link:
            ports = {"127.0.0.1": port, "localhost": int(link.address.rpartition(":")[2])}
            answer = ["127.0.0.1"]

            async def resolve(host: str, port: int) -> list[str]:
                return list(answer)

            def update(endpoints: list[Endpoint]) -> None:
                hosts = [endpoint.address.rpartition(":")[0] for endpoint in endpoints]
                router.update([Endpoint.static(f"127.0.0.1:{ports[host]}") for host in hosts])

            async with EndpointResolver(["dns:///triton:8001"], 0.05, update, resolve=resolve):
                await connected(router, 1)
                traffic = asyncio.ensure_future(ask_many(router, 600, concurrency=8))
                await one.wait_for_calls(100, timeout_s=30.0)
                answer[:] = ["localhost"]
                await other.wait_for_calls(100, timeout_s=30.0)
                assert await traffic == []


# --- requests that kill ---------------------------------------------------------------------------------------


async def test_merged_requests_are_not_sent_again_together() -> None:
    """A merged request that was lost is its dispatcher's to take apart; a lone one is tried once more."""
    fakes = [FakeTriton() for _ in range(3)]
    async with fleet(*fakes) as router:
        for fake in fakes:
            fake.fail_when = lambda request: Failure(CODE.INTERNAL, "Stub process 'identity_0_0' is not healthy.")
        merged = make_request()
        merged.num_callers = 2
        with pytest.raises(ServeAppError):
            await router.infer(merged, timeout_s=5.0)
        assert sum(len(fake.calls) for fake in fakes) == 1


async def test_what_was_lost_waits_for_a_healthy_server() -> None:
    """The second and last try of a lost request is not wasted on a server that is known to be away."""
    fake = FakeTriton()
    async with fleet(fake) as router:
        await fake.kill()
        with pytest.raises(EndpointUnavailable):
            await ask(router, 1.0)
        again = make_request(5.0)
        again.num_losses = 1
        call = asyncio.ensure_future(router.infer(again, timeout_s=20.0))
        await asyncio.sleep(0.2)
        assert not call.done()
        await fake.restart()
        assert (await call).outputs[0].to_numpy()[0, 0] == 5.0


# --- sequences ------------------------------------------------------------------------------------------------


def step(number: int, *, start: bool = False, end: bool = False) -> InferRequest:
    return make_request(parameters={"sequence_id": number, "sequence_start": start, "sequence_end": end})


async def test_a_server_that_joins_takes_no_living_sequence() -> None:
    """Sequences stay where they began, whatever comes; new ones use the new server too."""
    fakes = [FakeTriton() for _ in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake)
        router = await stack.enter_async_context(Router(ChannelSettings()))
        router.update([fake.endpoint for fake in fakes[:2]])
        await connected(router, 2)
        for number in range(1, 25):
            await router.infer(step(number, start=True), timeout_s=5.0)
        router.update([fake.endpoint for fake in fakes])
        await connected(router, 4)
        for number in range(1, 25):
            await router.infer(step(number), timeout_s=5.0)
            await router.infer(step(number, end=True), timeout_s=5.0)
        assert [len(fake.calls) for fake in fakes[2:]] == [0, 0]
        assert router.statistics().num_sequences == 0
        for number in range(1, 25):
            await router.infer(step(number, start=True), timeout_s=5.0)
        assert all(fake.calls for fake in fakes)


async def test_a_sequence_that_another_replica_began_is_found() -> None:
    """Its server may not be the one that the hash now names: that one refuses it and the next is asked."""
    fakes = [FakeTriton() for _ in range(3)]
    living: dict[str, set[Any]] = {}

    def sequences(fake: FakeTriton) -> Callable[[Any], Failure | None]:
        known = living.setdefault(fake.address, set())

        def check(request: Any) -> Failure | None:
            number = request.parameters["sequence_id"].int64_param
            if request.parameters["sequence_start"].bool_param:
                known.add(number)
            text = f"inference request for sequence {number} to model 'identity' must specify the START flag on the"
            return None if number in known else Failure(CODE.INVALID_ARGUMENT, f"{text} first request of the sequence")

        return check

    async with fleet(*fakes[:2]) as began, fakes[2], Router(ChannelSettings()) as joined:
        for fake in fakes:
            fake.fail_when = sequences(fake)
        for number in range(1, 25):
            await began.infer(step(number, start=True), timeout_s=5.0)
        joined.update([fake.endpoint for fake in fakes])
        await connected(joined, 3)
        for number in range(1, 25):
            await joined.infer(step(number), timeout_s=5.0)
        refused = len(fakes[2].calls)
        assert refused > 0
        for number in range(1, 25):
            await joined.infer(step(number), timeout_s=5.0)
        assert len(fakes[2].calls) == refused, "found once, it is remembered"
        with pytest.raises(RequestRejected, match="START flag"):
            await joined.infer(step(99), timeout_s=5.0)


async def test_a_sequence_whose_server_is_gone_says_so() -> None:
    """Not started from nothing elsewhere; a new start is."""
    fakes = [FakeTriton(), FakeTriton()]
    async with fleet(*fakes) as router:
        await router.infer(step(1, start=True), timeout_s=5.0)
        keeper, other = sorted(fakes, key=lambda fake: -len(fake.calls))
        router.update([other.endpoint])
        with pytest.raises(EndpointUnavailable, match="the state cannot be moved"):
            await router.infer(step(1), timeout_s=5.0)
        await router.infer(step(1, start=True), timeout_s=5.0)
        assert (len(keeper.calls), len(other.calls)) == (1, 1)


# --- hedging and budgets --------------------------------------------------------------------------------------


async def test_the_faster_of_two_copies_answers_and_the_other_is_cancelled() -> None:
    """A request that takes long goes to a second server too; its first copy ends on the server when that answers."""
    one, other = FakeTriton(), FakeTriton()
    async with fleet(one, other) as router:
        one.freeze()
        for value in range(6):
            await ask(router, value, hedge_after_s=0.05)
        statistics = router.statistics()
        assert statistics.num_hedges == len(one.calls) > 0
        assert len(other.calls) == 6
        await one.wait_until(lambda: one.num_cancelled == len(one.calls))
        assert statistics.retry_tokens <= 256 - statistics.num_hedges + 1


async def test_no_second_copy_without_need_budget_or_another_server() -> None:
    """Fast answers have none; nor do sequences, nor calls for which the budget of retries has nothing left."""
    one, other = FakeTriton(), FakeTriton()
    async with fleet(one, other) as router:
        for value in range(10):
            await ask(router, value, hedge_after_s=5.0)
        while router._delivery.budget.withdraw():
            pass
        for fake in (one, other):
            fake.models["identity"].latency_s = 0.1
        await ask(router, 1.0, hedge_after_s=0.01)
        request = make_request(parameters={"sequence_id": 3, "sequence_start": True})
        await router.infer(request, timeout_s=5.0, hedge_after_s=0.01)
        assert router.statistics().num_hedges == 0


async def test_retries_are_at_most_one_in_ten() -> None:
    """When one server fails everything and the burst is spent, one request in ten is sent a second time."""
    fakes = [FakeTriton(), FakeTriton()]
    async with fleet(*fakes) as router:
        while router._delivery.budget.withdraw():
            pass
        for fake in fakes:
            fake.fail_when = lambda request: Failure(
                CODE.NOT_FOUND, "Request for unknown model: 'identity' has no available versions"
            )
        await ask_many(router, 300)
        assert router.statistics().num_retries <= 30


async def test_a_hopeless_budget_is_refused_before_it_is_sent() -> None:
    """A budget of a fifth of the fastest answer lately is not worth the server's work."""
    fake = FakeTriton(FakeModel(latency_s=0.25))
    async with fleet(fake) as router:
        assert await ask_many(router, 4, concurrency=4) == []
        with pytest.raises(DeadlineExceeded, match="lately answered nobody in so short a time"):
            await ask(router, 1.0, timeout_s=0.05)
        assert len(fake.calls) == 4
        assert router.statistics().num_hopeless == 1
