"""The dispatcher: permits, order, bounds, deadlines, settings and the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from serve_app.batching.dispatcher import Dispatcher
from serve_app.clock import Deadline, ManualClock
from serve_app.errors import DeadlineExceeded, Overloaded, PoolClosed, RequestTooLarge, Unavailable
from serve_app.protocol.messages import InferRequest, InferResponse
from serve_app.settings import QueueSettings
from tests.support.identity_model import IdentityModel, floats, request_of, settings_of, spec_of, turns, until

IDLE = "<Dispatcher identity Requests: 0 queued, 0 in flight | Batches: 0 of 2 permits>"


class Bench:
    """A dispatcher, its model, its clock and its endpoints."""

    def __init__(self, *, max_batch_size: int = 8, queue: QueueSettings | None = None, **batching: Any) -> None:
        self.clock = ManualClock()
        self.model = IdentityModel(max_rows=max(max_batch_size, 1))
        self.num_endpoints = 1
        self.dispatcher = Dispatcher(
            spec_of(max_batch_size=max_batch_size),
            settings_of(queue=queue, **batching),
            send=self.model.infer,
            num_endpoints=lambda: self.num_endpoints,
            clock=self.clock,
        )

    def enqueue(self, request: InferRequest, rows: int, timeout_s: float = 30.0) -> asyncio.Future[InferResponse]:
        return self.dispatcher.enqueue(request, rows, Deadline.after(timeout_s, now=self.clock.now()))

    def rows(self, count: int = 1, *, first: float = 0.0, timeout_s: float = 30.0) -> asyncio.Future[InferResponse]:
        """Queue so many rows of consecutive numbers."""
        return self.enqueue(request_of(F=floats(count, first=first)), count, timeout_s)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.model.release()
    await bench.dispatcher.aclose(drain_s=1.0)


def array(response: InferResponse, index: int = 0) -> npt.NDArray[Any]:
    return response.outputs[index].to_numpy()


async def test_one_request_is_answered(bench: Bench) -> None:
    """A request alone goes at once, as it is, with its budget; who has its answer finds the dispatcher idle."""
    response = await bench.rows(2, first=7)
    np.testing.assert_array_equal(array(response), floats(2, first=7))
    assert [(call.num_rows, call.timeout_s) for call in bench.model.calls] == [(2, 30.0)]
    assert repr(bench.dispatcher) == IDLE


async def test_what_arrives_in_one_turn_shares_a_batch(bench: Bench) -> None:
    """Eight requests of one turn are one ModelInfer, and each gets its own row."""
    answers = await asyncio.gather(*[bench.rows(first=10.0 * index) for index in range(8)])
    assert [call.num_rows for call in bench.model.calls] == [8]
    for index, answer in enumerate(answers):
        np.testing.assert_array_equal(array(answer), floats(1, first=10.0 * index))


async def test_a_batch_is_closed_only_when_there_is_a_permit(bench: Bench) -> None:
    """What waits for a permit keeps growing into one batch, up to the bound."""
    bench.model.hold()
    first = [bench.rows(), bench.rows()]
    await until(lambda: bench.model.num_running == 1)
    second = [bench.rows()]
    await until(lambda: bench.model.num_running == 2)
    later = []
    for _ in range(5):
        later += [bench.rows(2)]
        await turns(3)
    assert repr(bench.dispatcher) == ("<Dispatcher identity Requests: 5 queued, 3 in flight | Batches: 2 of 2 permits>")
    bench.model.release()
    await asyncio.gather(*first, *second, *later)
    assert [call.num_rows for call in bench.model.calls] == [2, 1, 8, 2]
    assert bench.model.most_running == 2
    assert bench.dispatcher.statistics().mean_rows_per_batch == 13 / 4


async def test_permits_grow_with_the_endpoints(bench: Bench) -> None:
    """Each endpoint adds its permits; `wake` uses new ones at once; none leaves those of one."""
    bench.model.hold()
    answers = []
    for _ in range(6):
        answers.append(bench.rows(8))
    await until(lambda: bench.model.num_running == 2)
    bench.num_endpoints = 2
    bench.dispatcher.wake()
    await until(lambda: bench.model.num_running == 4)
    bench.num_endpoints = 0
    bench.dispatcher.wake()
    await turns()
    assert bench.model.num_running == 4
    assert bench.dispatcher.statistics().num_permits == 2
    bench.model.release()
    await asyncio.gather(*answers)


async def test_oversize_requests_are_split_and_rejoined_in_order() -> None:
    """A mix of 1, 3, 7 and 40 rows with a bound of 8: no ModelInfer is larger, all answers are whole and in order."""
    bench = Bench(max_batches_in_flight=3)
    counts = [1, 3, 7, 40, 1, 40, 3, 17]
    arrays = [floats(count, first=1000.0 * index) for index, count in enumerate(counts)]
    bench.model.delay = turns
    futures = [bench.enqueue(request_of(F=array), len(array)) for array in arrays]
    for future, expected in zip(futures, arrays, strict=True):
        np.testing.assert_array_equal(array(await future), expected)
    assert max(call.num_rows for call in bench.model.calls) == 8
    assert sum(call.num_rows for call in bench.model.calls) == sum(counts)
    assert bench.model.most_running == 3, "parts of one request are under way at the same time"


async def test_parts_that_come_back_out_of_order_are_joined_in_order() -> None:
    """The order of the answer is the order of the rows, not of the parts' return."""
    bench = Bench(max_batches_in_flight=5)
    gates = [asyncio.Event() for _ in range(5)]
    unused = iter(gates)

    async def wait_for_own_gate() -> None:
        await next(unused).wait()

    bench.model.delay = wait_for_own_gate
    future = bench.rows(40)
    await until(lambda: bench.model.num_running == 5)
    for gate in reversed(gates):
        gate.set()
        await turns(3)
    np.testing.assert_array_equal(array(await future), floats(40))


