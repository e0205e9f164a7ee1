"""Callers that leave: in the queue, in the hand-over turn, in the call, in the turn of the answer, during close."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import AsyncIterator

import numpy as np
import pytest

from serve_app.batching.dispatcher import Dispatcher
from serve_app.clock import Deadline, ManualClock
from serve_app.protocol.messages import InferResponse
from tests.support.identity_model import IdentityModel, floats, request_of, settings_of, spec_of, turns, until


class Bench:
    """A dispatcher whose model answers when it is let."""

    def __init__(self) -> None:
        self.model = IdentityModel()
        self.clock = ManualClock()
        self.dispatcher = Dispatcher(
            spec_of(), settings_of(), send=self.model.infer, num_endpoints=lambda: 1, clock=self.clock
        )

    def rows(self, count: int = 1, *, first: float = 0.0) -> asyncio.Future[InferResponse]:
        return self.dispatcher.enqueue(
            request_of(F=floats(count, first=first)), count, Deadline.after(30.0, now=self.clock.now())
        )

    def one_each(self, count: int) -> list[asyncio.Future[InferResponse]]:
        return [self.rows(first=10.0 * index) for index in range(count)]

    async def is_well(self) -> None:
        """Nothing is left, and 100 plain requests succeed."""
        await until(lambda: self.dispatcher.is_idle)
        assert repr(self.dispatcher).endswith("Requests: 0 queued, 0 in flight | Batches: 0 of 2 permits>")
        statistics = self.dispatcher.statistics()
        assert (statistics.num_waiting_rows, statistics.num_waiting_bytes, statistics.num_waiting_signatures) == (
            0,
            0,
            0,
        )
        expect_rows(await asyncio.gather(*self.one_each(100)))


def expect_rows(responses: list[InferResponse | BaseException], *, but: int = -1) -> None:
    for index, response in enumerate(responses):
        if index != but:
            assert isinstance(response, InferResponse), response
            np.testing.assert_array_equal(response.outputs[0].to_numpy(), floats(1, first=10.0 * index))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.model.release()
    await bench.dispatcher.aclose(drain_s=1.0)


@pytest.mark.parametrize("num_turns", range(6))
@pytest.mark.parametrize("index", range(8))
async def test_cancel_each_of_a_batch_at_each_moment(bench: Bench, index: int, num_turns: int) -> None:
    """For each index i and each turn from arrival to answer: caller i leaves, every other gets its own rows."""
    futures = bench.one_each(8)
    await turns(num_turns)
    was_done = futures[index].done()
    futures[index].cancel()
    expect_rows(await asyncio.gather(*futures, return_exceptions=True), but=index)
    assert futures[index].cancelled() != was_done
    await bench.is_well()


@pytest.mark.parametrize("index", range(8))
async def test_one_of_many_leaves_during_the_call(bench: Bench, index: int) -> None:
    """The call goes on for the others."""
    bench.model.hold()
    futures = bench.one_each(8)
    await until(lambda: bench.model.num_running == 1)
    futures[index].cancel()
    bench.model.release()
    expect_rows(await asyncio.gather(*futures, return_exceptions=True), but=index)
    assert bench.model.num_cancelled == 0
    assert len(bench.model.calls) == 1


async def test_the_last_one_to_leave_cancels_the_call(bench: Bench) -> None:
    """When nobody waits for a batch any more its call is given up, and not before."""
    bench.model.hold()
    futures = bench.one_each(8)
    await until(lambda: bench.model.num_running == 1)
    for future in futures[:-1]:
        future.cancel()
    await turns()
    assert bench.model.num_cancelled == 0
    futures[-1].cancel()
    await until(lambda: bench.model.num_cancelled == 1)
    bench.model.release()
    await bench.is_well()


async def test_who_leaves_the_queue_is_never_sent(bench: Bench) -> None:
    """A withdrawn request is out of the queue in the same instant, and out of the next batch."""
    bench.model.hold()
    running = [bench.rows(8), bench.rows(8)]
    await until(lambda: bench.model.num_running == 2)
    futures = bench.one_each(8)
    for future in futures[::2]:
        assert future.cancel()
    assert bench.dispatcher.statistics().num_waiting_rows == 4
    bench.model.release()
    await asyncio.gather(*running, *futures[1::2])
    assert [call.num_rows for call in bench.model.calls] == [8, 8, 4]


async def test_a_batch_that_all_leave_before_its_first_step_gives_its_permit_back(bench: Bench) -> None:
    """A task that is cancelled before it runs runs no `finally`; the permit must not go with it."""
    for _ in range(5):
        futures = bench.one_each(8)
        await turns(1)  # the batch is closed, its task has not run
        assert "Batches: 1 of 2" in repr(bench.dispatcher)
        for future in futures:
            future.cancel()
        await turns(3)
    assert bench.model.calls == []
    await bench.is_well()


async def test_a_cut_request_that_leaves_cancels_its_parts(bench: Bench) -> None:
    """Parts in flight are cancelled, parts that wait are withdrawn, and a shared batch goes on for the others."""
    bench.model.hold()
    small = bench.rows(4)
    large = bench.rows(40)
    await until(lambda: bench.model.num_running == 2)
    large.cancel()
    await until(lambda: bench.model.num_cancelled == 1)
    assert bench.dispatcher.statistics().num_waiting_rows == 0
    bench.model.release()
    np.testing.assert_array_equal((await small).outputs[0].to_numpy(), floats(4))
    await bench.is_well()


async def test_a_waiting_task_that_is_cancelled_withdraws_its_request(bench: Bench) -> None:
    """Cancelling the caller's task is enough; nobody has to cancel the future."""
    bench.model.hold()

    async def caller() -> None:
        await bench.rows()

    task = asyncio.ensure_future(caller())
    await until(lambda: bench.model.num_running == 1)
    task.cancel()
    await until(lambda: bench.model.num_cancelled == 1)
    assert bench.dispatcher.statistics().counters.num_cancelled == 1


