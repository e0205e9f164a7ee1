"""Who goes first, who makes room for whom, and who is told at once that it would wait in vain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.batching.dispatcher import Dispatcher
from serve_app.batching.service_time import ServiceTime
from serve_app.clock import Deadline, ManualClock
from serve_app.errors import BackendFailed, Overloaded
from serve_app.protocol.messages import InferRequest, InferResponse
from serve_app.settings import QueueSettings
from tests.support.identity_model import IdentityModel, floats, request_of, settings_of, spec_of, until

BREAKS = 77.0
"""A first value on which the model fails."""


class Bench:
    """A dispatcher with one permit for batches of one row, and its model."""

    def __init__(self, **queue: Any) -> None:
        self.clock = ManualClock()
        self.model = IdentityModel(max_rows=4)
        self.sent: list[float] = []
        self.model.fault = self._on_call
        self.dispatcher = Dispatcher(
            spec_of(max_batch_size=4),
            settings_of(queue=QueueSettings(**queue), max_batches_in_flight=1),
            send=self.model.infer,
            num_endpoints=lambda: 1,
            clock=self.clock,
        )

    def _on_call(self, request: InferRequest) -> None:
        self.sent.append(float(request.inputs[0].to_numpy().flat[0]))
        if self.sent[-1] == BREAKS:
            raise RuntimeError("gone")

    def ask(
        self, value: float, *, priority: int | None = None, rows: int = 4, timeout_s: float = 30.0
    ) -> asyncio.Future[InferResponse]:
        request = request_of(F=floats(rows, first=value))
        if priority is not None:
            request.parameters["priority"] = priority
        return self.dispatcher.enqueue(request, rows, Deadline.after(timeout_s, now=self.clock.now()))

    async def occupy(self) -> asyncio.Future[InferResponse]:
        """Take the permit."""
        self.model.hold()
        future = self.ask(0.0)
        await until(lambda: self.model.num_running == 1)
        return future

    async def learn(self, duration_s: float) -> None:
        """Let batches take so long for once."""

        async def pass_time() -> None:
            self.clock.advance(duration_s)

        self.model.delay = pass_time
        await asyncio.gather(self.ask(0.0), self.ask(1.0))
        self.model.delay = None


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    bench = Bench(**getattr(request, "param", {}))
    yield bench
    bench.model.release()
    await bench.dispatcher.aclose(drain_s=1.0)


async def test_higher_priorities_go_first(bench: Bench) -> None:
    """1 before the default before 20, whatever came first; none and 0 are the default; equals as they came."""
    first = await bench.occupy()
    waiting = [
        bench.ask(10.0, priority=20),
        bench.ask(20.0),
        bench.ask(30.0, priority=0),
        bench.ask(40.0, priority=10),
        bench.ask(50.0, priority=1),
    ]
    bench.model.release()
    await asyncio.gather(first, *waiting)
    assert bench.sent == [0.0, 50.0, 20.0, 30.0, 40.0, 10.0]


@pytest.mark.parametrize("bench", [{"max_requests": 3}], indirect=True)
async def test_the_newest_of_the_least_urgent_makes_room(bench: Bench) -> None:
    """In a full queue something more urgent takes that place, and the displaced caller is told so and when to retry."""
    first = await bench.occupy()
    low = [bench.ask(10.0, priority=20), bench.ask(20.0, priority=20)]
    plain = bench.ask(30.0)
    urgent = bench.ask(40.0, priority=1)
    with pytest.raises(Overloaded, match="higher priority"):
        await low[1]
    with pytest.raises(Overloaded, match="limit of 3"):
        bench.ask(50.0, priority=20)
    bench.model.release()
    await asyncio.gather(first, low[0], plain, urgent)
    assert bench.sent == [0.0, 40.0, 30.0, 10.0]
    assert bench.dispatcher.statistics().counters.num_refused == 2


@pytest.mark.parametrize("bench", [{"max_rows": 8}], indirect=True)
async def test_nobody_leaves_in_vain(bench: Bench) -> None:
    """Where all that is less urgent would not make enough room, nobody loses its place."""
    first = await bench.occupy()
    low, plain = bench.ask(10.0, rows=2, priority=20), bench.ask(20.0, rows=4)
    with pytest.raises(Overloaded, match="limit of 8"):
        bench.ask(30.0, rows=8)
    assert not low.done()
    bench.model.release()
    await asyncio.gather(first, low, plain)


async def test_what_cannot_be_done_in_time_is_refused_at_once(bench: Bench) -> None:
    """One batch of a second has just begun and three are before it: a budget of 2 s is refused, one of 10 s is not."""
    await bench.learn(1.0)
    waiting = [await bench.occupy(), bench.ask(1.0), bench.ask(2.0), bench.ask(3.0)]
    with pytest.raises(
        Overloaded, match=r"12 rows go first, which takes about 5 s, and it may wait 1\.82 s"
    ) as refused:
        bench.ask(4.0, timeout_s=2.0)
    assert refused.value.retry_after_s == pytest.approx(5.0 - 2.0 / 1.1)
    waiting += [bench.ask(5.0, timeout_s=10.0), bench.ask(6.0, priority=1, timeout_s=2.0)]
    bench.model.release()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("bench", [{"max_wait_s": 1.5}], indirect=True)
async def test_the_settings_bound_the_wait(bench: Bench) -> None:
    """With `max_wait_s` the queue is as long as can be served in that time, and not longer."""
    await bench.learn(1.0)
    waiting = [await bench.occupy(), bench.ask(1.0)]
    with pytest.raises(Overloaded, match=r"it may wait 1\.5 s"):
        bench.ask(2.0)
    bench.model.release()
    await asyncio.gather(*waiting)


async def test_an_idle_model_refuses_nobody(bench: Bench) -> None:
    """However long batches took, a request with nothing before it is sent."""
    await bench.learn(25.0)
    await bench.ask(1.0, timeout_s=1.0)
    first = await bench.occupy()
    second = bench.ask(2.0, timeout_s=1.0)
    bench.model.release()
    await asyncio.gather(first, second)


async def test_failures_teach_nothing(bench: Bench) -> None:
    """A batch that ended in an error after a long time does not make the model look slow."""
    await bench.learn(1.0)
    bench.model.hold()
    failing = bench.ask(BREAKS)
    await until(lambda: bench.model.num_running == 1)
    bench.clock.advance(29.0)
    bench.model.release()
    with pytest.raises(BackendFailed):
        await failing
    waiting = [await bench.occupy(), bench.ask(1.0), bench.ask(2.0, timeout_s=3.5)]
    bench.model.release()
    await asyncio.gather(*waiting)


async def test_who_has_too_little_time_left_makes_way(bench: Bench) -> None:
    """A batch takes a second: what has less left is refused rather than sent, for it would only keep others from it."""
    await bench.learn(1.0)
    first = await bench.occupy()
    late = [bench.ask(value, timeout_s=3.5) for value in (1.0,)]
    late.append(bench.ask(2.0, rows=2, timeout_s=5.0))
    good = bench.ask(3.0, timeout_s=20.0)
    bench.clock.advance(3.0)
    bench.model.release()
    await first
    with pytest.raises(Overloaded, match=r"an answer takes 1 s, and 0\.5 s of its budget are left"):
        await late[0]
    await asyncio.gather(late[1], good)
    assert bench.sent == [0.0, 1.0, 0.0, 2.0, 3.0]
    counters = bench.dispatcher.statistics().counters
    assert (counters.num_refused, counters.num_expired) == (1, 0)


async def test_who_is_alone_is_sent_with_little_time_left(bench: Bench) -> None:
    """Where nobody else waits it costs nobody anything, and the model may have become quicker."""
    await bench.learn(1.0)
    first = await bench.occupy()
    late = bench.ask(1.0, timeout_s=3.5)
    bench.clock.advance(3.0)
    bench.model.release()
    await asyncio.gather(first, late)


async def test_what_was_given_up_has_taken_long(bench: Bench) -> None:
    """Batches that nobody waits for any more count: else only quick ones would, and a slow model would look quick."""
    await bench.learn(1.0)
    for _ in range(10):
        bench.model.hold()
        given_up = bench.ask(1.0)
        await until(lambda: bench.model.num_running == 1)
        bench.clock.advance(10.0)
        given_up.cancel()
        await until(lambda: bench.dispatcher.is_idle)
    first, second = await bench.occupy(), bench.ask(2.0)
    with pytest.raises(Overloaded, match="which takes about"):
        bench.ask(3.0, timeout_s=8.0)  # with batches of a second that would have been time enough
    bench.model.release()
    await asyncio.gather(first, second)


def test_service_time_counts_whole_batches() -> None:
    """A request that waits for seven of eight rows is in the next batch, and one that waits for eight is not."""
    time = ServiceTime()
    assert (time.shortest_s, time.wait_s(8, num_permits=1, max_batch_rows=8)) == (0.0, 0.0)
    time.add(8, 1.0, was_pressed=True)
    waits = [time.wait_s(ahead, num_permits=2, max_batch_rows=8) for ahead in (0, 7, 8, 16)]
    assert waits == [1.5, 1.5, 2.0, 2.5]
    time.note_longer(0.5)
    assert time.shortest_s == 1.0
    time.add(8, 0.5, was_pressed=True)
    assert time.shortest_s == 0.5


def test_service_time_follows_faster_to_the_better() -> None:
    """After ten batches a trouble that is over is nearly forgotten; one slow batch is hardly noticed."""
    time = ServiceTime()
    for _ in range(20):
        time.add(8, 1.0, was_pressed=True)
    time.add(8, 2.0, was_pressed=True)
    assert time.wait_s(0, num_permits=1, max_batch_rows=8) == pytest.approx(2 * 1.1)
    for _ in range(10):
        time.add(8, 0.01, was_pressed=True)
    assert time.wait_s(80, num_permits=2, max_batch_rows=8) < 0.3


def test_an_idle_model_teaches_little_about_a_busy_one() -> None:
    """One quick batch with nothing behind it does not promise that a full queue is served as quickly."""
    time = ServiceTime()
    for _ in range(20):
        time.add(8, 0.2, was_pressed=True)
    time.add(1, 0.1, was_pressed=False)
    assert time.wait_s(0, num_permits=1, max_batch_rows=8) == pytest.approx(2 * 0.19)