async def test_bytes_bound_a_batch() -> None:
    """A ModelInfer stays within `max_batch_bytes` unless it is a single row."""
    bench = Bench(max_batch_bytes=64)
    small = [bench.enqueue(request_of(F=floats(1, width=6)), 1) for _ in range(4)]
    large = bench.enqueue(request_of(F=floats(3, width=10)), 3)
    huge = bench.enqueue(request_of(F=floats(1, width=50)), 1)
    await asyncio.gather(*small, large, huge)
    assert [(call.num_rows, call.size_bytes) for call in bench.model.calls] == [
        (2, 48),
        (2, 48),
        (1, 40),
        (1, 40),
        (1, 40),
        (1, 200),
    ]
    np.testing.assert_array_equal(array(await large), floats(3, width=10))


async def test_requests_that_must_not_be_mixed_are_not(bench: Bench) -> None:
    """Other inner shapes, datatypes and outputs go in other batches, the oldest first, and all are right."""
    bench.model.hold()
    blockers = [bench.rows(8), bench.rows(8)]
    await until(lambda: bench.model.num_running == 2)
    mixed = [
        (request_of(F=floats(1, width=5)), [floats(1, width=5)]),
        (request_of(F=floats(1, width=9)), [floats(1, width=9)]),
        (request_of(I=np.array([[4]])), [np.array([[4]])]),
        (request_of(F=floats(1, width=5, first=9)), [floats(1, width=5, first=9)]),
        (request_of(F=floats(1, width=5), S=[["a"]], outputs=("OUT_S",)), [np.array([[b"a"]], dtype=object)]),
        (request_of(F=floats(1, width=9, first=9)), [floats(1, width=9, first=9)]),
    ]
    futures = [bench.enqueue(request, 1) for request, _ in mixed]
    assert bench.dispatcher.statistics().num_waiting_signatures == 4
    bench.model.release()
    await asyncio.gather(*blockers)
    for future, (_, expected) in zip(futures, mixed, strict=True):
        outputs = (await future).outputs
        assert len(outputs) == len(expected)
        for output, want in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(output.to_numpy(), want)
    assert [call.num_rows for call in bench.model.calls[2:]] == [2, 2, 1, 1]


async def test_no_signature_starves_another(bench: Bench) -> None:
    """A rare shape waits no longer than its turn, however many requests of a common shape keep coming."""
    bench.model.hold()
    common = [bench.rows(8) for _ in range(6)]
    rare = bench.enqueue(request_of(F=floats(1, width=9)), 1)
    common += [bench.rows(8) for _ in range(6)]
    bench.model.release()
    await asyncio.gather(rare, *common)
    assert [call.num_rows for call in bench.model.calls].index(1) == 6


async def test_rows_of_no_bytes_are_rows(bench: Bench) -> None:
    """Tensors of shape [n, 0] and requests of no rows are merged and taken apart like any other."""
    shapes = [(2, 0), (1, 0), (0, 0)]
    futures = [bench.enqueue(request_of(F=np.zeros(shape, np.float32)), shape[0]) for shape in shapes]
    assert [array(await future).shape for future in futures] == shapes
    assert [call.num_rows for call in bench.model.calls] == [3]


