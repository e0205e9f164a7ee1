"""An in-process `send` whose model answers each input with itself, slowly, wrongly or not at all as the test asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serve_app.errors import BackendFailed
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec, RequestedOutput, TensorSpec
from serve_app.protocol.tensor import Tensor
from serve_app.settings import BatchingSettings, ModelSettings, QueueSettings

POISON = -666.0
"""A first element that makes the model fail the whole batch it is in."""


def spec_of(
    *,
    max_batch_size: int = 8,
    num_instances: int = 1,
    is_decoupled: bool = False,
    is_sequence: bool = False,
) -> ModelSpec:
    """A model with three optional inputs of different datatypes, each answered as `OUT_<name>`."""
    rank = (-1, -1) if max_batch_size else (-1,)
    datatypes = {"F": "FP32", "I": "INT64", "S": "BYTES"}
    return ModelSpec(
        name="identity",
        version="1",
        versions=("1",),
        platform="python",
        inputs={name: TensorSpec(name, datatype, rank, is_optional=True) for name, datatype in datatypes.items()},
        outputs={f"OUT_{name}": TensorSpec(f"OUT_{name}", datatype, rank) for name, datatype in datatypes.items()},
        max_batch_size=max_batch_size,
        num_instances=num_instances,
        is_decoupled=is_decoupled,
        is_sequence=is_sequence,
    )


def settings_of(*, queue: QueueSettings | None = None, timeout_s: float = 30.0, **batching: Any) -> ModelSettings:
    """Model settings with these batching settings."""
    return ModelSettings(
        batching=BatchingSettings.model_validate(batching), queue=queue or QueueSettings(), timeout_s=timeout_s
    )


def floats(rows: int, *, first: float = 0.0, width: int = 2) -> npt.NDArray[np.float32]:
    """Rows of consecutive numbers, so that each is like no other."""
    return np.arange(first, first + rows * width, dtype=np.float32).reshape(rows, width)


def request_of(*, outputs: tuple[str, ...] = (), request_id: str = "", **arrays: npt.ArrayLike) -> InferRequest:
    """A request with these arrays as inputs."""
    return InferRequest(
        "identity",
        [Tensor.from_numpy(name, array) for name, array in arrays.items()],
        id=request_id,
        outputs=[RequestedOutput(name) for name in outputs],
    )


@dataclass
class Call:
    """One ModelInfer as the model saw it."""

    num_rows: int
    size_bytes: int
    timeout_s: float
    names: tuple[str, ...]
    request_id: str


class IdentityModel:
    """`model.infer` is a `send`.

    Attributes:
        calls: All calls so far.
        num_running: Calls under way.
        most_running: Most calls that were under way at once.
        num_cancelled: Calls that were cancelled.
        delay: Awaited in each call.
        fault: Called with each request before it is answered; may raise.
        lie: Changes the answer.
    """

    def __init__(self, *, max_rows: int = 8) -> None:
        self._max_rows = max_rows
        self._is_open = asyncio.Event()
        self._is_open.set()
        self.calls: list[Call] = []
        self.num_running = self.most_running = self.num_cancelled = 0
        self.delay: Callable[[], Awaitable[None]] | None = None
        self.fault: Callable[[InferRequest], None] = fail_on_poison
        self.lie: Callable[[InferResponse], InferResponse] = lambda response: response

    def hold(self) -> None:
        """Let calls in and none out."""
        self._is_open.clear()

    def release(self) -> None:
        """Let all calls out."""
        self._is_open.set()

    async def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Answer every input with itself."""
        rows = request.inputs[0].shape[0]
        names = tuple(sorted(tensor.name for tensor in request.inputs))
        self.calls.append(Call(rows, request.size_bytes, timeout_s, names, request.id))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self._is_open.wait()
            if self.delay is not None:
                await self.delay()
            if rows > self._max_rows:
                raise BackendFailed("identity", f"{rows} rows are above max_batch_size {self._max_rows}")
            self.fault(request)
            return self.lie(self._answer(request))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    def _answer(self, request: InferRequest) -> InferResponse:
        wanted = [output.name for output in request.outputs]
        outputs = [
            Tensor(f"OUT_{tensor.name}", tensor.datatype, tensor.shape, bytes(tensor.data))
            for tensor in request.inputs
            if not wanted or f"OUT_{tensor.name}" in wanted
        ]
        return InferResponse("identity", outputs, "1", request.id)


def fail_on_poison(request: InferRequest) -> None:
    """Fail the whole batch if one of its rows begins with `POISON`."""
    for tensor in request.inputs:
        if tensor.datatype == "FP32" and (tensor.to_numpy() == POISON).any():
            raise BackendFailed("identity", "the model raised ValueError")


async def until(condition: Callable[[], bool], *, turns: int = 10_000) -> None:
    """Let the loop turn until a condition holds."""
    for _ in range(turns):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition did not come true")


async def turns(count: int = 10) -> None:
    """Let the loop turn so many times."""
    for _ in range(count):
        await asyncio.sleep(0)
