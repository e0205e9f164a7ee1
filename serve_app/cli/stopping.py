"""Stops an instance in order, each step with a bound, and leaves nothing of it behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from serve_app.cli.processes import (
    MarkedProcess,
    find_marked,
    kill_all,
    reap_orphans,
    remove_shared_memory,
    shared_memory_of,
)
from serve_app.cli.progress import Reporter
from serve_app.cli.ray_head import RayHead
from serve_app.cli.run_folder import RunFolder
from serve_app.cli.serve_rest import ServeRest

RAY_STOP_S = 1.5
"""How long Ray's processes get to end by themselves. Nothing of value is in them once Serve has stopped."""

POLL_S = 0.05


@dataclass(frozen=True)
class Stopped:
    """What stopping came to.

    Attributes:
        logs: Where the run's logs were kept, `None` where they could not be.
        survivors: Processes that even SIGKILL did not end; as a rule none.
    """

    logs: Path | None
    survivors: tuple[MarkedProcess, ...] = ()


class InstanceStopper:
    """Stops what runs in one run folder.

    Args:
        folder: The run folder; its lock is held by the caller, and the folder is removed at the end.
        reporter: For progress.
        logs: Folder in which the logs of a few runs are kept.
    """

    def __init__(self, folder: RunFolder, *, reporter: Reporter, logs: Path) -> None:
        self._folder, self._reporter, self._logs = folder, reporter, logs
        self._shared_memory: set[str] = set()

    async def stop(self, *, head: RayHead | None, rest: ServeRest | None, timeout_s: float) -> Stopped:
        """Let replicas finish, then Ray, then kill what is left and clean up.

        Cancelling it leaves the rest to `kill`.

        Args:
            head: The process that owns Ray; `None` where it is another launcher's or gone.
            rest: The API through which Serve is asked to stop; `None` where it was never started.
            timeout_s: How long replicas may take.
        """
        if rest is not None and self._look():
            with self._reporter.step("Stopping the applications") as step:
                shut_down = asyncio.ensure_future(asyncio.to_thread(rest.shut_down, timeout_s=timeout_s))
                while not shut_down.done():
                    step.tick(f"{max(0.0, timeout_s - step.elapsed_s):.0f} s left")
                    await asyncio.wait({shut_down}, timeout=POLL_S)
                    self._look()
        with self._reporter.step("Stopping Ray") as step:
            if head is not None and head.is_running:
                head.terminate()
                expires_at = time.monotonic() + RAY_STOP_S
                while time.monotonic() < expires_at and (left := self._look()):
                    step.tick(f"{len(left)} processes left")
                    reap_orphans(keep={head.pid})
                    await asyncio.sleep(POLL_S)
            return self.kill(head=head)

    def kill(self, *, head: RayHead | None) -> Stopped:
        """Kill everything at once and clean up; blocks for some ten milliseconds."""
        self._look()
        survivors = kill_all(self._folder.marker_prefix, head_pid=head.pid if head else None)
        if head is not None:
            head.wait(timeout_s=5.0)
        remove_shared_memory(self._shared_memory)
        logs = self._folder.keep_logs(self._logs, time.strftime("%Y-%m-%d_%H-%M-%S"))
        self._folder.remove()
        return Stopped(logs, tuple(survivors))

    def _look(self) -> list[MarkedProcess]:
        """The processes there are; remembers what they have in `/dev/shm`, while they can still be asked."""
        processes = find_marked(self._folder.marker_prefix)
        self._shared_memory |= shared_memory_of(processes)
        return processes


def logs_folder(home: Path, state_home: str | None) -> Path:
    """Where logs of earlier runs are kept.

    Args:
        home: The user's home.
        state_home: `XDG_STATE_HOME`, if set.
    """
    return (Path(state_home) if state_home else home / ".local" / "state") / "serve_app" / "logs"


def describe(processes: Iterable[MarkedProcess]) -> str:
    """Names and ids, for a message."""
    return ", ".join(f"{process.name} ({process.pid})" for process in processes)
