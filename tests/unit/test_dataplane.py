"""What the data plane settles before a runner sees a request: budgets, and which names are one model."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from serve_app.clock import MAX_TIMEOUT_S, Deadline, ManualClock
from serve_app.dataplane import DataPlane, Message, budget_s
from serve_app.errors import InvalidRequest, ModelNotFound
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec
from serve_app.settings import ModelServerConfig, ModelSettings


class Triton:
    """A Triton that takes whatever begins with a number for a version, as the real one does."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def model_metadata(self, name: str, version: str = "", *, timeout_s: float) -> Message:
        self.num_calls += 1
        return service_pb2.ModelMetadataResponse(name=name, versions=["1"])

    async def model_config(self, name: str, version: str = "", *, timeout_s: float) -> Message:
        return service_pb2.ModelConfigResponse(config=model_config_pb2.ModelConfig(name=name))

    async def is_model_ready(self, name: str, version: str = "", *, timeout_s: float) -> bool:
        return True


class Runner:
    """A runner that notes what it is given."""

    def __init__(self) -> None:
        self.deadlines: list[Deadline | None] = []

    async def infer(self, request: InferRequest, deadline: Deadline | None = None) -> InferResponse:
        self.deadlines.append(deadline)
        return InferResponse(request.model_name, [])


class Plane:
    """A data plane over these."""

    def __init__(self) -> None:
        self.triton, self.runner = Triton(), Runner()
        triton: Any = self.triton  # as much of it as these tests ask
        self.plane = DataPlane(triton, self._open, config=ModelServerConfig(), clock=ManualClock())

    def _open(self, spec: ModelSpec, settings: ModelSettings) -> Any:
        return self.runner


async def test_a_budget_without_end_is_one_that_every_clock_can_tell() -> None:
    """Infinity and huge numbers overflow gRPC's and Triton's own; they mean no limit, and get a week."""
    front = Plane()
    for timeout_s in (math.inf, 1e300, 1e12):
        await front.plane.infer(InferRequest("m", []), timeout_s=timeout_s)
    assert front.runner.deadlines == [Deadline(MAX_TIMEOUT_S, MAX_TIMEOUT_S)] * 3


async def test_a_budget_that_is_no_number_is_refused() -> None:
    """NaN sorts nowhere: in a heap of timers it would hold up everyone's deadline."""
    front = Plane()
    with pytest.raises(InvalidRequest, match="timeout_s: got nan"):
        await front.plane.infer(InferRequest("m", []), timeout_s=math.nan)
    assert front.runner.deadlines == []


@pytest.mark.parametrize("version", ["01", "+1", " 1", "1x", "-1", "0", "\u00b2", "x", "9" * 19])
async def test_a_version_has_one_name(version: str) -> None:
    """Other spellings of a number are unknown versions, or a client could open runners without end."""
    front = Plane()
    with pytest.raises(ModelNotFound):
        await front.plane.infer(InferRequest("m", [], model_version=version))
    with pytest.raises(ModelNotFound):
        await front.plane.model_metadata("m", version)
    assert not await front.plane.is_model_ready("m", version)
    assert front.triton.num_calls == 0


@pytest.mark.parametrize(
    ("own_us", "timeout_s", "expected_s"),
    [(300_000, None, 0.3), (300_000, 5.0, 0.3), (5_000_000, 0.3, 0.3), (0, 0.3, 0.3), (0, None, None), ("1", 2.0, 2.0)],
)
def test_the_budget_is_the_shorter_of_two(own_us: int | str, timeout_s: float | None, expected_s: float | None) -> None:
    """Of what the caller says and of the request's `timeout`, in microseconds, which does not stay among parameters."""
    request = InferRequest("m", [], parameters={"timeout": own_us, "custom": 1})
    assert budget_s(request, timeout_s) == expected_s
    assert request.parameters == {"custom": 1}
    assert budget_s(InferRequest("m", []), timeout_s) == timeout_s


@pytest.mark.parametrize("name", ["m\0", "m\0x", "m\n", "\x7fm", "../m", "a/m", ".", "..", "m" * 256, "é" * 128])
async def test_a_name_that_no_folder_has_is_unknown(name: str) -> None:
    """Triton cuts names at a NUL, so that one model would have many, and never answers some loads with a line break."""
    front = Plane()
    with pytest.raises(ModelNotFound):
        await front.plane.infer(InferRequest(name, []))
    with pytest.raises(ModelNotFound):
        await front.plane.model_config(name)
    with pytest.raises(ModelNotFound):
        await front.plane.control.load_model(service_pb2.RepositoryModelLoadRequest(model_name=name))
    assert not await front.plane.is_model_ready(name)
    assert front.triton.num_calls == 0
