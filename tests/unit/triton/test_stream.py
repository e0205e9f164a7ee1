"""Streams through the router against real loopback servers: responses, errors, cancellation, back-pressure, retries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest

from serve_app.errors import (
    BackendFailed,
    DeadlineExceeded,
    EndpointUnavailable,
    InvalidRequest,
    ModelCrashed,
    ModelNotFound,
    NoEndpoint,
    PoolClosed,
    ServeAppError,
)
from serve_app.protocol.messages import InferRequest, InferResponse, Parameters
from serve_app.protocol.tensor import Tensor
from serve_app.settings import ChannelSettings
from serve_app.triton.fake import FakeModel, FakeTriton
from serve_app.triton.router import Router
from serve_app.triton.status import CallContext, code_of, translate


def repeat(num_responses: int = 3, **options: object) -> FakeModel:
    return FakeModel("repeat", is_decoupled=True, num_responses=num_responses, **options)  # type: ignore[arg-type]  # as given


def make_request(value: float = 1.0, parameters: Parameters | None = None, *, size: int = 4) -> InferRequest:
    tensor = Tensor.from_numpy("INPUT0", np.full((1, size), value, np.float32))
    return InferRequest("repeat", [tensor], id=f"r{value}", parameters=parameters or {})


@contextlib.asynccontextmanager
async def fleet(*fakes: FakeTriton) -> AsyncIterator[Router]:
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake)
        router = await stack.enter_async_context(Router(ChannelSettings()))
        router.update([fake.endpoint for fake in fakes])
        yield router


async def drain(responses: AsyncIterator[InferResponse], into: list[InferResponse]) -> None:
    async for response in responses:
        into.append(response)


async def collect(
    router: Router, request: InferRequest, *, response_timeout_s: float = 5.0, timeout_s: float | None = None
) -> list[InferResponse]:
    stream = router.stream(request, response_timeout_s=response_timeout_s, timeout_s=timeout_s)
    async with contextlib.aclosing(stream) as responses:
        return [response async for response in responses]


def num_active(router: Router) -> int:
    return router.statistics().num_active


@pytest.mark.parametrize("num_responses", [0, 1, 3])
async def test_every_response_arrives_in_order(num_responses: int) -> None:
    """Zero to many, each with its data; the channel is free afterwards."""
    fake = FakeTriton(repeat(num_responses))
    async with fleet(fake) as router:
        answers = await collect(router, make_request(7.0))
        assert [answer.outputs[0].to_numpy()[0, 0] for answer in answers] == [7.0] * num_responses
        assert [answer.parameters for answer in answers] == [{"triton_final_response": False}] * num_responses
        assert (router.statistics().num_done, num_active(router)) == (1, 0)
        assert fake.rpc_counts["ModelStreamInfer"] == 1


async def test_the_empty_final_response_comes_only_when_asked_for() -> None:
    """With the parameter there is one more response, which has no outputs and is the final one."""
    async with fleet(FakeTriton(repeat(1))) as router:
        answers = await collect(router, make_request(parameters={"triton_enable_empty_final_response": True}))
        assert [answer.parameters["triton_final_response"] for answer in answers] == [False, True]
        assert answers[-1].outputs == []


async def test_an_error_between_responses_is_typed() -> None:
    """What came before it is delivered; nothing is tried again."""
    async with fleet(FakeTriton(repeat(3, fail_after=1))) as router:
        got: list[InferResponse] = []
        with pytest.raises(BackendFailed, match="no more than 1"):
            await drain(router.stream(make_request(), response_timeout_s=5.0), got)
        assert len(got) == 1
        assert router.statistics().num_retries == 0
        assert num_active(router) == 0


async def test_leaving_cancels_the_work_on_the_server() -> None:
    """Closing the generator after a response, and cancelling who waits for the first one."""
    fake = FakeTriton(repeat(1000, latency_s=0.005))
    async with fleet(fake) as router:
        async with contextlib.aclosing(router.stream(make_request(), response_timeout_s=5.0)) as responses:
            await anext(responses)
        await fake.wait_until(lambda: fake.num_cancelled == 1)
        fake.freeze()
        task = asyncio.create_task(collect(router, make_request()))
        await fake.wait_for_active(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await fake.wait_until(lambda: fake.num_cancelled == 2)
        assert num_active(router) == 0


async def test_a_slow_reader_makes_the_server_wait() -> None:
    """Of a thousand responses of 256 kB only those are sent that fit gRPC's own windows."""
    fake = FakeTriton(repeat(1000))
    async with fleet(fake) as router:
        request = make_request(size=65536)
        async with contextlib.aclosing(router.stream(request, response_timeout_s=5.0)) as responses:
            await anext(responses)
            before = -1
            while before != fake.num_streamed:
                before = fake.num_streamed
                await asyncio.sleep(0.1)
            assert fake.num_streamed < 200
            await anext(responses)


