"""One client's ModelStreamInfer over a real data plane and router, with a fake Triton behind them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from serve_app.errors import ModelNotFound
from serve_app.ingress.grpc_stream import MAX_BUFFERED, MAX_OUTSTANDING, InferStream
from serve_app.triton.fake import FakeModel
from tests.support.front import Front, running_front


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    repeat = FakeModel("repeat", is_decoupled=True, num_responses=3)
    accumulate = FakeModel("accumulate", is_sequence=True)
    async with running_front(FakeModel(), repeat, accumulate) as front:
        yield front


def message(
    model: str, request_id: object, *, sequence: int | str = 0, empty_final: bool = False, datatype: str = "FP32"
) -> Any:
    pb = service_pb2.ModelInferRequest(model_name=model, id=str(request_id))
    pb.inputs.add(name="INPUT0", datatype=datatype, shape=[1, 1])
    pb.raw_input_contents.append(np.float32(0).tobytes())
    if isinstance(sequence, str):
        pb.parameters["sequence_id"].string_param = sequence
    elif sequence:
        pb.parameters["sequence_id"].int64_param = sequence
    if empty_final:
        pb.parameters["triton_enable_empty_final_response"].bool_param = True
    return pb


async def as_stream(messages: Iterable[Any], *, read: list[Any] | None = None) -> AsyncIterator[Any]:
    for pb in messages:
        if read is not None:
            read.append(pb)
        yield pb


async def ask(front: Front, *messages: Any, **options: Any) -> list[Any]:
    async with contextlib.aclosing(InferStream(front.plane, **options).answer(as_stream(messages))) as answers:
        return [answer async for answer in answers]


def summary(answers: Iterable[Any]) -> list[tuple[str, bool]]:
    """Id and finality of each response."""
    return [
        (a.infer_response.id, a.infer_response.parameters["triton_final_response"].bool_param)
        for a in answers
        if not a.error_message
    ]


async def test_a_decoupled_model_answers_many_times(front: Front) -> None:
    """Its responses in order, none of them final; an empty final one where it is asked for; the same for none."""
    assert summary(await ask(front, message("repeat", 1))) == [("1", False)] * 3
    assert summary(await ask(front, message("repeat", 1, empty_final=True))) == [("1", False)] * 3 + [("1", True)]
    front.fake.models["repeat"].num_responses = 0
    assert await ask(front, message("repeat", 1)) == []
    assert summary(await ask(front, message("repeat", 1, empty_final=True))) == [("1", True)]


async def test_other_models_answer_once_and_in_the_order_of_the_requests(front: Front) -> None:
    """Each response is final, whatever was asked; the requests went through the batching of unary calls."""
    messages = [message("identity", number, empty_final=number % 2 == 0) for number in range(20)]
    assert summary(await ask(front, *messages)) == [(f"{number}", True) for number in range(20)]
    assert front.fake.rpc_counts["ModelStreamInfer"] == 0
    assert front.fake.rpc_counts["ModelInfer"] < 20


async def test_a_slow_request_holds_up_only_what_must_wait_for_it(front: Front) -> None:
    """A decoupled model's responses overtake those of the models whose order counts."""
    front.fake.models["identity"].latency_s = 0.2
    order = summary(await ask(front, message("identity", 1), message("accumulate", 2), message("repeat", 3)))
    assert order == [("3", False)] * 3 + [("1", True), ("2", True)]


async def test_errors_are_answers_and_the_stream_goes_on(front: Front) -> None:
    """Each carries its request's id and one line; what is asked before and after is answered."""
    front.fake.models["repeat"].fail_after = 1
    answers = await ask(
        front,
        message("identity", 1),
        message("identity", 2, datatype="INT32"),
        message("nothing", 3),
        message("identity", 4, datatype="WRONG"),
        message("repeat", 5),
        message("identity", 6),
    )
    errors = {a.infer_response.id: a.error_message for a in answers if a.error_message}
    assert sorted(errors) == ["2", "3", "4", "5"]
    assert "INPUT0" in errors["2"]
    assert "nothing" in errors["3"]
    assert errors["5"] == "model 'repeat' failed: no more than 1 responses"
    assert sorted(summary(answers)) == [("1", True), ("5", False), ("6", True)]


async def test_the_first_error_ends_the_stream_where_that_is_asked_for(front: Front) -> None:
    """It is raised, and becomes the status of the call."""
    with pytest.raises(ModelNotFound):
        await ask(front, message("nothing", 1), message("identity", 2), ends_with_error=True)


@pytest.mark.parametrize("sequence", [7, "seven"])
async def test_requests_of_a_sequence_are_sent_one_after_the_other(front: Front, sequence: int | str) -> None:
    """In their order, never two at once, never in one batch; other sequences go on beside them."""
    front.fake.models["accumulate"].latency_s = 0.002
    await ask(front, *(message("accumulate", number, sequence=sequence) for number in range(10)))
    assert [call.id for call in front.fake.calls] == [f"{number}" for number in range(10)]
    assert (front.fake.max_active, front.fake.rows) == (1, [1] * 10)
    await ask(front, *(message("accumulate", number, sequence=number + 1) for number in range(4)))
    assert front.fake.max_active > 1


async def test_no_more_is_read_than_is_under_way(front: Front) -> None:
    """Beyond `MAX_OUTSTANDING` requests the client's next ones stay where they are."""
    front.fake.freeze()
    read: list[Any] = []
    stream = InferStream(front.plane)
    messages = as_stream((message("accumulate", number) for number in range(100)), read=read)

    async def run() -> list[Any]:
        async with contextlib.aclosing(stream.answer(messages)) as answers:
            return [answer async for answer in answers]

    task = asyncio.ensure_future(run())
    await front.fake.wait_until(lambda: front.fake.num_active > 0)
    for _ in range(50):
        await asyncio.sleep(0.002)
    assert len(read) == MAX_OUTSTANDING
    assert repr(stream) == f"<InferStream Requests: {MAX_OUTSTANDING} under way | Responses: 0 waiting>"
    front.fake.thaw()
    assert len(await task) == len(read) == 100


async def test_a_client_that_takes_nothing_makes_triton_wait(front: Front) -> None:
    """A few responses wait for it, the others are not asked for."""
    front.fake.models["repeat"].num_responses = 100_000
    stream = InferStream(front.plane)
    async with contextlib.aclosing(stream.answer(as_stream([message("repeat", 1)]))) as answers:
        await anext(answers)
        before = -1
        while before != front.fake.num_streamed:
            before = front.fake.num_streamed
            await asyncio.sleep(0.1)
        assert before < 100_000
        assert f"Responses: {MAX_BUFFERED} waiting" in repr(stream)


async def test_a_client_that_leaves_cancels_everything(front: Front) -> None:
    """Streams and unary requests alike; nothing stays counted."""
    front.fake.freeze()
    stream = InferStream(front.plane)
    messages = [message("repeat", 1), message("identity", 2), message("accumulate", 3)]
    task = asyncio.ensure_future(anext(stream.answer(as_stream(messages))))
    await front.fake.wait_for_active(3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await front.fake.wait_until(lambda: front.fake.num_cancelled == 3)
    assert front.plane.statistics().num_running == 0
    assert front.router.statistics().num_active == 0
