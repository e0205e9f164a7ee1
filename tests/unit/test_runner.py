"""One model on one replica: checks, paths, the seam for `@serve.batch`, and answers that are whole and one's own."""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from serve_app.batching.window import Pending, PendingState
from serve_app.clock import Clock, Deadline, ManualClock
from serve_app.errors import (
    BackendFailed,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PoolClosed,
    RequestTooLarge,
    TensorDatatypeMismatch,
    TensorNameMismatch,
    TensorShapeMismatch,
    Unavailable,
    Unsupported,
)
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec
from serve_app.protocol.tensor import Tensor
from serve_app.runner import ModelRunner
from serve_app.settings import LimitSettings, QueueSettings
from tests.support.identity_model import POISON, IdentityModel, floats, request_of, settings_of, spec_of, turns, until
from tests.support.window_collector import WindowCollector

MODES = ["serve_batch", "continuous", "off"]


class Bench:
    """A runner with its model, its clock and the collector it made."""

    collector: WindowCollector

    def __init__(
        self,
        *,
        mode: str = "serve_batch",
        spec: ModelSpec | None = None,
        queue: QueueSettings | None = None,
        timeout_s: float = 30.0,
        clock: Clock | None = None,
        **batching: Any,
    ) -> None:
        self.spec = spec or spec_of()
        self.manual = ManualClock()
        self.model = IdentityModel(max_rows=max(self.spec.max_batch_size, 1))
        self.runner = ModelRunner(
            self.spec,
            settings_of(mode=mode, queue=queue, timeout_s=timeout_s, **batching),
            send=self.model.infer,
            num_endpoints=lambda: 1,
            limits=LimitSettings(),
            clock=clock or self.manual,
            collect=self._collector,
        )

    def _collector(self, dispatch: Callable[[Any], Any]) -> WindowCollector:
        self.collector = WindowCollector(dispatch)
        return self.collector

    def start(self, request: InferRequest, timeout_s: float | None = None) -> asyncio.Task[InferResponse]:
        """Begin a request in a task of its own."""
        deadline = None if timeout_s is None else Deadline.after(timeout_s, now=self.manual.now())
        return asyncio.ensure_future(self.runner.infer(request, deadline))

    def row(self, index: int = 0, timeout_s: float | None = None) -> asyncio.Task[InferResponse]:
        return self.start(request_of(F=floats(1, first=10.0 * index)), timeout_s)

    async def busy(self) -> list[asyncio.Task[InferResponse]]:
        """Take all permits with full batches that the model holds."""
        self.model.hold()
        tasks = [self.start(request_of(F=floats(8))) for _ in range(2)]
        await until(lambda: self.model.num_running == 2)
        return tasks

    async def is_well(self, count: int = 100) -> None:
        """Nothing is left, and `count` plain requests succeed."""
        if self.spec.can_merge:
            self.collector.window_s = 0.0  # nobody ends windows by hand here
        await until(lambda: repr(self.runner).count(": 0 ") == 2)
        assert "| 0 collecting |" in repr(self.runner)
        assert "Requests: 0 queued, 0 in flight" in repr(self.runner)
        for index, response in enumerate(await asyncio.gather(*[self.row(index) for index in range(count)])):
            expect(response, F=floats(1, first=10.0 * index))


def expect(response: object, **arrays: npt.NDArray[Any]) -> None:
    """A response holds exactly these outputs."""
    assert isinstance(response, InferResponse), repr(response)
    assert {tensor.name for tensor in response.outputs} == {f"OUT_{name}" for name in arrays}
    for tensor in response.outputs:
        np.testing.assert_array_equal(tensor.to_numpy(), arrays[tensor.name[4:]])


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(window_s=0.01)
    yield bench
    bench.model.release()
    bench.collector.is_stuck = False
    bench.collector.end_window()
    await bench.runner.aclose(drain_s=1.0)


# --- the answer -----------------------------------------------------------------------------------------------


async def test_the_answer_has_the_callers_id_order_and_the_version(bench: Bench) -> None:
    """Whatever the batch looked like, each answer looks as its own request asked."""
    busy = await bench.busy()
    wanted = [("OUT_S", "OUT_F"), ("OUT_F", "OUT_S")]
    tasks = [
        bench.start(request_of(F=floats(1), S=[["x"]], outputs=outputs, request_id=f"id-{index}"))
        for index, outputs in enumerate(wanted)
    ]
    await turns()
    bench.collector.end_window()
    bench.model.release()
    responses = await asyncio.gather(*tasks)
    assert [call.num_rows for call in bench.model.calls] == [8, 8, 2]
    assert [tuple(tensor.name for tensor in response.outputs) for response in responses] == wanted
    assert [response.id for response in responses] == ["id-0", "id-1"]
    assert {response.model_version for response in responses} == {"1"}
    await asyncio.gather(*busy)