async def test_a_response_that_takes_too_long() -> None:
    """`response_timeout_s` bounds the wait for each, `timeout_s` all of them together."""
    fake = FakeTriton(repeat(1000, latency_s=0.05))
    async with fleet(fake) as router:
        with pytest.raises(DeadlineExceeded):
            await collect(router, make_request(), response_timeout_s=5.0, timeout_s=0.3)
        fake.freeze()
        with pytest.raises(DeadlineExceeded):
            await collect(router, make_request(), response_timeout_s=0.1)
        await fake.wait_for_active(0)
        assert num_active(router) == 0


async def test_another_server_before_the_first_response_and_none_after_it() -> None:
    """A crashed model is asked for elsewhere; a server that dies in the middle of a stream is an error."""
    broken, sound = FakeTriton(repeat(is_stub_dead=True)), FakeTriton(repeat(1000, latency_s=0.005))
    async with fleet(broken, sound) as router:
        for _ in range(4):
            async with contextlib.aclosing(router.stream(make_request(), response_timeout_s=5.0)) as responses:
                assert (await anext(responses)).id == "r1.0"
        async with contextlib.aclosing(router.stream(make_request(), response_timeout_s=5.0)) as responses:
            await anext(responses)
            await sound.kill()
            with pytest.raises(EndpointUnavailable):
                await drain(responses, [])


async def test_a_sequence_keeps_its_server() -> None:
    """All of its streams go to one server, and to no other when that server fails it."""
    fakes = (FakeTriton(repeat(1)), FakeTriton(repeat(1)))
    async with fleet(*fakes) as router:
        for _ in range(10):
            await collect(router, make_request(parameters={"sequence_id": "abc"}))
        assert sorted(len(fake.calls) for fake in fakes) == [0, 10]
        owner, other = sorted(fakes, key=lambda fake: -len(fake.calls))
        owner.models["repeat"].is_stub_dead = True
        with pytest.raises(ModelCrashed):
            await collect(router, make_request(parameters={"sequence_id": "abc"}))
        assert len(other.calls) == 0


async def test_what_cannot_be_streamed() -> None:
    """An unknown model, no server, a closed router: a typed error, before any response."""
    fake = FakeTriton(FakeModel("other"))
    async with fleet(fake) as router:
        with pytest.raises(ModelNotFound):
            await collect(router, make_request())
        router.update([])
        with pytest.raises(NoEndpoint):
            await collect(router, make_request())
        await router.aclose()
        with pytest.raises(PoolClosed):
            await collect(router, make_request())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Request for unknown model: 'x' is not found", ModelNotFound),
        ("Stub process 'x_0_0' is not healthy.", ModelCrashed),
        ("[request id: 1] expected 1 inputs but got 0 inputs for model 'x'", InvalidRequest),
        ("inference request batch-size must be <= 8 for 'x'", InvalidRequest),
        ("CUDA out of memory", BackendFailed),
    ],
)
def test_a_text_without_a_status_has_one_in_all_likelihood(text: str, error: type[ServeAppError]) -> None:
    """Triton sends some errors in streams as text alone; they become the same classes as those of unary calls."""
    assert isinstance(translate(code_of(text), text, CallContext("127.0.0.1:1", "x")), error)


def test_an_unlikely_text_is_the_backends_failure() -> None:
    """INTERNAL is what is left."""
    assert code_of("") is grpc.StatusCode.INTERNAL