async def test_cancel_most_of_500_at_random_moments(bench: Bench) -> None:
    """80 % leave at random moments; the rest get their own rows; 100 plain requests succeed; nothing is left."""
    moments = random.Random(16)

    async def slow() -> None:
        await turns(moments.randrange(6))

    bench.model.delay = slow

    async def caller(index: int) -> bool:
        await turns(moments.randrange(200))
        count = moments.choice([1, 1, 1, 3, 7, 20])
        response = await bench.rows(count, first=1000.0 * index)
        np.testing.assert_array_equal(response.outputs[0].to_numpy(), floats(count, first=1000.0 * index))
        return True

    tasks = [asyncio.ensure_future(caller(index)) for index in range(500)]
    for task in moments.sample(tasks, 400):
        await turns(moments.randrange(2))
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results.count(True) >= 100
    assert all(result is True or isinstance(result, asyncio.CancelledError) for result in results)
    await bench.is_well()


async def test_callers_that_leave_during_close(bench: Bench) -> None:
    """`aclose` waits for nobody who has gone."""
    bench.model.hold()
    futures = bench.one_each(20)
    await until(lambda: bench.model.num_running == 2)
    closing = asyncio.ensure_future(bench.dispatcher.aclose())
    await turns()
    for future in futures:
        future.cancel()
    await closing
    assert repr(bench.dispatcher).endswith("Requests: 0 queued, 0 in flight | Batches: 0 of 2 permits>")
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_nothing_keeps_a_finished_request_alive(bench: Bench) -> None:
    """Answered, failed and cancelled requests are freed without the cyclic garbage collector."""
    bench.model.hold()
    gc.collect()
    gc.disable()
    try:
        futures = bench.one_each(3)
        references = [weakref.ref(future) for future in futures]
        await until(lambda: bench.model.num_running == 1)
        futures[0].cancel()
        bench.model.release()
        for future in futures[1:]:
            await future
        del future, futures
        await until(lambda: bench.dispatcher.is_idle)
        await turns()
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


async def test_deadlines_of_finished_requests_do_not_pile_up(bench: Bench) -> None:
    """Thousands of answered requests with far deadlines leave a bounded heap."""
    for _ in range(50):
        await asyncio.gather(*bench.one_each(100))
    assert len(bench.dispatcher._items) == 0
    assert bench.dispatcher._items.num_entries <= 500
