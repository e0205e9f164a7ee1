"""The one place where HTTP, gRPC and handles meet: what can be asked of a replica, in internal terms.

Each ingress decodes to these calls and encodes what they return; none of them knows another. What lies below (the
router to Triton, the runners) is reached through protocols, so that this file needs neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from serve_app.admission import Admission
from serve_app.auth.principal import is_visible
from serve_app.batching.replica_load import ReplicaLoadStatistics
from serve_app.clock import Clock, Deadline
from serve_app.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, PoolClosed, ServeAppError, Unavailable
from serve_app.fleet_control import ChangeLog, FleetCalls, FleetControl
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec
from serve_app.protocol.model_spec import model_spec_from
from serve_app.served_models import Runner, ServedModels
from serve_app.settings import ModelServerConfig, ModelSettings
from serve_app.shared_memory import RegionLog, SharedMemory

Message = Any
"""A protobuf message of Triton's `GRPCInferenceService`."""


class TritonCalls(FleetCalls, Protocol):
    """What the data plane asks of Triton, whichever server answers. `triton.Router` is one."""

    @property
    def num_endpoints(self) -> int:
        """Endpoints that can be asked now."""
        ...

    async def model_metadata(self, name: str, version: str = "", *, timeout_s: float) -> Message:
        """`ModelMetadataResponse`."""
        ...

    async def model_config(self, name: str, version: str = "", *, timeout_s: float) -> Message:
        """`ModelConfigResponse`."""
        ...

    async def is_model_ready(self, name: str, version: str = "", *, timeout_s: float) -> bool:
        """Whether some server has the model loaded."""
        ...

    async def is_ready(self, *, timeout_s: float) -> bool:
        """Whether some server is ready."""
        ...

    async def repository_index(self, *, is_ready: bool = False, timeout_s: float) -> list[Message]:
        """`RepositoryIndexResponse.ModelIndex` entries."""
        ...


READY_TIMEOUT_S = 0.9
"""For a server to say whether it is ready. One that hangs says nothing, and a probe asks for the server and then for
its models: so what it hears is true, and comes within two seconds."""


class ControlLog(ChangeLog, RegionLog, Protocol):
    """Where what clients have loaded, unloaded and registered is kept."""


# No model's, since models are folders. Triton cuts a name at a NUL and answers for the model of that name, so that one
# model would have names without end; a load with files whose name has a line break it never answers; and its errors
# that name what is very long are too large for gRPC, which then looks like overload.
_NO_NAME = re.compile(r"[\x00-\x1f\x7f/]|\A\.\.?\Z")
_MAX_NAME_BYTES, _MAX_VERSION_DIGITS = 255, 18

OpenRunner = Callable[[ModelSpec, ModelSettings], Runner]


class PlaneState(Enum):
    """Life of a data plane."""

    OPEN = "open"
    CLOSED = "closed"


@dataclass(slots=True)
class PlaneStatistics:
    """Counts of one data plane.

    Attributes:
        num_running: Requests under way now.
        num_done: Requests answered.
        num_failed: Requests that ended with an error of ours.
        num_cancelled: Requests whose caller went away.
        models: Each runner's own counts, by `name` or `name/version`.
        load: What is held against the bounds of the replica.
    """

    num_running: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    models: dict[str, Any] = field(default_factory=dict)
    load: ReplicaLoadStatistics = field(default_factory=lambda: ReplicaLoadStatistics(0, 0, 0))


