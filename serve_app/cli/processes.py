"""Finds and ends the processes of an instance by a marker in their environment, and never by name.

Ray's processes outlive the command that starts them and are named alike for every Ray on a machine. A variable in
the environment is inherited by all of an instance, HAProxy and tritonserver included, and by nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

MARKER = "SERVE_APP_INSTANCE"
"""The variable; its value is the run folder, `#` and a random number."""

PROC = Path("/proc")
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - where POSIX shared memory is, not a place for temporary files


@dataclass(frozen=True)
class MarkedProcess:
    """A process of an instance.

    Attributes:
        pid: Process id.
        started: Clock ticks since boot at which it started; with `pid` it names one process for good.
        name: For people.
    """

    pid: int
    started: int
    name: str

    def send(self, signal_number: int) -> None:
        """Signal it, unless it is gone and its id is another's."""
        stat = _stat_of(self.pid)
        if stat is not None and stat[1] == self.started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal_number)


def marker_of(pid: int, *, proc: Path = PROC) -> str | None:
    """The marker in a process's environment; `None` without one, for zombies and for other users' processes."""
    try:
        environment = (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    start = f"{MARKER}=".encode()
    for assignment in environment.split(b"\0"):
        if assignment.startswith(start):
            return os.fsdecode(assignment[len(start) :])
    return None


def find_marked(prefix: str, *, proc: Path = PROC) -> list[MarkedProcess]:
    """All processes whose marker starts with `prefix`, oldest first; never this process or its parents."""
    own = {os.getpid(), os.getppid()}
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) in own:
            continue
        pid = int(entry.name)
        marker = marker_of(pid, proc=proc)
        stat = _stat_of(pid, proc=proc) if marker is not None and marker.startswith(prefix) else None
        if stat is not None:
            found.append(MarkedProcess(pid, stat[1], stat[0]))
    return sorted(found, key=lambda process: (process.started, process.pid))


def kill_all(prefix: str, *, head_pid: int | None = None, timeout_s: float = 10.0) -> list[MarkedProcess]:
    """Kill every marked process, and those they start meanwhile, until there is none.

    Blocks for some ten milliseconds as a rule.

    Args:
        prefix: Start of the markers.
        head_pid: In the launcher, which adopted what its child left: that child, so that all others are collected.
        timeout_s: When to give up.

    Returns:
        Those that are still there after `timeout_s` (stuck in the kernel); as a rule none.
    """
    expires_at = time.monotonic() + timeout_s
    while True:
        processes = find_marked(prefix)
        for process in processes:
            process.send(signal.SIGKILL)
        if head_pid is not None:
            reap_orphans(keep={head_pid})
        if not processes or time.monotonic() > expires_at:
            return processes
        time.sleep(0.02)


def adopt_orphans() -> None:
    """Make this process the parent of those below it that lose theirs (Linux's subreaper).

    Where nothing else reaps (a container whose first process does not), dead grandchildren would stay as zombies.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, linux/prctl.h


def reap_orphans(*, keep: Iterable[int]) -> None:
    """Collect dead children that were adopted; `keep` are those that a `Popen` of ours waits for."""
    kept = set(keep)
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.pid not in kept and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def shared_memory_of(processes: Iterable[MarkedProcess], *, proc: Path = PROC) -> set[str]:
    """Files in `/dev/shm` that processes have mapped or open: what they would leave behind if they were killed."""
    found = set()
    for process in processes:
        folder = proc / str(process.pid)
        with contextlib.suppress(OSError):
            for line in (folder / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
                path = line.partition(SHARED_MEMORY)
                if path[1] and not path[2].endswith(" (deleted)"):
                    found.add(path[1] + path[2])
        with contextlib.suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(descriptor)
                    if target.startswith(SHARED_MEMORY) and not target.endswith(" (deleted)"):
                        found.add(target)
    return found


def remove_shared_memory(paths: Iterable[str], *, proc: Path = PROC) -> list[str]:
    """Remove files that `shared_memory_of` found, unless another process still uses one.

    Returns:
        What was removed.
    """
    candidates = {path for path in paths if os.path.lexists(path)}
    if not candidates:
        return []
    others = [MarkedProcess(int(entry.name), 0, "") for entry in proc.iterdir() if entry.name.isdigit()]
    removed = []
    for path in sorted(candidates - shared_memory_of(others, proc=proc)):
        with contextlib.suppress(OSError):
            os.unlink(path)
            removed.append(path)
    return removed


def _stat_of(pid: int, *, proc: Path = PROC) -> tuple[str, int] | None:
    """Name and start of a process that is there and no zombie."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name, _, rest = text[text.index("(") + 1 :].rpartition(")")
    fields = rest.split()
    return None if fields[0] in "ZX" else (name, int(fields[19]))
