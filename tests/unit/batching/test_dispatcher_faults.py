"""One bad request, one bad batch or one fault of ours hurts nobody else."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from serve_app.batching.dispatcher import Dispatcher
from serve_app.batching.isolation import max_extra_calls
from serve_app.clock import Deadline, ManualClock
from serve_app.errors import (
    BackendFailed,
    DeadlineExceeded,
    EndpointStalled,
    EndpointUnavailable,
    EndpointUnreachable,
    ModelCrashed,
    ModelNotReady,
    NoEndpoint,
    RequestTooLarge,
    ServeAppError,
    TensorShapeMismatch,
)
from serve_app.protocol.messages import InferRequest, InferResponse
from serve_app.protocol.tensor import Tensor
from tests.support.identity_model import POISON, IdentityModel, floats, request_of, settings_of, spec_of, turns, until


class Bench:
    """A dispatcher for batches of up to 64 rows."""

    def __init__(self, *, max_batch_size: int = 64) -> None:
        self.model = IdentityModel(max_rows=max_batch_size)
        self.clock = ManualClock()
        self.dispatcher = Dispatcher(
            spec_of(max_batch_size=max_batch_size),
            settings_of(),
            send=self.model.infer,
            num_endpoints=lambda: 1,
            clock=self.clock,
        )

    def enqueue(self, request: InferRequest, rows: int = 1, timeout_s: float = 30.0) -> asyncio.Future[InferResponse]:
        return self.dispatcher.enqueue(request, rows, Deadline.after(timeout_s, now=self.clock.now()))

    def singles(self, count: int) -> list[asyncio.Future[InferResponse]]:
        return [self.enqueue(request_of(F=floats(1, first=10.0 * index))) for index in range(count)]

    async def is_well(self) -> None:
        """Nothing is left, and 100 plain requests succeed."""
        await until(lambda: self.dispatcher.is_idle)
        assert repr(self.dispatcher).endswith("Requests: 0 queued, 0 in flight | Batches: 0 of 2 permits>")
        expect_rows(await asyncio.gather(*self.singles(100)))


def expect_rows(responses: Sequence[InferResponse | BaseException], *, but: Sequence[int] = ()) -> None:
    for index, response in enumerate(responses):
        if index not in but:
            assert isinstance(response, InferResponse), response
            np.testing.assert_array_equal(response.outputs[0].to_numpy(), floats(1, first=10.0 * index))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.model.release()
    await bench.dispatcher.aclose(drain_s=1.0)


@pytest.mark.parametrize("count", [2, 8, 13])
async def test_fail_each_of_a_batch(bench: Bench, count: int) -> None:
    """For each index i: request i makes the backend fail, it alone gets the error, the others their own rows."""
    for index in range(count):
        bench.model.calls.clear()
        futures = [
            bench.enqueue(request_of(F=np.array([[POISON, 0]], np.float32)))
            if number == index
            else bench.enqueue(request_of(F=floats(1, first=10.0 * number)))
            for number in range(count)
        ]
        answers = await asyncio.gather(*futures, return_exceptions=True)
        expect_rows(answers, but=[index])
        assert isinstance(answers[index], BackendFailed)
        assert len(bench.model.calls) - 1 <= 2 * (count - 1).bit_length()
    await bench.is_well()


async def test_one_bad_of_64_costs_twelve_calls_at_most(bench: Bench) -> None:
    """63 right answers, one clear error, and the bound on extra calls is counted."""
    futures = [*bench.singles(63), bench.enqueue(request_of(F=np.array([[POISON, 0]], np.float32)))]
    answers = await asyncio.gather(*futures, return_exceptions=True)
    expect_rows(answers, but=[63])
    assert isinstance(answers[63], BackendFailed)
    counters = bench.dispatcher.statistics().counters
    assert (counters.num_batches_sent, counters.num_isolations) == (1, 1)
    assert counters.num_isolation_calls == len(bench.model.calls) - 1 <= 12
    assert bench.model.most_running == 1, "the parts went one after another, under the batch's own permit"


async def test_a_model_that_fails_throughout_fails_each_caller_in_bounded_calls(bench: Bench) -> None:
    """When all are guilty all get errors, each an instance of its own, and the model is not asked twice as often."""

    def fail(request: InferRequest) -> None:
        raise BackendFailed("identity", "out of order")

    bench.model.fault = fail
    answers = await asyncio.gather(*bench.singles(64), return_exceptions=True)
    assert all(isinstance(answer, BackendFailed) for answer in answers)
    assert len({id(answer) for answer in answers}) == 64
    assert len(bench.model.calls) - 1 <= max_extra_calls(64)


@pytest.mark.parametrize(
    "error",
    [
        EndpointUnreachable("127.0.0.1:1", "connection refused"),
        EndpointStalled("127.0.0.1:1", "no sign of life"),
        ModelNotReady("identity", "loading"),
        NoEndpoint("identity", "none is known"),
        DeadlineExceeded("waiting for Triton", 30.0),
    ],
)
async def test_what_is_nobodys_fault_is_told_everyone_at_once(bench: Bench, error: ServeAppError) -> None:
    """The batch is not sent again, and no two callers raise the same exception object."""

    def fail(request: InferRequest) -> None:
        raise error

    bench.model.fault = fail
    answers = await asyncio.gather(*bench.singles(8), return_exceptions=True)
    assert {type(answer) for answer in answers} == {type(error)}
    assert {str(answer) for answer in answers} == {str(error)}
    assert len({id(answer) for answer in answers} - {id(error)}) == 8
    assert len(bench.model.calls) == 1
    bench.model.fault = lambda request: None
    await bench.is_well()


@pytest.mark.parametrize("loss", [EndpointUnavailable("t", "Socket closed"), ModelCrashed("m", "not healthy")])
@pytest.mark.parametrize("index", [0, 3, 7])
async def test_a_request_that_kills_is_sent_once_more_alone(bench: Bench, loss: ServeAppError, index: int) -> None:
    """A batch that was lost with its server is sent one request at a time, each once: only the guilty one fails."""

    sent: list[tuple[int, int, int]] = []

    def kill(request: InferRequest) -> None:
        sent.append((request.num_callers, request.num_losses, request.inputs[0].shape[0]))
        if POISON in request.inputs[0].to_numpy():
            raise loss

    bench.model.fault = kill
    requests = [request_of(F=floats(1, first=10.0 * number)) for number in range(8)]
    requests[index] = request_of(F=np.array([[POISON, 0]], np.float32))
    answers = await asyncio.gather(*map(bench.enqueue, requests), return_exceptions=True)
    expect_rows(answers, but=[index])
    assert type(answers[index]) is type(loss)
    assert sent == [(8, 0, 8), *[(1, 1, 1)] * 8]
    assert bench.model.most_running == 1
    await bench.is_well()


async def test_a_server_that_dies_of_nobody_costs_nobody_an_answer(bench: Bench) -> None:
    """A batch that was lost because its server was killed is answered to all, one by one."""

    def die(request: InferRequest) -> None:
        if len(bench.model.calls) == 1:
            raise EndpointUnavailable("127.0.0.1:1", "Socket closed")

    bench.model.fault = die
    expect_rows(await asyncio.gather(*bench.singles(8)))
    assert len(bench.model.calls) == 9


async def test_a_sum_that_is_too_large_is_sent_in_parts(bench: Bench) -> None:
    """Requests that only together are above a limit below are all answered."""

    def fail(request: InferRequest) -> None:
        if request.inputs[0].shape[0] > 10:
            raise RequestTooLarge("gRPC message", 11, 10)

    bench.model.fault = fail
    expect_rows(await asyncio.gather(*bench.singles(64)))


async def test_a_model_that_answers_other_rows_than_sent_hurts_only_itself(bench: Bench) -> None:
    """Rows cannot be told apart in a wrong answer, so each request is asked alone, and nobody gets another's."""

    def lie(response: InferResponse) -> InferResponse:
        if response.outputs[0].shape[0] > 1:
            first = response.outputs[0]
            response.outputs[0] = Tensor(first.name, first.datatype, (1, 2), first.data[:8])
        return response

    bench.model.lie = lie
    expect_rows(await asyncio.gather(*bench.singles(8)))


