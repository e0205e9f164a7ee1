"""The one place where HTTP, gRPC and handles meet: what can be asked of a replica, in internal terms.

Each ingress decodes to these calls and encodes what they return; none of them knows another. What lies below (the
router to Triton, the runners) is reached through protocols, so that this file needs neither.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from serve_app.clock import Clock, Deadline
from serve_app.errors import ModelNotFound, PoolClosed, ServeAppError, Unavailable
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec
from serve_app.protocol.model_spec import model_spec_from
from serve_app.settings import ModelServerConfig, ModelSettings

Message = Any
"""A protobuf message of Triton's `GRPCInferenceService`."""


class TritonCalls(Protocol):
    """What the data plane asks of Triton, whichever server answers. `triton.Router` is one."""

    @property
    def num_endpoints(self) -> int: ...

    async def model_metadata(self, name: str, version: str = "", *, timeout_s: float) -> Message: ...

    async def model_config(self, name: str, version: str = "", *, timeout_s: float) -> Message: ...

    async def is_model_ready(self, name: str, version: str = "", *, timeout_s: float) -> bool: ...

    async def is_ready(self, *, timeout_s: float) -> bool: ...

    async def repository_index(self, *, is_ready: bool = False, timeout_s: float) -> list[Message]: ...


class Runner(Protocol):
    """One model served by this replica. `runner.ModelRunner` is one."""

    async def infer(self, request: InferRequest, deadline: Deadline | None = None) -> InferResponse: ...

    def reconfigure(self, settings: ModelSettings) -> None: ...

    async def aclose(self) -> None: ...

    def statistics(self) -> Any: ...


OpenRunner = Callable[[ModelSpec, ModelSettings], Runner]


class PlaneState(Enum):
    """Life of a data plane."""

    OPEN = "open"
    CLOSED = "closed"


@dataclass(slots=True)
class _Served:
    """A model in service and when its spec was last compared with Triton's."""

    spec: ModelSpec
    runner: Runner
    checked_at: float


@dataclass(slots=True)
class PlaneStatistics:
    """Counts of one data plane.

    Attributes:
        requests: Requests taken by `infer`.
        failed: Those that ended with an error of ours.
        cancelled: Those whose caller went away.
        running: Those under way now.
    """

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    running: int = 0
    models: dict[str, Any] = field(default_factory=dict)