async def test_a_model_that_does_not_batch_gets_one_request_at_a_time() -> None:
    """Nothing is merged, many are under way, and their number is bounded."""
    bench = Bench(max_batch_size=0)
    bench.model.fault = lambda request: None
    bench.model._max_rows = 100
    bench.model.hold()
    futures = [bench.enqueue(request_of(F=floats(1, first=index)[0]), 1) for index in range(40)]
    await until(lambda: bench.model.num_running == 32)
    bench.model.release()
    for index, future in enumerate(futures):
        np.testing.assert_array_equal(array(await future), floats(1, first=index)[0])
    assert bench.model.most_running == 32
    assert len(bench.model.calls) == 40


async def test_batches_are_under_way_at_once() -> None:
    """Eight batches with four permits take two rounds, not eight."""
    bench = Bench(max_batches_in_flight=4)
    bench.model.hold()
    futures = [bench.rows(8) for _ in range(8)]
    await until(lambda: bench.model.num_running == 4)
    bench.model.release()
    await asyncio.gather(*futures)
    assert bench.model.most_running == 4


async def test_waits_are_fair_among_a_thousand_callers(bench: Bench) -> None:
    """With steady service nobody waits longer than about twice the mean: first come, first served."""
    waits: list[int] = []

    async def caller() -> None:
        for _ in range(5):
            sent = len(bench.model.calls)
            await bench.rows()
            waits.append(len(bench.model.calls) - sent)

    await asyncio.gather(*[caller() for _ in range(1000)])
    assert max(waits) <= 2 * sum(waits) / len(waits) + 2


# --- bounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        (QueueSettings(max_requests=2), "2 requests are waiting, 1 more are above the limit of 2"),
        (QueueSettings(max_rows=17), "16 rows are waiting, 8 more are above the limit of 17"),
        (QueueSettings(max_bytes=130), "128 bytes are waiting, 64 more are above the limit of 130"),
    ],
)
async def test_a_full_queue_refuses(queue: QueueSettings, message: str) -> None:
    """Beyond a bound a caller is told at once which, and when to come back; those accepted are served."""
    bench = Bench(queue=queue)
    bench.model.hold()
    running = []
    for _ in range(2):
        running.append(bench.rows(8))
        await turns(3)
    waiting = [bench.rows(8), bench.rows(8)]
    with pytest.raises(Overloaded, match=message) as caught:
        bench.rows(8)
    assert caught.value.retry_after_s == 1.0, "nothing is known of the speed yet"
    assert bench.dispatcher.statistics().counters.num_refused == 1
    bench.model.release()
    await asyncio.gather(*running, *waiting)
    await bench.rows(8)


async def test_a_burst_in_one_turn_is_refused_only_when_the_permits_are_taken() -> None:
    """The bound is on what waits for a permit: a burst that the permits can take is taken."""
    bench = Bench(queue=QueueSettings(max_requests=8))
    bench.model.hold()
    futures = [bench.rows() for _ in range(8 + 8 + 8)]
    with pytest.raises(Overloaded, match="8 requests are waiting"):
        bench.rows()
    bench.model.release()
    await asyncio.gather(*futures)
    assert [call.num_rows for call in bench.model.calls] == [8, 8, 8]


async def test_a_refused_caller_is_told_when_to_come_back() -> None:
    """The time is what waits over what was answered per second lately."""
    bench = Bench(queue=QueueSettings(max_rows=80))
    for _ in range(400):  # 8 rows every 0.1 s
        await bench.rows(8)
        bench.clock.advance(0.1)
    bench.model.hold()
    futures = []
    for _ in range(12):
        futures.append(bench.rows(8))
        await turns(3)
    with pytest.raises(Overloaded) as caught:
        bench.rows(8)
    assert caught.value.retry_after_s == pytest.approx(1.0, rel=0.05)
    bench.model.release()
    await asyncio.gather(*futures)


async def test_what_can_never_fit_is_too_large_rather_than_too_early() -> None:
    """Nobody is told to come back with a request that no empty queue would take."""
    bench = Bench(queue=QueueSettings(max_rows=10, max_bytes=100))
    with pytest.raises(RequestTooLarge, match="11 rows, the limit is 10 rows"):
        bench.rows(11)
    with pytest.raises(RequestTooLarge, match="200 bytes, the limit is 100 bytes"):
        bench.enqueue(request_of(F=floats(1, width=50)), 1)


# --- deadlines ------------------------------------------------------------------------------------------------