async def test_a_part_with_other_rows_fails_the_split_request_by_name() -> None:
    """An oversize request is never answered with rows missing."""
    bench = Bench(max_batch_size=8)

    def lie(response: InferResponse) -> InferResponse:
        first = response.outputs[0]
        response.outputs[0] = Tensor(first.name, first.datatype, (1, 2), first.data[:8])
        return response

    bench.model.lie = lie
    with pytest.raises(BackendFailed, match=r"output 'OUT_F' came back with shape \[1, 2\] for 8 rows"):
        await bench.enqueue(request_of(F=floats(40)), 40)
    bench.model.lie = lambda response: response
    await bench.is_well()


async def test_parts_that_cannot_be_joined_fail_their_request_alone() -> None:
    """A model whose output shape depends on the batch: one clear error, and the batch-mates are answered."""
    bench = Bench(max_batch_size=8)
    widths = itertools.count(1)

    def lie(response: InferResponse) -> InferResponse:
        rows = response.outputs[0].shape[0]
        response.outputs.append(Tensor.from_numpy("odd", np.zeros((rows, next(widths)), np.int8)))
        return response

    bench.model.lie = lie
    large, small = bench.enqueue(request_of(F=floats(12)), 12), bench.enqueue(request_of(F=floats(1)))
    with pytest.raises(BackendFailed, match=r"'odd'.*cannot be joined"):
        await large
    assert (await small).outputs[1].shape == (1, 2)
    bench.model.lie = lambda response: response
    await bench.is_well()


