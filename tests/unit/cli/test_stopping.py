"""Stopping is bounded, and a second signal cuts it short."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from serve_app.cli.processes import MARKER, find_marked
from serve_app.cli.progress import Reporter
from serve_app.cli.run_folder import RunFolder
from serve_app.cli.serve_rest import ServeRest
from serve_app.cli.stop_signals import StopAsked, StopSignals, unless_stopped
from serve_app.cli.stopping import InstanceStopper


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    with tempfile.TemporaryDirectory(prefix="sa", dir="/tmp") as parent:
        folder = RunFolder(Path(parent) / "run")
        folder.create()
        yield folder


def start_stubborn(folder: RunFolder) -> subprocess.Popen[bytes]:
    """A process of the folder's that takes no notice of SIGTERM."""
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    environ = {**os.environ, MARKER: folder.marker_prefix + "1"}
    process = subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


class HangingRest(ServeRest):
    """Never gets done with stopping Serve."""

    def shut_down(self, *, timeout_s: float) -> bool:
        time.sleep(timeout_s)
        return False


async def test_replicas_that_never_finish_are_killed(folder: RunFolder, tmp_path: Path) -> None:
    """Whatever hangs, the instance is gone soon after the time that replicas may take."""
    output = io.StringIO()
    stopper = InstanceStopper(folder, reporter=Reporter(Console(file=output)), logs=tmp_path)
    with start_stubborn(folder) as process:
        stopped = await stopper.stop(head=None, rest=HangingRest(1), timeout_s=0.2)
    assert process.returncode == -signal.SIGKILL
    assert stopped.survivors == ()
    assert find_marked(folder.marker_prefix) == []
    assert not folder.path.exists()
    assert "Stopping the applications: done in 0." in output.getvalue()


async def test_signals_are_counted_and_nothing_else() -> None:
    """The first asks to stop, the second to stop at once; handlers are gone afterwards."""
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        await signals.first()
        assert repr(signals) == "<StopSignals ['SIGINT']>"
        second = asyncio.ensure_future(signals.second())
        await asyncio.sleep(0)
        assert not second.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await second
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


async def test_work_is_cancelled_by_a_signal() -> None:
    """A start that is under way ends where it waits, and has cleaned up when the stop begins."""
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    with StopSignals() as signals:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        with pytest.raises(StopAsked):
            await unless_stopped(work(), signals)
    assert cleaned == [True]


def test_plain_output_has_one_line_before_and_after() -> None:
    """Logs of a start without a terminal are readable, whatever brackets titles hold."""
    output = io.StringIO()
    reporter = Reporter(Console(file=output))
    with reporter.step("Starting [a]") as step:
        step.tick("waiting")
        assert repr(step).startswith("<Step 'Starting [a]', 0.0 s, 'waiting'>")
    reporter.say("[bold]done")
    assert output.getvalue().splitlines() == ["Starting [a] ...", "Starting [a]: done in 0.0 s", "[bold]done"]