class DataPlane:
    """All models of one replica.

    A model's runner is opened by the first request for it and closed when its spec in Triton has changed, the
    model has gone, or the plane closes. Two pieces of state: `_served` (models in service) and `_opening` (models
    being opened, one task each, shared by all who wait for it).

    Args:
        triton: How Triton is asked; borrowed, the caller closes it after the plane.
        open_runner: Makes a runner for a model; the plane closes what it made.
        config: Settings of the models.
        models: Names that are served; empty means all.
        clock: The clock deadlines are on.
        control_timeout_s: Budget of a metadata, config or readiness call.
        refresh_s: Age at which a model's spec is compared with Triton's again, in the background.
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
        refresh_s: float = 2.0,
    ) -> None:
        self._triton = triton
        self._open_runner = open_runner
        self._config = config
        self._models = frozenset(models)
        self._clock = clock
        self._control_timeout_s = control_timeout_s
        self._refresh_s = refresh_s
        self._state = PlaneState.OPEN
        self._served: dict[tuple[str, str], _Served] = {}
        self._opening: dict[tuple[str, str], asyncio.Task[Runner]] = {}
        self._background: set[asyncio.Task[None]] = set()
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
            timeout_s: Whole budget in seconds; the model's `timeout_s` setting when `None`.

        Raises:
            ServeAppError: See `errors`; each is raised for this request alone.
        """
        statistics = self._statistics
        statistics.requests += 1
        statistics.running += 1
        try:
            deadline = None if timeout_s is None else Deadline.after(timeout_s, now=self._clock.now())
            key = (request.model_name, request.model_version)
            served = self._served.get(key)
            if served is None:
                runner = await self._runner(key)
            else:
                runner = served.runner
                if self._clock.now() - served.checked_at > self._refresh_s:
                    self._refresh(key, served)
            try:
                return await runner.infer(request, deadline)
            except PoolClosed:
                # The model changed in Triton between the look-up and the call; its new runner takes the request.
                if self._state is PlaneState.CLOSED:
                    raise
                return await (await self._runner(key)).infer(request, deadline)
        except asyncio.CancelledError:
            statistics.cancelled += 1
            raise
        except ServeAppError:
            statistics.failed += 1
            raise
        finally:
            statistics.running -= 1

    # --- models -------------------------------------------------------------------------------------------

    async def model_metadata(self, name: str, version: str = "") -> Message:
        """Triton's `ModelMetadataResponse`, as it is."""
        self._check_served(name, version)
        return await self._triton.model_metadata(name, version, timeout_s=self._control_timeout_s)

    async def model_config(self, name: str, version: str = "") -> Message:
        """Triton's `ModelConfigResponse`, as it is."""
        self._check_served(name, version)
        return await self._triton.model_config(name, version, timeout_s=self._control_timeout_s)

    async def model_spec(self, name: str, version: str = "") -> ModelSpec:
        """What is known of a model, read from Triton unless it is in service already."""
        served = self._served.get((name, version))
        if served is not None:
            return served.spec
        self._check_served(name, version)
        return await self._read_spec(name, version)

    async def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether at least one server has the model loaded; false for unknown models."""
        if self._models and name not in self._models:
            return False
        try:
            return await self._triton.is_model_ready(name, version, timeout_s=self._control_timeout_s)
        except (Unavailable, ModelNotFound):
            return False

    async def repository_index(self, *, is_ready: bool = False) -> list[Message]:
        """Triton's `RepositoryIndexResponse.ModelIndex` entries of the models that are served here."""
        entries = await self._triton.repository_index(is_ready=is_ready, timeout_s=self._control_timeout_s)
        return [entry for entry in entries if not self._models or entry.name in self._models]

    # --- server -------------------------------------------------------------------------------------------

    def is_live(self) -> bool:
        """Whether this replica takes requests at all."""
        return self._state is PlaneState.OPEN

    async def is_ready(self) -> bool:
        """Whether a request would be answered now: a server is reachable, and every model named in the settings
        is loaded on one."""
        if self._state is PlaneState.CLOSED or self._triton.num_endpoints == 0:
            return False
        try:
            if not await self._triton.is_ready(timeout_s=self._control_timeout_s):
                return False
        except Unavailable:
            return False
        ready = await asyncio.gather(*(self.is_model_ready(name) for name in self._models))
        return all(ready)

    # --- life ---------------------------------------------------------------------------------------------

    def reconfigure(self, config: ModelServerConfig) -> None:
        """Put new settings in force for every model, from the next batch on; nothing under way is lost."""
        self._config = config
        for served in self._served.values():
            served.runner.reconfigure(config.for_model(served.spec.name))

    async def aclose(self) -> None:
        """Refuse new requests, let runners finish what they hold (each within its own bound), and close them."""
        if self._state is PlaneState.CLOSED:
            return
        self._state = PlaneState.CLOSED
        opening, self._opening = list(self._opening.values()), {}
        for task in opening:
            task.cancel()
        served, self._served = list(self._served.values()), {}
        background = list(self._background)
        for background_task in background:
            background_task.cancel()
        await asyncio.shield(
            asyncio.gather(*opening, *background, *(model.runner.aclose() for model in served), return_exceptions=True)
        )

    def statistics(self) -> PlaneStatistics:
        """A copy of the counts, with each runner's own under `models`."""
        models = {
            f"{name}/{version}" if version else name: served.runner.statistics()
            for (name, version), served in self._served.items()
        }
        now = self._statistics
        return PlaneStatistics(now.requests, now.failed, now.cancelled, now.running, models)

    def __repr__(self) -> str:
        runners = ", ".join(repr(served.runner) for served in self._served.values())
        return (
            f"<DataPlane [{self._state.value}] Requests: {self._statistics.running} running | "
            f"Models: {len(self._served)} in service, {len(self._opening)} opening | {runners}>"
        )

    # --- inside -------------------------------------------------------------------------------------------

    def _check_served(self, name: str, version: str) -> None:
        if self._models and name not in self._models:
            raise ModelNotFound(name, version)

    async def _read_spec(self, name: str, version: str) -> ModelSpec:
        metadata, config = await asyncio.gather(
            self._triton.model_metadata(name, version, timeout_s=self._control_timeout_s),
            self._triton.model_config(name, version, timeout_s=self._control_timeout_s),
        )
        return model_spec_from(metadata, config, version=version)

    async def _runner(self, key: tuple[str, str]) -> Runner:
        """The model's runner, opened if need be; those who wait for the same model share one task."""
        if self._state is PlaneState.CLOSED:
            raise PoolClosed("this replica")
        served = self._served.get(key)
        if served is not None:
            return served.runner
        self._check_served(*key)
        task = self._opening.get(key)
        if task is None:
            task = asyncio.ensure_future(self._open(key))
            self._opening[key] = task
            task.add_done_callback(lambda done: self._opened(key, done))
        return await asyncio.shield(task)

    def _opened(self, key: tuple[str, str], task: asyncio.Task[Runner]) -> None:
        if self._opening.get(key) is task:
            del self._opening[key]
        if not task.cancelled():
            task.exception()  # every waiter may have gone: read it, or asyncio logs it as lost

    async def _open(self, key: tuple[str, str]) -> Runner:
        spec = await self._read_spec(*key)
        runner = self._open_runner(spec, self._config.for_model(spec.name))
        self._served[key] = _Served(spec, runner, self._clock.now())
        return runner

    def _refresh(self, key: tuple[str, str], served: _Served) -> None:
        served.checked_at = self._clock.now()  # one look at a time, however many requests come meanwhile
        self._spawn(self._compare(key, served))

    async def _compare(self, key: tuple[str, str], served: _Served) -> None:
        """Replace a model's runner if the model has changed in Triton, or drop it if it has gone."""
        try:
            spec: ModelSpec | None = await self._read_spec(*key)
        except ModelNotFound:
            spec = None
        except ServeAppError:
            return  # nobody to ask now: the old spec is the best there is
        if spec == served.spec or self._served.get(key) is not served:
            return
        if spec is None:
            del self._served[key]
        else:
            runner = self._open_runner(spec, self._config.for_model(spec.name))
            self._served[key] = _Served(spec, runner, self._clock.now())
        await served.runner.aclose()

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            with contextlib.suppress(ServeAppError):
                await work

        task = asyncio.ensure_future(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
