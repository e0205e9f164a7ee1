"""The table of models in service follows Triton, and its users never see it change under them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from serve_app.clock import Deadline, ManualClock
from serve_app.errors import DeadlineExceeded, ModelNotFound, NoEndpoint, PoolClosed
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec
from serve_app.served_models import ServedModels
from serve_app.settings import ModelSettings

SPEC = ModelSpec("m", "", ("1",), "onnxruntime_onnx", {}, {}, max_batch_size=8)
KEY = ("m", "")


class CountingRunner:
    """A runner that only knows whether it was closed."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.is_closed = False
        self.has_drained = asyncio.Event()
        self.has_drained.set()

    async def infer(self, request: InferRequest, deadline: Deadline | None = None) -> InferResponse:
        return InferResponse(request.model_name, [])

    async def stream(
        self, request: InferRequest, deadline: Deadline | None = None
    ) -> AsyncGenerator[InferResponse, None]:
        yield InferResponse(request.model_name, [])

    is_pressed = False

    def check_more(self, deadline: Deadline | None = None, *, priority: int) -> None: ...

    def reconfigure(self, settings: ModelSettings) -> None: ...

    def wake(self) -> None: ...

    async def aclose(self) -> None:
        await self.has_drained.wait()
        self.is_closed = True

    def statistics(self) -> None: ...


class Triton:
    """What Triton says of models: a spec, or an error, after a gate."""

    def __init__(self) -> None:
        self.answer: ModelSpec | Exception = SPEC
        self.num_calls = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def read_spec(self, name: str, version: str) -> ModelSpec:
        self.num_calls += 1
        await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Table:
    """A table with the runners that it opened."""

    def __init__(self) -> None:
        self.triton = Triton()
        self.clock = ManualClock()
        self.runners: list[CountingRunner] = []
        self.models = ServedModels(self.triton.read_spec, self._open, clock=self.clock, refresh_s=2.0)

    def _open(self, spec: ModelSpec) -> CountingRunner:
        runner = CountingRunner(spec)
        self.runners.append(runner)
        return runner

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_those_who_wait_for_a_model_share_one_opening() -> None:
    """A hundred first requests ask Triton once; one that leaves does not stop the others."""
    table = Table()
    table.triton.gate.clear()
    waiting = [asyncio.create_task(table.models.get(KEY)) for _ in range(100)]
    await table.settle()
    waiting[0].cancel()
    await table.settle()
    table.triton.gate.set()
    served = await asyncio.gather(*waiting[1:])
    assert table.triton.num_calls == 1
    assert {id(one.runner) for one in served} == {id(table.runners[0])}
    assert len(table.runners) == 1


async def test_opening_takes_no_longer_than_a_request_has() -> None:
    """A request whose budget ends while Triton is silent hears so; who has more time still gets the model."""
    table = Table()
    table.triton.gate.clear()
    patient = asyncio.create_task(table.models.get(KEY))
    with pytest.raises(DeadlineExceeded, match=r"deadline of 0\.01 s exceeded while asking Triton for model 'm'"):
        await table.models.get(KEY, Deadline.after(0.01, now=table.clock.now()))
    table.triton.gate.set()
    assert (await patient).spec == SPEC
    assert table.triton.num_calls == 1


async def test_an_unknown_model_is_asked_for_anew() -> None:
    """A failure is nobody's memory: the model may be loaded a moment later."""
    table = Table()
    table.triton.answer = ModelNotFound("m")
    with pytest.raises(ModelNotFound):
        await table.models.get(KEY)
    table.triton.answer = SPEC
    assert (await table.models.get(KEY)).spec == SPEC


async def test_a_changed_model_gets_a_new_runner_and_the_old_one_is_closed() -> None:
    """The change is noticed in the background; the request that notices it is not kept waiting."""
    table = Table()
    await table.models.get(KEY)
    table.triton.answer = replace(SPEC, max_batch_size=16)
    table.clock.advance(3.0)
    assert (await table.models.get(KEY)).spec == SPEC
    await table.settle()
    assert (await table.models.get(KEY)).spec.max_batch_size == 16
    assert [runner.is_closed for runner in table.runners] == [True, False]


async def test_an_unchanged_model_keeps_its_runner() -> None:
    """Looking again is not replacing."""
    table = Table()
    await table.models.get(KEY)
    table.clock.advance(3.0)
    await table.models.get(KEY)
    await table.settle()
    assert table.triton.num_calls == 2
    assert len(table.runners) == 1


async def test_a_fresh_spec_is_not_compared() -> None:
    """Triton is not asked for every request."""
    table = Table()
    for _ in range(100):
        await table.models.get(KEY)
    assert table.triton.num_calls == 1


async def test_a_model_that_has_gone_is_dropped() -> None:
    """Its next request hears that it is unknown."""
    table = Table()
    await table.models.get(KEY)
    table.triton.answer = ModelNotFound("m")
    table.clock.advance(3.0)
    await table.models.get(KEY)
    await table.settle()
    with pytest.raises(ModelNotFound):
        await table.models.get(KEY)
    assert table.runners[0].is_closed


async def test_with_nobody_to_ask_the_old_spec_stays() -> None:
    """An outage of Triton does not take models out of service."""
    table = Table()
    await table.models.get(KEY)
    table.triton.answer = NoEndpoint("model 'm'", "no server")
    table.clock.advance(3.0)
    await table.models.get(KEY)
    await table.settle()
    assert (await table.models.get(KEY)).runner is table.runners[0]
    assert not table.runners[0].is_closed


async def test_closing_waits_for_a_runner_that_was_replaced() -> None:
    """What the old runner has accepted is finished before Triton's channels are closed below it."""
    table = Table()
    await table.models.get(KEY)
    table.runners[0].has_drained.clear()
    table.triton.answer = replace(SPEC, max_batch_size=16)
    table.clock.advance(3.0)
    await table.models.get(KEY)
    await table.settle()
    assert len(table.runners) == 2
    closing = asyncio.create_task(table.models.aclose())
    await table.settle()
    assert not closing.done()
    table.runners[0].has_drained.set()
    await closing
    assert [runner.is_closed for runner in table.runners] == [True, True]


async def test_closing_ends_openings_and_runners() -> None:
    """Whoever waits gets a typed error, every runner is closed, nothing new is opened."""
    table = Table()
    await table.models.get(KEY)
    table.triton.gate.clear()
    waiting = asyncio.create_task(table.models.get(("other", "")))
    await table.settle()
    await table.models.aclose()
    assert table.runners[0].is_closed
    with pytest.raises(PoolClosed):
        await waiting
    with pytest.raises(PoolClosed):
        await table.models.get(KEY)
