"""The command `serve-app down`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import Annotated

import psutil
import typer

from serve_app.cli.exit_codes import ExitCode
from serve_app.cli.processes import find_marked
from serve_app.cli.progress import Step
from serve_app.cli.serve_rest import ServeRest
from serve_app.cli.session import Session, run_command
from serve_app.cli.stopping import describe

MARGIN_S = 15.0
"""What a launcher may take on top of the replicas' time before it is signalled again, and then killed."""


def down(
    now: Annotated[bool, typer.Option("--now", help="Kill at once, without letting replicas finish.")] = False,
) -> None:
    """Stop the instance of this user (or of SERVE_APP_RUN_DIR), also one whose launcher was killed."""

    def work() -> ExitCode:
        session = Session.open()
        session.folder.check()
        return _down(session, now=now)

    run_command(work)


def _down(session: Session, *, now: bool) -> ExitCode:
    with session.folder.locked() as is_ours:
        if is_ours:
            return _clean_up(session, now=now)
    _stop_launcher(session, now=now)
    with session.folder.locked() as is_ours:
        if is_ours:
            return _clean_up(session, now=now, was_running=True)
    session.reporter.problem(f"Another `serve-app` took {session.folder.path} over meanwhile; run this again.")
    return ExitCode.FAILED


def _stop_launcher(session: Session, *, now: bool) -> None:
    """Have the launcher stop its instance; returns when it is gone, whatever that takes."""
    pid = session.folder.lock_holder()
    if pid is None:
        return
    with (
        contextlib.suppress(psutil.NoSuchProcess),
        session.reporter.step(f"Stopping serve-app (process {pid})") as step,
    ):
        launcher = psutil.Process(pid)
        patience = [(signal.SIGTERM, 2.0 if now else session.settings.stop_timeout_s + MARGIN_S)]
        patience += [(signal.SIGTERM, MARGIN_S), (signal.SIGKILL, MARGIN_S)]
        for number, timeout_s in patience:
            launcher.send_signal(number)
            if _is_gone(launcher, timeout_s=timeout_s, step=step):
                return


def _is_gone(launcher: psutil.Process, *, timeout_s: float, step: Step) -> bool:
    expires_at = time.monotonic() + timeout_s
    while time.monotonic() < expires_at:
        if not launcher.is_running() or launcher.status() == psutil.STATUS_ZOMBIE:
            return True
        step.tick()
        time.sleep(0.05)
    return False


def _clean_up(session: Session, *, now: bool, was_running: bool = False) -> ExitCode:
    """Stop what no launcher looks after any more; this process holds the lock."""
    folder, reporter = session.folder, session.reporter
    left, state = find_marked(folder.marker_prefix), folder.read_state()
    if not left and not folder.path.exists():
        reporter.say("Stopped." if was_running else f"Nothing runs in {folder.path}.")
        return ExitCode.OK
    stopper = session.stopper()
    if left and not now:
        reporter.say(f"Stopping {len(left)} processes whose launcher is gone.")
        rest = ServeRest(state.dashboard_port) if state else None
        stopped = asyncio.run(stopper.stop(head=None, rest=rest, timeout_s=session.settings.stop_timeout_s))
    else:
        stopped = stopper.kill(head=None)
    if stopped.survivors:
        reporter.problem(f"These processes cannot be killed: {describe(stopped.survivors)}.")
        return ExitCode.FAILED
    reporter.say(f"Stopped. Logs of that run: {stopped.logs or 'none were kept'}")
    return ExitCode.OK
