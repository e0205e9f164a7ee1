"""Keeps one `tritonserver` alive on this node and tells where it is: a TritonServer replica without Ray."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from serve_app.clock import Clock, MonotonicClock
from serve_app.endpoint import Endpoint
from serve_app.errors import EndpointUnavailable, PoolClosed, ServeAppError, ServerStartFailed
from serve_app.fleet.launch import Launcher
from serve_app.fleet.loaded_models import LoadedModels
from serve_app.fleet.process import TritonProcess
from serve_app.fleet.repository import check_model_name
from serve_app.fleet.restart import RestartState, decide_restart
from serve_app.fleet.runtime import TritonRuntime
from serve_app.fleet.wanted_models import WantedModels
from serve_app.settings import TritonServerArgs

logger = logging.getLogger(__name__)


class SupervisorState(str, Enum):
    """What the supervisor is doing."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    """The crash-loop limit is reached; nothing more is tried."""

    CLOSED = "closed"


class TritonSupervisor:
    """One server, from preflight to a clean end, over as many lives as it takes.

    `async with supervisor:` starts it and waits until it is ready; leaving stops it. Runs in the loop of whatever
    thread it is used in. If this process dies, even by SIGKILL, the server's guard ends everything.

    Args:
        args: Settings of the server.
        state_dir: Folder for logs and sockets; may be shared by several supervisors, and is made when missing.
        host: Address of this node that gRPC binds (`transport: tcp`) and that the endpoint names.
        node_id: Ray node id, for the endpoint.
        zone: Availability zone, for the endpoint.
        runtime: Which binary; found by default.
        environ: Environment for the server.
        clock: Monotonic clock.
        on_endpoint: Called in the loop with the endpoint whenever a life is ready, and with `None` when it is not
            any more, before anything is stopped. Must not block; what it raises is logged.
    """

    def __init__(
        self,
        args: TritonServerArgs,
        *,
        state_dir: Path,
        host: str = "127.0.0.1",
        node_id: str = "",
        zone: str = "",
        runtime: TritonRuntime | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Clock | None = None,
        on_endpoint: Callable[[Endpoint | None], None] | None = None,
    ) -> None:
        self.state = SupervisorState.NEW
        self.endpoint: Endpoint | None = None
        self.version = ""
        self._args = args
        self._node_id, self._zone = node_id, zone
        self._clock = clock or MonotonicClock()
        self._on_endpoint = on_endpoint
        self._launcher = Launcher(
            args, state_dir=state_dir, host=host, runtime=runtime, environ=environ, clock=self._clock
        )
        self._wanted = WantedModels()
        self._process: TritonProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._ready_at: float | None = None
        self._not_ready_since = self._clock.now()
        self._restarts = RestartState()
        self._last_end = ""

    def __repr__(self) -> str:
        address = self.endpoint.address if self.endpoint else "-"
        return (
            f"<TritonSupervisor {self.state.value} | Server: {address}, pid {self._pid}, "
            f"{self._launcher.num_starts} starts, {self._restarts.num_restarts} restarts in a row | "
            f"{self._wanted!r}>"
        )

    def statistics(self) -> dict[str, Any]:
        """What there is to know, as JSON types."""
        return {
            "state": self.state.value,
            "server_id": self.endpoint.server_id if self.endpoint else "",
            "address": self.endpoint.address if self.endpoint else "",
            "pid": self._pid,
            "guard_pid": self._process.guard_pid if self._process else None,
            "version": self.version,
            "ready_s": self._ready_s,
            "num_starts": self._launcher.num_starts,
            "num_restarts_in_a_row": self._restarts.num_restarts,
            "last_end": self._last_end,
            "log": str(self._process.log_path) if self._process else "",
            **self._wanted.statistics(),
        }

    @property
    def num_healed(self) -> int:
        """Models loaded again since their stub had died, over all lives."""
        return self._wanted.num_healed

    @property
    def _pid(self) -> int | None:
        return self._process.pid if self._process and self._process.is_alive else None

    @property
    def _ready_s(self) -> float:
        """Seconds since this life was ready."""
        return self._clock.now() - self._ready_at if self._ready_at is not None else 0.0

    async def __aenter__(self) -> TritonSupervisor:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Check the machine, start the server and wait until it is ready; call once.

        A model that does not load is no failure: see `statistics()["reasons"]`.

        Raises:
            PreflightFailed: The machine is not ready; nothing was started.
            ServerStartFailed: The server did not become ready; nothing is left of it.
            PoolClosed: `aclose` was called before it was ready, or `start` twice.
        """
        if self.state is not SupervisorState.NEW:
            raise PoolClosed(f"TritonSupervisor (already {self.state.value})")
        self.state = SupervisorState.STARTING
        self._task = asyncio.create_task(self._start())
        try:
            await self._task  # Cancelling the caller cancels it, and so does `aclose`.
            is_closed = self._closing is not None
        except asyncio.CancelledError:
            is_closed = self._closing is not None
            await self.aclose()
            if not is_closed:
                raise
        except BaseException:
            await self.aclose()
            raise
        if is_closed:
            raise PoolClosed("TritonSupervisor")
        self._task = asyncio.create_task(self._supervise())

    async def _start(self) -> None:
        self._wanted.want(await asyncio.to_thread(self._launcher.prepare))
        await self._begin_life()

    async def aclose(self) -> None:
        """Leave the registry, pause, stop the server within its bound; goes on when the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    def check_health(self) -> None:
        """Return while the server works, or is being brought back within reason.

        Raises:
            ServerStartFailed: The crash-loop limit is reached, or it has not been ready for too long.
            PoolClosed: After `aclose`.
        """
        if self.state is SupervisorState.CLOSED:
            raise PoolClosed("TritonSupervisor")
        if self.state is SupervisorState.FAILED:
            raise ServerStartFailed(
                "tritonserver", f"given up after {self._restarts.num_restarts} restarts in a row; {self._last_end}"
            )
        limit_s = self._args.start_timeout_s + self._args.restart.max_backoff_s
        waiting_s = self._clock.now() - self._not_ready_since
        if self.state is not SupervisorState.READY and waiting_s > limit_s:
            raise ServerStartFailed("tritonserver", f"not ready for {waiting_s:.0f} s; {self._last_end}")

    async def load_model(self, name: str, config: str | None = None) -> None:
        """Load a model now and in every later life.

        Args:
            name: A model of the repository.
            config: JSON of a whole model config that replaces the repository's.

        Raises:
            InvalidRequest: The name cannot be a model's.
            EndpointUnavailable: The server is not ready.
            BackendFailed: It does not load; it is not tried again.
        """
        check_model_name(name)
        await self._wanted.load(self._running_models(), name, config)

    async def unload_model(self, name: str) -> None:
        """Unload a model now and leave it out in later lives; errors as in `load_model`."""
        check_model_name(name)
        await self._wanted.unload(self._running_models(), name)

    def _running_models(self) -> LoadedModels:
        if self.state is not SupervisorState.READY or self._wanted.loaded is None:
            raise EndpointUnavailable("tritonserver", f"it is {self.state.value}; try again when it is ready")
        return self._wanted.loaded

    async def _begin_life(self) -> None:
        """Start a server and publish its endpoint.

        Raises:
            ServerStartFailed: It did not become ready; nothing is left of it.
        """
        process, self.version = await self._launcher.launch(self._wanted.at_start)
        try:
            await self._adopt(process)
        except BaseException:
            await process.aclose()
            raise

    async def _adopt(self, process: TritonProcess) -> None:
        """Take over a server that has become ready."""
        assert process.pid is not None
        models = LoadedModels(
            process.probe,
            process.pid,
            settings=self._args.restart,
            load_timeout_s=self._args.start_timeout_s,
            grace_s=self._args.stop_timeout_s,
            config_of=self._wanted.config_of,
            clock=self._clock,
        )
        try:
            await self._wanted.begin_life(models)
        except ServeAppError as problem:
            raise ServerStartFailed(f"tritonserver {process.server_id}", str(problem)) from problem
        self._process = process
        self.state = SupervisorState.READY
        self._ready_at = self._clock.now()
        self._publish(
            Endpoint(
                process.listen.target,
                process.server_id,
                self._node_id,
                self._zone,
                process.listen.metrics_url,
                process.secret,
            )
        )

    def _publish(self, endpoint: Endpoint | None) -> None:
        if endpoint == self.endpoint:
            return
        self.endpoint = endpoint
        if self._on_endpoint is not None:
            try:
                self._on_endpoint(endpoint)
            except Exception:  # The owner's fault must not stop the supervision.
                logger.exception("on_endpoint failed")

    async def _supervise(self) -> None:
        """Watch life after life until the limit is reached."""
        try:
            while True:
                assert self._process is not None
                self._last_end = await self._watch(self._process)
                lived_s = self._ready_s
                self._withdraw(SupervisorState.RESTARTING)
                logger.error("tritonserver: %s", self._last_end)
                self._process.kill()
                await self._process.aclose()
                if not await self._restart(lived_s):
                    break
            logger.error("tritonserver: given up after %d restarts in a row", self._restarts.num_restarts)
        except Exception as problem:  # A fault of ours must show in `check_health`.
            logger.exception("the supervision of tritonserver failed")
            self._last_end = f"the supervision failed: {type(problem).__name__}"
        self._withdraw(SupervisorState.FAILED)
        if self._process is not None:
            await self._process.aclose()

    async def _restart(self, lived_s: float) -> bool:
        """Start again, with pauses; False once the limit is reached."""
        while True:
            decision = decide_restart(self._args.restart, self._restarts, lived_s=lived_s)
            self._restarts = decision.state
            if decision.backoff_s is None:
                return False
            await asyncio.sleep(decision.backoff_s)
            try:
                await self._begin_life()
            except ServerStartFailed as problem:
                self._last_end = problem.reason
                logger.error("%s", problem)
                lived_s = 0.0
            else:
                return True

    def _withdraw(self, state: SupervisorState) -> None:
        if self.state is SupervisorState.READY:
            self._not_ready_since = self._clock.now()
        self.state = state
        self._ready_at = None
        self._wanted.end_life()
        self._publish(None)

    async def _watch(self, process: TritonProcess) -> str:
        """Wait until a life is over, and say why."""
        assert self._wanted.loaded is not None
        exited = asyncio.ensure_future(process.exited.wait())
        reasons = [
            asyncio.ensure_future(self._wanted.loaded.watch()),
            asyncio.ensure_future(process.probe.watch(self._args.unresponsive_timeout_s, clock=self._clock)),
        ]
        try:
            await asyncio.wait([exited, *reasons], return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return process.exit_reason()
            return next(task.result() for task in reasons if task.done())
        finally:
            for task in (exited, *reasons):
                task.cancel()
            await asyncio.gather(exited, *reasons, return_exceptions=True)

    async def _close(self) -> None:
        was_ready = self.state is SupervisorState.READY
        is_failed = self.state is SupervisorState.FAILED
        self._withdraw(self.state if is_failed else SupervisorState.CLOSED)
        if was_ready:
            await asyncio.sleep(self._args.drain_s)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None:
            await self._process.aclose()
        self.state = SupervisorState.CLOSED