async def test_a_request_expires_in_the_queue(bench: Bench) -> None:
    """A request whose deadline comes while it waits gets its error, and no model ever sees it."""
    bench.model.hold()
    running = [bench.rows(8), bench.rows(8)]
    await turns()
    short, long = bench.rows(timeout_s=0.5), bench.rows(timeout_s=5.0)
    bench.clock.advance(0.5)
    bench.dispatcher.wake()
    with pytest.raises(DeadlineExceeded, match=r"0\.5 s exceeded while waiting for a batch"):
        await short
    bench.model.release()
    await asyncio.gather(*running, long)
    assert [call.num_rows for call in bench.model.calls] == [8, 8, 1]
    assert bench.dispatcher.statistics().counters.num_expired == 1
    assert repr(bench.dispatcher) == IDLE


async def test_a_short_deadline_fails_only_its_own_request(bench: Bench) -> None:
    """A batch is sent with the longest of its budgets; who has less expires alone, and the others are answered."""
    bench.model.hold()
    short, long = bench.rows(timeout_s=0.5), bench.rows(first=5, timeout_s=5.0)
    await until(lambda: bench.model.num_running == 1)
    assert bench.model.calls[0].timeout_s == 5.0
    bench.clock.advance(1.0)
    bench.dispatcher.wake()
    with pytest.raises(DeadlineExceeded, match=r"0\.5 s exceeded while waiting for the model's answer"):
        await short
    bench.model.release()
    np.testing.assert_array_equal(array(await long), floats(1, first=5))


async def test_a_batch_whose_last_request_expires_is_cancelled(bench: Bench) -> None:
    """A call that answers nobody any more is given up, and its permit is free again."""
    bench.model.hold()
    with pytest.raises(DeadlineExceeded):
        await bench_expired(bench)
    await until(lambda: bench.model.num_cancelled == 1)
    await until(lambda: repr(bench.dispatcher) == IDLE)


def bench_expired(bench: Bench) -> asyncio.Future[InferResponse]:
    future = bench.rows(timeout_s=0.5)
    loop = asyncio.get_running_loop()

    def expire() -> None:
        bench.clock.advance(1.0)
        bench.dispatcher.wake()

    loop.call_soon(lambda: loop.call_soon(expire))
    return future


async def test_a_budget_that_is_spent_is_refused_at_once(bench: Bench) -> None:
    """What cannot be in time takes nobody's place."""
    with pytest.raises(DeadlineExceeded):
        bench.rows(timeout_s=0.0)
    assert repr(bench.dispatcher) == IDLE


async def test_deadlines_come_by_themselves() -> None:
    """One loop timer serves all deadlines, a later shorter one too, with nobody waking the dispatcher."""
    loop = asyncio.get_running_loop()

    class LoopClock:
        def now(self) -> float:
            return loop.time()

    model = IdentityModel()
    model.hold()
    dispatcher = Dispatcher(spec_of(), settings_of(), send=model.infer, num_endpoints=lambda: 1, clock=LoopClock())
    futures = [
        dispatcher.enqueue(request_of(F=floats(1)), 1, Deadline.after(timeout_s, now=loop.time()))
        for timeout_s in (30.0, 0.03, 0.01, 0.02)
    ]
    order: list[int] = []
    for index, future in enumerate(futures):
        future.add_done_callback(lambda _, index=index: order.append(index))  # type: ignore[misc]  # a default in a lambda
    await asyncio.wait([futures[index] for index in (1, 2, 3)], timeout=5.0)
    assert all(isinstance(futures[index].exception(), DeadlineExceeded) for index in (1, 2, 3))
    assert order == [2, 3, 1]
    model.release()
    await futures[0]
    await dispatcher.aclose()


# --- settings -------------------------------------------------------------------------------------------------


async def test_settings_change_for_the_next_batch_and_nothing_is_lost(bench: Bench) -> None:
    """New bounds hold for what waits; what is under way is untouched; every request is answered."""
    bench.model.hold()
    futures = [bench.rows(2, first=100.0 * index) for index in range(20)]
    await until(lambda: bench.model.num_running == 2)
    bench.dispatcher.reconfigure(settings_of(max_batch_rows=3, max_batches_in_flight=4))
    await until(lambda: bench.model.num_running == 4)
    bench.model.release()
    await asyncio.gather(*futures[:10])
    bench.dispatcher.reconfigure(settings_of(mode="off"))
    for index, future in enumerate(futures):
        np.testing.assert_array_equal(array(await future), floats(2, first=100.0 * index))
    assert [call.num_rows for call in bench.model.calls] == [8, 8] + [2] * 12