async def test_a_version_that_triton_left_out_is_filled_in() -> None:
    """The caller learns which version answered."""

    async def send(request: InferRequest, timeout_s: float) -> InferResponse:
        return InferResponse("identity", [Tensor.from_numpy("OUT_F", floats(1))])

    runner = ModelRunner(
        spec_of(),
        settings_of(),
        send=send,
        num_endpoints=lambda: 1,
        limits=LimitSettings(),
        clock=ManualClock(),
    )
    assert (await runner.infer(request_of(F=floats(1)))).model_version == "1"
    with pytest.raises(BackendFailed, match="lacks the requested output 'OUT_S'"):
        await runner.infer(request_of(F=floats(1), S=[["a"]], outputs=("OUT_S",)))


async def test_a_request_without_a_deadline_gets_the_settings_budget() -> None:
    """The budget goes along to Triton; a caller's own is kept."""
    bench = Bench(timeout_s=7.0)
    await bench.row()
    await bench.row(timeout_s=2.0)
    assert [call.timeout_s for call in bench.model.calls] == [7.0, 2.0]


async def test_a_decoupled_model_is_refused_with_what_to_do_instead() -> None:
    """A model that may answer many times has no one answer."""
    bench = Bench(spec=spec_of(is_decoupled=True))
    with pytest.raises(Unsupported, match="generate_stream"):
        await bench.runner.infer(request_of(F=floats(1)))
    assert bench.model.calls == []


@pytest.mark.parametrize("spec", [spec_of(is_sequence=True), spec_of(max_batch_size=0)], ids=["sequence", "unbatched"])
async def test_models_that_must_not_be_merged_are_not(spec: ModelSpec) -> None:
    """They go by the same path, one by one, and no collector is made for them."""
    bench = Bench(spec=spec)
    assert not hasattr(bench, "collector")
    array = floats(1) if spec.max_batch_size else floats(1)[0]
    bench.model._max_rows = 2
    for response in await asyncio.gather(*[bench.start(request_of(F=array)) for _ in range(10)]):
        expect(response, F=array)
    assert len(bench.model.calls) == 10


# --- the window -----------------------------------------------------------------------------------------------


async def test_a_request_that_finds_its_model_idle_waits_for_no_window(bench: Bench) -> None:
    """One after another, none goes through the collector, not even one that follows in the same turn."""
    for index in range(5):
        expect(await bench.runner.infer(request_of(F=floats(1, first=index))), F=floats(1, first=index))
    assert bench.collector.windows == []


async def test_requests_for_a_busy_model_gather_and_share_a_batch(bench: Bench) -> None:
    """What a window gathered is dispatched together; each caller has its own row."""
    busy = await bench.busy()
    tasks = [bench.row(index) for index in range(5)]
    await turns()
    assert "| 5 collecting |" in repr(bench.runner)
    bench.collector.end_window()
    bench.model.release()
    for index, response in enumerate(await asyncio.gather(*tasks)):
        expect(response, F=floats(1, first=10.0 * index))
    assert bench.collector.windows == [5]
    assert [call.num_rows for call in bench.model.calls] == [8, 8, 5]
    await asyncio.gather(*busy)


async def test_a_window_that_is_full_ends(bench: Bench) -> None:
    """As many requests as a batch holds rows do not wait for the window's end."""
    busy = await bench.busy()
    tasks = [bench.row(index) for index in range(8)]
    await turns()
    assert bench.collector.windows == [8]
    bench.model.release()
    await asyncio.gather(*busy, *tasks)


async def test_who_cannot_gain_does_not_wait(bench: Bench) -> None:
    """A request that fills a batch, or whose budget the window would use up, goes straight to the queue."""
    busy = await bench.busy()
    full, hasty = bench.start(request_of(F=floats(8))), bench.row(timeout_s=0.005)
    await turns()
    assert bench.runner.statistics().num_collecting == 0
    assert bench.runner.statistics().dispatcher.num_waiting_requests == 2
    bench.model.release()
    await asyncio.gather(*busy, full, hasty)