async def test_a_failed_part_withdraws_the_rest_of_its_request() -> None:
    """One guilty part of a large request: one error, the other parts are not run, batch-mates are answered."""
    bench = Bench(max_batch_size=8)
    array = floats(80)
    array[3, 0] = POISON
    large = bench.enqueue(request_of(F=array), 80)
    small = [bench.enqueue(request_of(F=floats(1, first=10.0 * index))) for index in range(8)]
    with pytest.raises(BackendFailed):
        await large
    expect_rows(await asyncio.gather(*small))
    assert len(bench.model.calls) <= 4
    await bench.is_well()


async def test_a_guilty_batch_mate_does_not_harm_the_last_part_of_a_large_request() -> None:
    """The part shares a batch with a bad request, is sent again without it, and is joined."""
    bench = Bench(max_batch_size=8)
    large = bench.enqueue(request_of(F=floats(12)), 12)
    poisoned = bench.enqueue(request_of(F=np.array([[POISON, 0]], np.float32)))
    np.testing.assert_array_equal((await large).outputs[0].to_numpy(), floats(12))
    with pytest.raises(BackendFailed):
        await poisoned
    await bench.is_well()


async def test_requests_that_break_the_planner_or_the_merger(bench: Bench) -> None:
    """Ragged, huge and senseless items get an error each; the valid ones beside them are answered."""
    ragged = InferRequest("identity", [Tensor("F", "FP32", (1, 2), b"\0" * 3)])
    none = InferRequest("identity", [Tensor("F", "FP32", (1, 2), None)])  # type: ignore[arg-type]  # what a bug may do
    strings = InferRequest("identity", [Tensor("S", "BYTES", (70, 1), b"\xff" * 280)])
    with pytest.raises(TypeError):
        bench.enqueue(none)
    good = bench.singles(4)
    broken = [bench.enqueue(ragged), bench.enqueue(strings, 70)]
    expect_rows(await asyncio.gather(*good))
    for future in broken:
        with pytest.raises((TensorShapeMismatch, BackendFailed)):
            await future
    await bench.is_well()


async def test_a_fault_of_ours_fails_one_batch_and_frees_its_permit(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """An error nobody thought of is typed for the callers, told in full in the log, and leaves nothing behind."""
    boom = [True]

    def fail(request: InferRequest) -> None:
        if boom:
            raise ZeroDivisionError("secret rows")

    bench.model.fault = fail
    with caplog.at_level(logging.ERROR, logger="serve_app.batching.dispatcher"):
        answers = await asyncio.gather(*bench.singles(3), return_exceptions=True)
    assert [type(answer) for answer in answers] == [BackendFailed] * 3
    assert "ZeroDivisionError" in str(answers[0])
    assert "secret" not in str(answers[0])
    assert "ZeroDivisionError: secret rows" in caplog.text
    boom.clear()
    await bench.is_well()


async def test_even_a_broken_batch_task_leaves_nobody_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If all else fails, the end of the task answers its callers and gives the permit back."""
    calls = itertools.count()

    def explode(*args: object, **kwargs: object) -> None:
        if next(calls) < 3:
            raise MemoryError

    monkeypatch.setattr("serve_app.batching.sender.Isolation.narrow", explode)
    bench.model.fault = lambda request: (_ for _ in ()).throw(BackendFailed("identity", "x"))
    answers = await asyncio.gather(*bench.singles(3), return_exceptions=True)
    assert [type(answer) for answer in answers] == [BackendFailed] * 3
    bench.model.fault = lambda request: None
    await bench.is_well()


async def test_a_call_that_is_cancelled_from_below_is_an_error_and_not_a_cancellation(bench: Bench) -> None:
    """grpc raises `CancelledError` when a channel closes; callers that did not leave must not look as if they had."""

    def fail(request: InferRequest) -> None:
        raise asyncio.CancelledError

    bench.model.fault = fail
    answers = await asyncio.gather(*bench.singles(3), return_exceptions=True)
    assert [type(answer) for answer in answers] == [EndpointUnavailable] * 3
    bench.model.fault = lambda request: None
    await bench.is_well()


async def test_who_leaves_during_an_isolation_is_not_sent_again(bench: Bench) -> None:
    """The parts of a failed batch hold only those who still wait, and the rest is right."""
    bench.model.delay = turns
    futures = [*bench.singles(15), bench.enqueue(request_of(F=np.array([[POISON, 0]], np.float32)))]
    await until(lambda: len(bench.model.calls) == 2)
    for future in futures[8:12]:
        future.cancel()
    answers = await asyncio.gather(*futures, return_exceptions=True)
    expect_rows(answers, but=range(8, 16))
    assert [type(answer) for answer in answers[8:]] == [asyncio.CancelledError] * 4 + [
        InferResponse,
        InferResponse,
        InferResponse,
        BackendFailed,
    ]
    assert [call.num_rows for call in bench.model.calls] == [16, 8, 4, 2, 2, 1, 1]
    await turns()
    await bench.is_well()