async def test_requests_that_waited_unmerged_are_merged_after_the_switch() -> None:
    """Switching from `off` to merging mixes nothing that must not be mixed."""
    bench = Bench(mode="off", max_batches_in_flight=1)
    bench.model.hold()
    futures = [bench.rows(), *[bench.enqueue(request_of(F=floats(1, width=2 + index % 2)), 1) for index in range(8)]]
    await turns()
    bench.dispatcher.reconfigure(settings_of(max_batches_in_flight=1))
    bench.model.release()
    await asyncio.gather(*futures)
    assert [call.num_rows for call in bench.model.calls] == [1, 4, 4]


# --- the end --------------------------------------------------------------------------------------------------


async def test_closing_answers_what_was_accepted(bench: Bench) -> None:
    """`aclose` refuses new requests and finishes those it has."""
    bench.model.hold()
    futures = [bench.rows(8) for _ in range(4)]
    await turns()
    closing = asyncio.ensure_future(bench.dispatcher.aclose())
    await turns()
    with pytest.raises(PoolClosed, match="dispatcher of model 'identity' is closed"):
        bench.rows()
    assert not closing.done()
    bench.model.release()
    await closing
    assert [future.done() and future.exception() for future in futures] == [None] * 4
    assert repr(bench.dispatcher) == IDLE


async def test_closing_gives_up_what_does_not_end(bench: Bench) -> None:
    """After its bound `aclose` cancels the calls and tells every caller; nothing is left."""
    bench.model.hold()
    futures = [bench.rows(8) for _ in range(4)]
    await turns()
    await bench.dispatcher.aclose(drain_s=0.0)
    for future in futures:
        with pytest.raises(Unavailable, match="shutting down"):
            await future
    assert bench.model.num_cancelled == 2
    assert repr(bench.dispatcher) == IDLE
    await bench.dispatcher.aclose()


async def test_closing_goes_on_when_its_caller_leaves(bench: Bench) -> None:
    """A cancelled `aclose` closes all the same."""
    bench.model.hold()
    future = bench.rows()
    await turns()
    closing = asyncio.ensure_future(bench.dispatcher.aclose())
    await turns()
    closing.cancel()
    bench.model.release()
    await future
    await bench.dispatcher.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_closing_an_idle_dispatcher_is_immediate() -> None:
    """`async with` around nothing leaves nothing."""
    async with Bench().dispatcher as dispatcher:
        pass
    with pytest.raises(PoolClosed):
        dispatcher.enqueue(request_of(F=floats(1)), 1, Deadline(9.0, 9.0))
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- what it tells of itself ----------------------------------------------------------------------------------


async def test_statistics_tell_the_truth(bench: Bench) -> None:
    """Gauges equal what a frozen model holds and what waits, a cut request included."""
    bench.model.hold()
    futures = [bench.rows(8), bench.rows(20), bench.rows(1)]
    await until(lambda: bench.model.num_running == 2)
    statistics = bench.dispatcher.statistics()
    assert (statistics.num_waiting_requests, statistics.num_waiting_rows, statistics.num_waiting_bytes) == (2, 13, 104)
    assert (statistics.num_requests_in_flight, statistics.num_batches_in_flight) == (1, 2)
    assert repr(futures[1]) == "<Item 2 identity 20 rows, 8 sent in 1 batches>"
    bench.model.release()
    await asyncio.gather(*futures)
    statistics = bench.dispatcher.statistics()
    assert (statistics.num_waiting_requests, statistics.num_waiting_rows, statistics.num_waiting_bytes) == (0, 0, 0)
    assert (statistics.counters.num_answered, statistics.counters.num_rows_sent) == (3, 29)


async def test_a_queue_that_stands_still_shows(bench: Bench) -> None:
    """Seconds without a batch are counted while something waits, and only then."""
    bench.clock.advance(100.0)
    assert bench.dispatcher.statistics().stalled_s == 0.0
    gate = asyncio.Semaphore(0)

    async def pass_gate() -> None:
        await gate.acquire()

    bench.model.delay = pass_gate
    futures = [bench.rows(8) for _ in range(4)]
    assert bench.dispatcher.statistics().stalled_s == 0.0, "they have only come"
    await turns()
    bench.clock.advance(7.0)
    assert bench.dispatcher.statistics().stalled_s == 7.0
    gate.release()
    await futures[0]
    await turns()
    bench.clock.advance(2.0)
    assert bench.dispatcher.statistics().stalled_s == 2.0, "since the last batch was sent"
    for _ in range(3):
        gate.release()
    await asyncio.gather(*futures)
    assert bench.dispatcher.statistics().stalled_s == 0.0