async def test_no_caller_waits_for_the_answers_of_its_window_mates(bench: Bench) -> None:
    """The window hands out futures, so a slow batch holds up only those who are in it."""
    busy = await bench.busy()
    quick, slow = bench.row(), bench.start(request_of(I=np.array([[1]])))
    await turns()
    bench.collector.end_window()
    slow_gate = asyncio.Event()
    names = iter([call.names for call in bench.model.calls])

    async def delay() -> None:
        if bench.model.calls[-1].names == ("I",) and next(names, None) is None:
            await slow_gate.wait()

    bench.model.delay = delay
    bench.model.release()
    await asyncio.gather(*busy)
    await quick
    await turns()
    slow_gate.set()
    await slow


@pytest.mark.parametrize("mode", ["continuous", "off"])
async def test_other_modes_leave_the_collector_out(mode: str) -> None:
    """`continuous` merges what waits for a permit; `off` merges nothing; neither has a window."""
    bench = Bench(mode=mode, max_batches_in_flight=2)
    busy = await bench.busy()
    tasks = [bench.row(index) for index in range(5)]
    await turns()
    assert bench.runner.statistics().dispatcher.num_waiting_requests == 5
    bench.model.release()
    for index, response in enumerate(await asyncio.gather(*tasks)):
        expect(response, F=floats(1, first=10.0 * index))
    assert [call.num_rows for call in bench.model.calls][2:] == ([5] if mode == "continuous" else [1] * 5)
    assert bench.collector.windows == []
    await asyncio.gather(*busy)


async def test_settings_change_in_place_under_load(bench: Bench) -> None:
    """Window, batch size and mode change for the next request while others wait and run; all are answered."""
    busy = await bench.busy()
    tasks = [bench.row(index) for index in range(3)]
    await turns()
    bench.runner.reconfigure(settings_of(window_s=0.5, max_batch_rows=4))
    assert (bench.collector.window_s, bench.collector.max_batch_rows) == (0.5, 4)
    tasks.append(bench.row(3))
    await turns()
    assert bench.collector.windows == [4], "the smaller window is full"
    bench.runner.reconfigure(settings_of(mode="continuous", max_batch_rows=2, timeout_s=3.0))
    tasks += [bench.row(index) for index in range(4, 8)]
    await turns()
    assert bench.collector.windows == [4]
    bench.model.release()
    for index, response in enumerate(await asyncio.gather(*tasks)):
        expect(response, F=floats(1, first=10.0 * index))
    assert [call.num_rows for call in bench.model.calls] == [8, 8, 2, 2, 2, 2]
    assert bench.runner.settings.timeout_s == 3.0
    await asyncio.gather(*busy)


async def test_what_gathers_counts_against_the_queue() -> None:
    """A window is no way around the bounds."""
    bench = Bench(window_s=0.01, queue=QueueSettings(max_requests=6, max_rows=100, max_bytes=1000))
    busy = await bench.busy()
    tasks = [bench.row(index) for index in range(6)]
    await turns()
    with pytest.raises(Overloaded, match="6 requests are waiting, 1 more are above the limit of 6"):
        await bench.row()
    with pytest.raises(RequestTooLarge, match="101 rows"):
        await bench.start(request_of(F=floats(101)))
    with pytest.raises(RequestTooLarge, match="2000 bytes"):
        await bench.start(request_of(F=floats(1, width=500)))
    bench.collector.end_window()
    bench.model.release()
    await asyncio.gather(*busy, *tasks)
    await bench.is_well(5)


async def test_who_is_refused_after_the_window_is_told_alone() -> None:
    """The queue may have filled while a window gathered; its other members are served."""
    bench = Bench(window_s=0.01, queue=QueueSettings(max_requests=3))
    busy = await bench.busy()
    tasks = [bench.row(0), bench.row(1)]
    await turns()
    full = [bench.start(request_of(F=floats(8))) for _ in range(2)]
    await turns()
    bench.collector.end_window()
    await turns()
    bench.model.release()
    expect(await tasks[0], F=floats(1))
    with pytest.raises(Overloaded):
        await tasks[1]
    await asyncio.gather(*busy, *full)


