"""`serve-app up`: starts a local Ray, deploys, waits until every model is ready, and stops all of it in the end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from serve_app.cli.exit_codes import ExitCode
from serve_app.cli.http_call import call
from serve_app.cli.progress import Reporter, Step
from serve_app.cli.ray_head import RayHead, driver_environment
from serve_app.cli.readiness import Readiness, ReadinessState, look
from serve_app.cli.serve_rest import ApplicationPhase, ServeRest
from serve_app.cli.stopping import InstanceStopper, describe
from serve_app.cli.try_out import summary
from serve_app.cli.up_plan import UpPlan
from serve_app.errors import ServeAppError, ServerStartFailed, Unavailable

POLL_S = 0.1
DEPLOY_CALL_S = 120.0
"""Ray Serve answers a first deployment when its controller and HAProxy run: seconds, on a busy machine many."""

T = TypeVar("T")


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP, counted; the handlers do nothing else.

    Use it as a context manager inside a running event loop.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._received: list[signal.Signals] = []
        self._events = (asyncio.Event(), asyncio.Event())

    def __repr__(self) -> str:
        return f"<StopSignals {[received.name for received in self._received]}>"

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in self.SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *exc: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self.SIGNALS:
            loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._received.append(number)
        for event in self._events[: len(self._received)]:
            event.set()

    @property
    def num_received(self) -> int:
        """Signals so far."""
        return len(self._received)

    async def first(self) -> None:
        """Return once a signal came: stop in order."""
        await self._events[0].wait()

    async def second(self) -> None:
        """Return once another came: stop at once."""
        await self._events[1].wait()


class StopAsked(Exception):
    """A signal came before or while the models were served."""


async def unless_stopped(work: Awaitable[T], signals: StopSignals) -> T:
    """Await `work`; when a signal comes first, cancel it and raise `StopAsked`."""
    working = asyncio.ensure_future(work)
    asked = asyncio.ensure_future(signals.first())
    try:
        await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise StopAsked
        return working.result()
    finally:
        asked.cancel()
        working.cancel()
        await asyncio.wait({working, asked})


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
        stop = self.stopper.stop(head=self._head, rest=self._rest, timeout_s=self.plan.settings.stop_timeout_s)
        stopping = asyncio.ensure_future(stop)
        killing = asyncio.ensure_future(self.signals.second())
        await asyncio.wait({stopping, killing}, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        if stopping.done():
            stopped = stopping.result()
        else:
            stopping.cancel()
            await asyncio.wait({stopping})
            stopped = self.stopper.kill(head=self._head)
            status = ExitCode.KILLED
        if stopped.survivors:
            self.reporter.problem(f"These processes cannot be killed: {describe(stopped.survivors)}.")
            status = ExitCode.FAILED
        self.reporter.say(f"Stopped. Logs of this run: {stopped.logs or 'could not be kept'}")
        return status

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
                self._check_time(expires_at, step, "Ray", "its processes did not come up")
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
            while True:
                detail = ""
                try:
                    statuses = await self._in_thread(rest.applications, step)
                    for app in statuses:
                        if app.phase is ApplicationPhase.FAILED:
                            raise ServerStartFailed(f"Application {app.name!r}", app.message or app.status)
                    waiting = [app for app in statuses if app.phase is not ApplicationPhase.RUNNING]
                    if not waiting and len(statuses) >= len(self.plan.file.applications):
                        return
                    detail = "; ".join(f"{app.name} {app.status} {app.message}".strip() for app in waiting)
                except Unavailable as problem:
                    detail = str(problem)
                self._check_time(expires_at, step, "The applications", detail)
                await asyncio.sleep(POLL_S)

    async def _wait_until_ready(self, expires_at: float) -> Readiness:
        file = self.plan.file
        if not (self.plan.wait_for_models and file.has_route):
            return Readiness(ReadinessState.READY)
        with self.reporter.step("Waiting for the models") as step:
            while True:
                readiness = await self._in_thread(lambda: look(file.connect_host, file.http_port), step)
                if readiness.state is ReadinessState.READY:
                    return readiness
                if readiness.state is ReadinessState.FAILED:
                    raise ServerStartFailed("Triton", readiness.detail)
                self._check_time(expires_at, step, "The models", readiness.detail)
                await asyncio.sleep(POLL_S)

    def _summary(self, readiness: Readiness) -> str:
        file, plan = self.plan.file, self.plan
        host = f"[{file.connect_host}]" if ":" in file.connect_host else file.connect_host
        digits = None
        if "digits" in readiness.models:
            digits = call("GET", file.connect_host, file.http_port, "/v2/models/digits", timeout_s=5.0)
        return summary(
            url=f"http://{host}:{file.http_port}",
            models=readiness.models,
            metadata=digits.json if digits else None,
            grpc=f"{host}:{file.grpc_port}" if file.grpc_port else None,
            dashboard=f"http://127.0.0.1:{plan.settings.dashboard_port}",
            deployments=file.path,
            driver_env=plan.folder.driver_env,
            logs=plan.folder.logs,
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