class DataPlane:
    """All models of one replica; `async with`.

    Args:
        triton: How Triton is asked; borrowed, the caller closes it after the plane.
        open_runner: Makes a runner for a model; the plane closes what it made.
        config: Settings of the models.
        models: Names that are served; empty means all.
        clock: The clock deadlines are on.
        control_timeout_s: Budget of a metadata, config or readiness call.
        change_log: Where loads, unloads and registrations by clients are kept for servers that join later.
        allow_client_shm: Whether clients may have Triton map shared memory.

    Attributes:
        control: What concerns all servers together: statistics, loads and unloads, trace and log settings.
        shared_memory: What clients have Triton map.
        admission: Asked by every way in about each inference request before it is worked on.
    """

    def __init__(
        self,
        triton: TritonCalls,
        open_runner: OpenRunner,
        *,
        config: ModelServerConfig,
        models: Collection[str] = (),
        clock: Clock,
        control_timeout_s: float = 5.0,
        change_log: ControlLog | None = None,
        allow_client_shm: bool = False,
    ) -> None:
        self._triton = triton
        self._open_runner = open_runner
        self._config = config
        self._names = frozenset(models)
        self._clock = clock
        self._control_timeout_s = control_timeout_s
        self._state = PlaneState.OPEN
        self._models = ServedModels(self._read_spec, self._open, clock=clock)
        self.control = FleetControl(
            triton,
            check_name=self._check_name,
            is_served=self._is_served,
            on_change=self._models.refresh,
            log=change_log,
            timeout_s=control_timeout_s,
        )
        self.shared_memory = SharedMemory(
            triton,
            is_allowed=allow_client_shm,
            finish=self.control.finish,
            log=change_log,
            timeout_s=control_timeout_s,
        )
        self.admission = Admission(self._models.runner_of, config=config, clock=clock)
        self._statistics = PlaneStatistics()

    async def __aenter__(self) -> DataPlane:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # --- inference ----------------------------------------------------------------------------------------

    async def infer(self, request: InferRequest, *, timeout_s: float | None = None) -> InferResponse:
        """Run one request, batched with others where the model allows it.

        If the caller is cancelled its rows are withdrawn; requests that share a batch with it are unharmed.

        Args:
            request: Borrowed until this returns.
            timeout_s: Whole budget in seconds; the request's `timeout` parameter (microseconds) if that is less; the
                model's `timeout_s` setting when there is neither.

        Raises:
            ServeAppError: See `errors`; each is raised for this request alone.
        """
        statistics = self._statistics
        statistics.num_running += 1
        try:
            response = await self._infer(request, self._deadline(budget_s(request, timeout_s)))
            statistics.num_done += 1
            return response
        except asyncio.CancelledError:
            statistics.num_cancelled += 1
            raise
        except ServeAppError:
            statistics.num_failed += 1
            raise
        finally:
            statistics.num_running -= 1

    async def _infer(self, request: InferRequest, deadline: Deadline | None) -> InferResponse:
        self.admission.put_in_lane(request)
        if request.regions:
            request.place = self.shared_memory.place_of(request)
        key = (request.model_name, request.model_version)
        served = await self._models.get(key, deadline)
        try:
            return await served.runner.infer(request, deadline)
        except PoolClosed:
            # The model changed in Triton between the look-up and the call; its new runner takes the request.
            if self._state is PlaneState.CLOSED:
                raise
            served = await self._models.get(key, deadline)
            return await served.runner.infer(request, deadline)

    async def stream(
        self, request: InferRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[InferResponse, None]:
        """Run one request and give every response of the model: one, or with a decoupled model any number.

        Closing the generator, or cancelling who waits in it, cancels the model's work; iterate it inside
        `contextlib.aclosing`.

        Args:
            request: Borrowed until this ends.
            timeout_s: Whole budget in seconds; the request's `timeout` parameter (microseconds) if that is less.
                When there is neither, each response has the model's `timeout_s` setting.

        Yields:
            Each response; see `ModelRunner.stream`.

        Raises:
            ServeAppError: See `errors`.
        """
        statistics = self._statistics
        statistics.num_running += 1
        try:
            deadline = self._deadline(budget_s(request, timeout_s))
            async with contextlib.aclosing(self._stream(request, deadline)) as responses:
                async for response in responses:
                    yield response
            statistics.num_done += 1
        except (asyncio.CancelledError, GeneratorExit):
            statistics.num_cancelled += 1
            raise
        except ServeAppError:
            statistics.num_failed += 1
            raise
        finally:
            statistics.num_running -= 1

    async def _stream(self, request: InferRequest, deadline: Deadline | None) -> AsyncGenerator[InferResponse, None]:
        self.admission.put_in_lane(request)
        if request.regions:
            request.place = self.shared_memory.place_of(request)
        key, has_begun, is_second = (request.model_name, request.model_version), False, False
        while True:
            served = await self._models.get(key, deadline)
            try:
                async with contextlib.aclosing(served.runner.stream(request, deadline)) as responses:
                    async for response in responses:
                        has_begun = True
                        yield response
                return
            except PoolClosed:  # as in `_infer`
                if has_begun or is_second or self._state is PlaneState.CLOSED:
                    raise
                is_second = True

    # --- models -------------------------------------------------------------------------------------------

    async def model_metadata(self, name: str, version: str = "") -> Message:
        """Triton's `ModelMetadataResponse`, as it is."""
        self._check_name(name, version)
        return await self._triton.model_metadata(name, version, timeout_s=self._control_timeout_s)

    async def model_config(self, name: str, version: str = "") -> Message:
        """Triton's `ModelConfigResponse`, as it is."""
        self._check_name(name, version)
        return await self._triton.model_config(name, version, timeout_s=self._control_timeout_s)

    async def model_spec(self, name: str, version: str = "", *, timeout_s: float | None = None) -> ModelSpec:
        """What is known of a model; puts it into service if it is not yet, within `timeout_s` seconds."""
        return (await self._models.get((name, version), self._deadline(timeout_s))).spec

    async def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether at least one server has the model loaded; false for unknown models."""
        try:
            self._check_name(name, version)
            return await self._triton.is_model_ready(name, version, timeout_s=READY_TIMEOUT_S)
        except (Unavailable, ModelNotFound):
            return False

    async def check_known(self, name: str, version: str = "") -> None:
        """Tell a model that is not ready from one that is not there; says nothing where the servers do not in time.

        Raises:
            ModelNotFound: No server has it.
            Unavailable: It is not loaded, or no server can be asked.
        """
        self._check_name(name, version)
        with contextlib.suppress(DeadlineExceeded):
            await self._triton.model_metadata(name, version, timeout_s=READY_TIMEOUT_S)

    async def repository_index(self, *, is_ready_only: bool = False) -> list[Message]:
        """Triton's `RepositoryIndexResponse.ModelIndex` entries of the models that are served here and the caller's."""
        index = await self._triton.repository_index(is_ready=is_ready_only, timeout_s=self._control_timeout_s)
        return [entry for entry in index if self._is_served(entry.name) and is_visible(entry.name)]

    async def refresh(self, name: str) -> None:
        """Look at once at a model that was loaded or unloaded by somebody else."""
        await self._models.refresh(name)

    # --- server -------------------------------------------------------------------------------------------

    def is_live(self) -> bool:
        """Whether this replica takes requests at all."""
        return self._state is PlaneState.OPEN

    async def is_ready(self) -> bool:
        """Whether a request would be answered now: a server is ready, and so is every model named in the settings."""
        if self._state is PlaneState.CLOSED or self._triton.num_endpoints == 0:
            return False
        try:
            if not await self._triton.is_ready(timeout_s=READY_TIMEOUT_S):
                return False
        except Unavailable:
            return False
        return all(await asyncio.gather(*(self.is_model_ready(name) for name in self._names)))

    # --- life ---------------------------------------------------------------------------------------------

    @property
    def config(self) -> ModelServerConfig:
        """The settings in force."""
        return self._config

    def reconfigure(self, config: ModelServerConfig) -> None:
        """Put new settings in force for every model, from the next batch on; nothing under way is lost."""
        self._config = config
        self.admission.reconfigure(config)
        for _, served in self._models:
            served.runner.reconfigure(config.for_model(served.spec.name))

    def wake(self) -> None:
        """Let every model look again at how many servers there are; called when they have come or gone."""
        for _, served in self._models:
            served.runner.wake()

    async def aclose(self) -> None:
        """Refuse new requests, let runners finish what they hold (each within its own bound), and close them."""
        if self._state is PlaneState.OPEN:
            self._state = PlaneState.CLOSED
            await self.control.aclose()
            await self._models.aclose()

    def statistics(self) -> PlaneStatistics:
        """A copy of the counts, with each runner's own under `models`."""
        now = self._statistics
        models = {"/".join(filter(None, key)): served.runner.statistics() for key, served in self._models}
        load = self.admission.load.statistics()
        return PlaneStatistics(now.num_running, now.num_done, now.num_failed, now.num_cancelled, models, load)

    def __repr__(self) -> str:
        return f"<DataPlane [{self._state.value}] Requests: {self._statistics.num_running} running | {self._models!r}>"

    # --- inside -------------------------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> Deadline | None:
        if timeout_s is None:
            return None
        if math.isnan(timeout_s):  # neither before nor after any other, it would confuse everyone's timers
            raise InvalidRequest("timeout_s", "nan", "a number of seconds")
        return Deadline.after(timeout_s, now=self._clock.now())

    def _is_served(self, name: str) -> bool:
        return not self._names or name in self._names

    def _check_name(self, name: str, version: str) -> None:
        # Triton takes whatever begins with a number for a version (`01`, `+1`, `1x`), so that one version would have
        # names without end, and each of them a runner of its own here.
        is_canonical = version.isascii() and version.isdigit() and version[0] != "0"
        is_canonical = is_canonical and len(version) <= _MAX_VERSION_DIGITS
        is_name = len(name.encode(errors="replace")) <= _MAX_NAME_BYTES and not _NO_NAME.search(name)
        if not is_name or not self._is_served(name) or (version and not is_canonical):
            raise ModelNotFound(name, version)

    async def _read_spec(self, name: str, version: str) -> ModelSpec:
        self._check_name(name, version)
        metadata, response = await asyncio.gather(
            self._triton.model_metadata(name, version, timeout_s=self._control_timeout_s),
            self._triton.model_config(name, version, timeout_s=self._control_timeout_s),
        )
        return model_spec_from(metadata, response.config, version=version)

    def _open(self, spec: ModelSpec) -> Runner:
        return self._open_runner(spec, self._config.for_model(spec.name))


def budget_s(request: InferRequest, timeout_s: float | None) -> float | None:
    """What a request may take in all, in seconds: what its caller says, or its `timeout` parameter if that is less.

    The parameter is taken out: what is left of the budget goes to Triton in its place, and requests with different
    budgets can share a batch. As in Triton, 0 is none.
    """
    own_us = request.parameters.pop("timeout", 0)
    if not own_us or isinstance(own_us, str):
        return timeout_s
    own_s = own_us / 1e6
    return own_s if timeout_s is None else min(own_s, timeout_s)