# --- callers that leave ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_turns", range(8))
@pytest.mark.parametrize("index", range(4))
async def test_cancel_each_of_a_window_at_each_moment(bench: Bench, index: int, num_turns: int) -> None:
    """In the window, in the turn it ends, in the queue, in flight: the others get their own rows."""
    busy = await bench.busy()
    tasks = [bench.row(number) for number in range(4)]
    await turns()
    if num_turns:
        bench.collector.end_window()
        bench.model.release()
        await turns(num_turns - 1)
    tasks[index].cancel()
    bench.collector.end_window()
    bench.model.release()
    for number, response in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
        if number != index:
            expect(response, F=floats(1, first=10.0 * number))
    await asyncio.gather(*busy)
    await bench.is_well()


async def test_who_leaves_the_window_is_never_sent(bench: Bench) -> None:
    """A window that everyone left sends nothing."""
    busy = await bench.busy()
    tasks = [bench.row(index) for index in range(4)]
    await turns()
    for task in tasks:
        task.cancel()
    await turns()
    bench.collector.end_window()
    bench.model.release()
    await asyncio.gather(*busy)
    await bench.is_well()
    assert bench.collector.windows[0] == 4
    assert [call.num_rows for call in bench.model.calls[:3]] == [8, 8, 8]


async def test_who_leaves_in_the_turn_its_window_ends_cancels_its_call(bench: Bench) -> None:
    """The future that nobody came to fetch is cancelled, not left to run."""
    busy = await bench.busy()
    task = bench.row()
    await turns()
    bench.collector.end_window()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.runner.statistics().dispatcher.num_waiting_requests == 0
    bench.model.release()
    await asyncio.gather(*busy)


async def test_who_leaves_in_the_turn_of_its_refusal_leaves_no_warning() -> None:
    """An error that its caller did not come to fetch is not reported as one that nobody handled."""
    bench = Bench(window_s=0.01, queue=QueueSettings(max_requests=1))
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    busy = await bench.busy()
    task = bench.row()
    await turns()
    full = bench.start(request_of(F=floats(8)))
    await turns()
    bench.collector.end_window()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    bench.model.release()
    await asyncio.gather(*busy, full)
    del task
    gc.collect()
    assert reports == []


def test_a_pending_request_tells_its_state() -> None:
    """What a collector logs of an item names model, rows and state."""
    pending = Pending(request_of(F=floats(3)), 3, Deadline(1.0, 1.0))
    assert repr(pending) == "<Pending identity 3 rows collecting>"
    pending.withdraw()
    assert pending.state is PendingState.WITHDRAWN


@pytest.mark.parametrize("mode", MODES)
async def test_cancel_most_of_500_at_random_moments(mode: str) -> None:
    """80 % leave at random moments; the rest are right; 100 plain requests succeed; nothing is left."""
    moments = random.Random(50046)
    bench = Bench(mode=mode)

    async def slow() -> None:
        await turns(moments.randrange(6))

    async def caller(index: int) -> bool:
        await turns(moments.randrange(300))
        array = floats(moments.choice([1, 1, 1, 3, 7, 20]), first=1000.0 * index)
        expect(await bench.runner.infer(request_of(F=array)), F=array)
        return True

    bench.model.delay = slow
    tasks = [asyncio.ensure_future(caller(index)) for index in range(500)]
    for task in moments.sample(tasks, 400):
        await turns(moments.randrange(2))
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results.count(True) >= 100
    assert all(result is True or isinstance(result, asyncio.CancelledError) for result in results)
    await bench.is_well()


# --- deadlines and a collector that fails ---------------------------------------------------------------------


class LoopClock:
    """The loop's own time, for the few tests in which a timer has to fire."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


async def test_a_stuck_collector_holds_no_one_beyond_the_deadline() -> None:
    """If `@serve.batch` itself hangs, its callers get their deadline, and others are served around it."""
    bench = Bench(clock=LoopClock())
    bench.collector.is_stuck = True
    busy = await bench.busy()
    with pytest.raises(DeadlineExceeded, match="waiting for a batch window"):
        await bench.runner.infer(request_of(F=floats(1)), Deadline.after(0.02, now=LoopClock().now()))
    assert bench.runner.statistics().num_collecting == 0
    bench.model.release()
    await asyncio.gather(*busy)
    expect(await bench.row(), F=floats(1))


async def test_a_task_lives_on_after_its_request_expired_in_a_window() -> None:
    """The deadline is an error like any other: the caller's task is not left half cancelled."""
    bench = Bench(clock=LoopClock())
    bench.collector.is_stuck = True
    busy = await bench.busy()

    async def caller() -> str:
        with pytest.raises(DeadlineExceeded):
            await bench.runner.infer(request_of(F=floats(1)), Deadline.after(0.01, now=LoopClock().now()))
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert getattr(task, "cancelling", lambda: 0)() == 0
        return "alive"

    assert await asyncio.ensure_future(caller()) == "alive"
    bench.model.release()
    await asyncio.gather(*busy)


