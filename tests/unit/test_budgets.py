"""Budgets and cancellations from the data plane down to the server: what it is told, what is never sent, what ends."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from serve_app.errors import DeadlineExceeded
from serve_app.protocol.messages import InferRequest, InferResponse
from serve_app.protocol.tensor import Tensor
from serve_app.settings import BatchingMode, BatchingSettings, ModelSettings
from serve_app.triton.fake import FakeModel
from tests.support.front import Front, running_front

ONE_AT_A_TIME = ModelSettings(batching=BatchingSettings(mode=BatchingMode.CONTINUOUS, max_batches_in_flight=1))


def ask(front: Front, value: float, *, timeout_s: float = 20.0) -> asyncio.Task[InferResponse]:
    tensor = Tensor.from_numpy("INPUT0", np.full((1, 4), value, np.float32))
    return asyncio.ensure_future(front.plane.infer(InferRequest("identity", [tensor]), timeout_s=timeout_s))


def value_of(response: InferResponse) -> float:
    return float(response.outputs[0].to_numpy()[0, 0])


async def test_the_last_caller_to_leave_cancels_the_call() -> None:
    """Sole caller gone: the server hears of it. One of a batch gone: the others get their rows."""
    async with running_front(settings=ONE_AT_A_TIME) as front:
        await ask(front, 0.0)
        front.fake.freeze()
        alone = ask(front, 1.0)
        await front.fake.wait_for_active(1)
        batch = [ask(front, float(value)) for value in range(2, 6)]
        await asyncio.sleep(0)
        alone.cancel()
        await front.fake.wait_until(lambda: front.fake.num_cancelled == 1)
        await front.fake.wait_until(lambda: front.fake.rows[-1] == 4)
        batch[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch[1]
        front.fake.thaw()
        assert [value_of(await batch[index]) for index in (0, 2, 3)] == [2.0, 4.0, 5.0]
        assert front.fake.num_cancelled == 1


async def test_500_cancelled_callers_leave_nothing_running() -> None:
    """Cancelled at random moments, in queues, batches and calls: calls on the server end, and all is well."""
    rng = random.Random(28)
    async with running_front(FakeModel(latency_s=0.02), settings=ONE_AT_A_TIME) as front:
        await ask(front, 0.0)
        calls = []
        for value in range(500):
            calls.append(ask(front, float(value)))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.004)
            rng.choice(calls).cancel()
        for call in calls:
            if rng.random() < 0.8:
                call.cancel()
        for value, result in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
            assert isinstance(result, asyncio.CancelledError) or value_of(result) == value  # type: ignore[arg-type]  # else an error
        await front.fake.wait_for_active(0)
        assert [value_of(await ask(front, float(value))) for value in range(20)] == list(range(20))


async def test_time_in_the_queue_is_taken_off_what_triton_is_told() -> None:
    """Triton's `timeout` is what is left of the one budget when the call sets out."""
    async with running_front(FakeModel(latency_s=0.3), settings=ONE_AT_A_TIME) as front:
        await ask(front, 0.0)
        first = ask(front, 1.0, timeout_s=20.0)
        await front.fake.wait_for_active(1)
        second = ask(front, 2.0, timeout_s=20.0)
        await asyncio.gather(first, second)
        call = front.fake.calls[-1]
        assert 5_000_000 < float(call.parameters["timeout"]) < 19_800_000
        assert call.timeout_s is not None
        assert call.timeout_s < 20.0, "gRPC rounds it up to whole seconds on its way"


async def test_what_expires_in_the_queue_is_never_sent() -> None:
    """The call that is under way ends at its own time; those whose budget ran out behind it cost the server nothing."""
    async with running_front(settings=ONE_AT_A_TIME) as front:
        await ask(front, 0.0)
        front.fake.freeze()
        running = ask(front, 1.0)
        await front.fake.wait_for_active(1)
        late = [ask(front, 2.0, timeout_s=0.05) for _ in range(5)]
        for result in await asyncio.gather(*late, return_exceptions=True):
            assert isinstance(result, DeadlineExceeded)
        with pytest.raises(DeadlineExceeded):
            await ask(front, 3.0, timeout_s=0.0)
        front.fake.thaw()
        assert value_of(await running) == 1.0
        assert value_of(await ask(front, 4.0)) == 4.0
        assert len(front.fake.calls) == 3
