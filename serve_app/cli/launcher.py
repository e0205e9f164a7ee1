"""`serve-app up`: starts a local Ray, deploys, waits until every model is ready, and stops all of it in the end."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from serve_app.cli.exit_codes import ExitCode
from serve_app.cli.http_call import call
from serve_app.cli.progress import Reporter, Step
from serve_app.cli.ray_head import RayHead, driver_environment
from serve_app.cli.readiness import Readiness, ReadinessState, look
from serve_app.cli.serve_rest import ApplicationPhase, ServeRest
from serve_app.cli.stop_signals import StopAsked, StopSignals, unless_stopped
from serve_app.cli.stopping import InstanceStopper, Stopped, describe
from serve_app.cli.try_out import summary
from serve_app.cli.up_plan import UpPlan
from serve_app.errors import ServeAppError, ServerStartFailed, Unavailable

POLL_S = 0.1
DEPLOY_CALL_S = 120.0
"""Ray Serve answers a first deployment when its controller and HAProxy run: seconds, on a busy machine many."""

FAILED_FOR_S = 5.0
"""How long a model must be seen as failed before the start is given up: an index may lag behind a load."""

LOAD_FAILURE_FIX = (
    "Fix: correct the model or take its folder away; `serve-app up --no-wait-for-models` serves the others without it."
)

T = TypeVar("T")


@dataclass
class Launcher:
    """One instance from start to stop.

    The run folder's lock is the caller's. Everything that is started carries the instance's marker and is gone when
    `run` returns.

    Args:
        plan: What to start; every check has passed.
        reporter: For progress and results.
        stopper: Ends it.
        signals: What ends it.
    """

    plan: UpPlan
    reporter: Reporter
    stopper: InstanceStopper
    signals: StopSignals
    _head: RayHead | None = None
    _rest: ServeRest | None = None

    async def run(self) -> ExitCode:
        """Start, serve until a signal comes, stop; returns the exit status."""
        status = ExitCode.OK
        try:
            await unless_stopped(self._serve(), self.signals)
        except StopAsked:
            pass
        except ServeAppError as problem:
            self.reporter.problem(str(problem))
            status = ExitCode.FAILED
        finally:  # Also for what nobody foresaw: nothing that was started outlives this call.
            stopped, was_killed = await self._stop()
        if stopped.survivors:
            self.reporter.problem(f"These processes cannot be killed: {describe(stopped.survivors)}.")
            return ExitCode.FAILED
        self.reporter.say(f"Stopped. Logs of this run: {stopped.logs or 'could not be kept'}")
        return ExitCode.KILLED if was_killed else status

    async def _stop(self) -> tuple[Stopped, bool]:
        """Stop in order, or at once from the moment a second signal comes; says whether it did."""
        stop = self.stopper.stop(head=self._head, rest=self._rest, timeout_s=self.plan.settings.stop_timeout_s)
        stopping = asyncio.ensure_future(stop)
        killing = asyncio.ensure_future(self.signals.second())
        await asyncio.wait({stopping, killing}, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        if stopping.done():
            return stopping.result(), False
        stopping.cancel()
        await asyncio.wait({stopping})
        return self.stopper.kill(head=self._head), True

    async def _serve(self) -> None:
        """Start everything, say so, and return only by an error or cancelled."""
        started_at = time.monotonic()
        expires_at = started_at + self.plan.settings.start_timeout_s
        await self._start_ray(expires_at)
        await self._deploy(expires_at)
        readiness = await self._wait_until_ready(expires_at)
        self.reporter.say(f"Ready in {time.monotonic() - started_at:.1f} s.", "bold green")
        self.reporter.say(await asyncio.to_thread(self._summary, readiness))
        head = self._alive_head()
        await asyncio.to_thread(head.wait)
        raise head.failure()

    async def _start_ray(self, expires_at: float) -> None:
        plan, folder = self.plan, self.plan.folder
        folder.create()
        folder.write_state(plan.state)
        with self.reporter.step("Starting Ray") as step:
            self._head = RayHead.start(plan.command, plan.environment, folder=folder, home=plan.home)
            while (address := self._alive_head().gcs_address) is None:
                self._check_time(expires_at, step, "Ray", "waiting for its processes")
                await asyncio.sleep(POLL_S)
        lines = (f"export {k}='{v}'\n" for k, v in driver_environment(plan.environment, gcs_address=address).items())
        folder.driver_env.write_text("".join(lines), encoding="utf-8")

    async def _deploy(self, expires_at: float) -> None:
        self._rest = rest = ServeRest(self.plan.settings.dashboard_port)
        with self.reporter.step("Starting Ray Serve") as step:
            while True:
                try:
                    await self._in_thread(lambda: rest.deploy(self.plan.file.config, timeout_s=DEPLOY_CALL_S), step)
                    break
                except Unavailable as problem:
                    self._check_time(expires_at, step, "Ray Serve", problem.reason)
                    await asyncio.sleep(POLL_S)
        with self.reporter.step("Starting the applications") as step:
            while waiting := await self._in_thread(lambda: self._not_running(rest), step):
                self._check_time(expires_at, step, "The applications", waiting)
                await asyncio.sleep(POLL_S)

    def _not_running(self, rest: ServeRest) -> str:
        """The applications that do not run yet, and why; empty when all do; raises when one failed."""
        try:
            statuses = rest.applications()
        except Unavailable as problem:
            return str(problem)
        for app in statuses:
            if app.phase is ApplicationPhase.FAILED:
                raise ServerStartFailed(f"Application {app.name!r}", app.message or app.status)
        waiting = [app for app in statuses if app.phase is not ApplicationPhase.RUNNING]
        missing = set(self.plan.file.applications) - {app.name for app in statuses}
        parts = [f"{app.name} {app.status} {app.message}".strip() for app in waiting]
        return "; ".join([*parts, *(f"{name} NOT_STARTED" for name in sorted(missing))])

    async def _wait_until_ready(self, expires_at: float) -> Readiness:
        file = self.plan.file
        if not (self.plan.wait_for_models and file.routes):
            return Readiness(ReadinessState.READY)
        failed_at: float | None = None
        with self.reporter.step("Waiting for the models") as step:
            while True:
                readiness = await self._in_thread(
                    lambda: look(file.connect_host, file.http_port, file.routes, key=self.plan.state.key), step
                )
                if readiness.state is ReadinessState.READY:
                    return readiness
                failed_at = (failed_at or time.monotonic()) if readiness.state is ReadinessState.FAILED else None
                if failed_at is not None and time.monotonic() - failed_at > FAILED_FOR_S:
                    raise ServerStartFailed("Triton", f"{readiness.detail}. {LOAD_FAILURE_FIX}")
                self._check_time(expires_at, step, "The models", readiness.detail)
                await asyncio.sleep(POLL_S)

    def _summary(self, readiness: Readiness) -> str:
        file, plan = self.plan.file, self.plan
        host = f"[{file.connect_host}]" if ":" in file.connect_host else file.connect_host
        digits = None
        if "digits" in readiness.paths:
            path, key = readiness.paths["digits"], plan.state.key
            digits = call("GET", file.connect_host, file.http_port, path, timeout_s=5.0, key=key)
        return summary(
            url=f"http://{host}:{file.http_port}",
            models=readiness.paths,
            metadata=digits.json if digits else None,
            grpc=f"{host}:{file.grpc_port}" if file.grpc_port else None,
            applications=file.routed,
            dashboard=f"http://127.0.0.1:{plan.settings.dashboard_port}",
            deployments=file.path,
            driver_env=plan.folder.driver_env,
            logs=plan.folder.logs,
            commands="" if shutil.which("serve-app") else f"{Path(sys.executable).parent}/",
            run_dir=plan.folder.path if plan.settings.run_dir else None,
        )

    def _alive_head(self) -> RayHead:
        if self._head is None or not self._head.is_running:
            raise self._head.failure() if self._head else ServerStartFailed("Ray", "it was not started")
        return self._head

    def _check_time(self, expires_at: float, step: Step, what: str, detail: str) -> None:
        """Tell what is waited for; raises when that took too long or Ray has ended."""
        self._alive_head()
        step.tick(detail)
        if time.monotonic() > expires_at:
            limit = self.plan.settings.start_timeout_s
            raise ServerStartFailed(what, f"not ready after {limit:.0f} s: {detail}")

    async def _in_thread(self, blocking: Callable[[], T], step: Step) -> T:
        """Run a blocking call in a thread and tick meanwhile; Ray's end is noticed too."""
        future = asyncio.ensure_future(asyncio.to_thread(blocking))
        try:
            while not future.done():
                self._alive_head()
                step.tick()
                await asyncio.wait({future}, timeout=POLL_S)
            return future.result()
        finally:
            future.cancel()