async def test_a_caller_that_leaves_a_stuck_collector_is_cancelled_and_nothing_else() -> None:
    """Leaving is not mistaken for a deadline."""
    bench = Bench(clock=LoopClock())
    bench.collector.is_stuck = True
    busy = await bench.busy()
    task = bench.row(timeout_s=None)
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.runner.statistics().num_collecting == 0
    bench.model.release()
    await asyncio.gather(*busy)


async def test_a_collector_that_raises_fails_its_caller_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the seam reaches one caller and leaves no trace in the counts."""
    busy = await bench.busy()

    async def broken(item: Pending) -> asyncio.Future[InferResponse]:
        raise RuntimeError("no replica context")

    monkeypatch.setattr(bench.collector, "collect", broken)
    with pytest.raises(RuntimeError, match="no replica context"):
        await bench.row()
    monkeypatch.undo()
    bench.model.release()
    await asyncio.gather(*busy)
    await bench.is_well()


# --- nobody gets another's rows -------------------------------------------------------------------------------


def unique_request(index: int, rows: int) -> tuple[InferRequest, dict[str, npt.NDArray[Any]]]:
    """A request like no other and the arrays that must come back, in one of eight shapes, datatypes and outputs."""
    kind = index % 8
    numbers = floats(rows, first=100.0 * index, width=2 + kind % 2)
    texts = np.array([[f"{index}/{row}".encode()] for row in range(rows)], dtype=np.object_)
    integers = np.arange(rows, dtype=np.int64)[:, None] + 1000 * index
    if kind < 4:
        return request_of(F=numbers), {"F": numbers}
    if kind == 4:
        return request_of(S=texts), {"S": texts}
    if kind == 5:
        return request_of(I=integers, S=texts, outputs=("OUT_S", "OUT_I")), {"S": texts, "I": integers}
    if kind == 6:
        return request_of(S=texts, I=integers), {"S": texts, "I": integers}
    return request_of(F=numbers, I=integers, outputs=("OUT_I",)), {"I": integers}


@pytest.mark.parametrize("mode", MODES)
async def test_two_thousand_concurrent_requests_get_their_own_rows(mode: str) -> None:
    """1 to 40 rows, mixed shapes, datatypes and outputs, random latencies, at most 8 rows a ModelInfer."""
    chance = random.Random(1306)
    bench = Bench(mode=mode, max_batches_in_flight=4)

    async def slow() -> None:
        await turns(chance.randrange(8))

    async def caller(index: int) -> None:
        await turns(chance.randrange(20))
        rows = chance.choice([1, 1, 1, 2, 3, 7, 8, 40]) if index % 50 else chance.randint(1, 40)
        request, arrays = unique_request(index, rows)
        request.id = str(index)
        response = await bench.runner.infer(request)
        expect(response, **arrays)
        assert response.id == str(index)

    bench.model.delay = slow
    await asyncio.gather(*[caller(index) for index in range(2000)])
    assert max(call.num_rows for call in bench.model.calls) == 8
    assert bench.model.most_running == 4
    await bench.is_well()


REFUSED = [
    (lambda: request_of(F=floats(1)[0]), TensorShapeMismatch),
    (lambda: InferRequest("identity", [Tensor("F", "FP32", (1, 2), b"\0" * 7)]), TensorShapeMismatch),
    (lambda: request_of(F=floats(1).astype(np.float64)), TensorDatatypeMismatch),
    (lambda: request_of(G=floats(1)), TensorNameMismatch),
    (lambda: request_of(F=floats(1), I=np.array([[1], [2]])), TensorShapeMismatch),
    (lambda: request_of(F=floats(1), outputs=("OUT_Z",)), TensorNameMismatch),
    (lambda: InferRequest("identity", []), InvalidRequest),
    (lambda: request_of(F=np.array([[math.nan, 0]], np.float32)), BackendFailed),
    (lambda: request_of(F=np.array([[POISON, 0]], np.float32)), BackendFailed),
    (lambda: request_of(F=np.full((20, 2), POISON, np.float32)), BackendFailed),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("bad", "error"), REFUSED)
async def test_one_bad_request_hurts_nobody(mode: str, bad: Callable[[], InferRequest], error: type[Exception]) -> None:
    """63 good and 1 bad sent together: 63 right answers, one clear error, and few extra calls."""
    bench = Bench(mode=mode)

    def fault(request: InferRequest) -> None:
        array = request.inputs[0].to_numpy()
        if np.isnan(array).any() or (array == POISON).any():
            raise BackendFailed("identity", "refused: not a number")

    bench.model.fault = fault
    tasks = [bench.row(index) for index in range(31)]
    culprit = bench.start(bad())
    tasks += [bench.row(index) for index in range(31, 63)]
    for index, response in enumerate(await asyncio.gather(*tasks)):
        expect(response, F=floats(1, first=10.0 * index))
    with pytest.raises(error):
        await culprit
    await bench.is_well()


async def test_too_many_rows_for_a_model_that_does_not_batch_is_refused() -> None:
    """A batch dimension that the model does not have is an error of its caller, and of nobody else."""
    bench = Bench(spec=spec_of(max_batch_size=0))
    bench.model._max_rows = 2
    tasks = [bench.start(request_of(F=floats(1)[0])) for _ in range(10)]
    culprit = bench.start(request_of(F=floats(3)))
    await asyncio.gather(*tasks)
    with pytest.raises(TensorShapeMismatch):
        await culprit


# --- batches really form --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["serve_batch", "continuous"])
async def test_batches_form_under_load_and_more_load_is_never_less_throughput(mode: str) -> None:
    """At 64 in flight a ModelInfer has at least 8 rows; from 1 to 512 callers throughput only grows."""
    throughput: list[float] = []
    for concurrency in (1, 4, 16, 64, 256, 512):
        bench = Bench(mode=mode, spec=spec_of(max_batch_size=64))
        bench.model.delay = lambda: turns(20)  # a model that takes as long for 64 rows as for one
        num_requests = 10

        async def caller(bench: Bench = bench, num_requests: int = num_requests) -> None:
            for _ in range(num_requests):
                await bench.runner.infer(request_of(F=floats(1)))

        work = asyncio.gather(*[caller() for _ in range(concurrency)])
        num_turns = 0
        while not work.done():
            await asyncio.sleep(0)
            num_turns += 1
        throughput.append(concurrency * num_requests / num_turns)
        if concurrency == 64:
            assert bench.runner.statistics().dispatcher.mean_rows_per_batch >= 8
        if concurrency == 1:
            assert num_turns <= 10 * (20 + 5), "alone, nobody waits for company"
    assert all(after >= 0.9 * before for before, after in pairwise(throughput)), throughput


# --- the end --------------------------------------------------------------------------------------------------


async def test_closing_answers_what_was_accepted_wherever_it_is(bench: Bench) -> None:
    """In flight, in the queue and in the window: all are answered, and new ones are refused."""
    busy = await bench.busy()
    queued = bench.start(request_of(F=floats(8)))
    gathering = bench.row(1)
    await turns()
    closing = asyncio.ensure_future(bench.runner.aclose())
    await turns()
    with pytest.raises(PoolClosed, match="runner of model 'identity' is closed"):
        await bench.row()
    bench.model.release()
    bench.collector.end_window()
    await closing
    expect(await queued, F=floats(8))
    expect(await gathering, F=floats(1, first=10.0))
    await asyncio.gather(*busy)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert " closed | 0 collecting |" in repr(bench.runner)


async def test_closing_is_bounded() -> None:
    """Neither a hanging model nor a stuck collector keeps `aclose` beyond its bound."""
    bench = Bench()
    busy = await bench.busy()
    bench.collector.is_stuck = True
    gathering = bench.row()
    await turns()
    await bench.runner.aclose(drain_s=0.0)
    for task in busy:
        with pytest.raises(Unavailable, match="shutting down"):
            await task
    bench.collector.is_stuck = False
    bench.collector.end_window()
    with pytest.raises(PoolClosed):
        await gathering


async def test_a_runner_is_a_context_and_tells_what_it_is() -> None:
    """Made without a loop's help, closed by its block, and described in one line."""
    bench = Bench()
    async with bench.runner as runner:
        await bench.row()
        assert repr(runner) == (
            "<ModelRunner identity version 1 serve_batch open | 0 collecting | 0 streams | "
            "<Dispatcher identity Requests: 0 queued, 0 in flight | Batches: 0 of 2 permits>>"
        )
        assert runner.spec is bench.spec
        runner.wake()
        assert runner.statistics().dispatcher.counters.num_answered == 1
    with pytest.raises(PoolClosed):
        await bench.row()
