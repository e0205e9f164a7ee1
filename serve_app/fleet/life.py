"""Names that tell which process owns what a server leaves outside itself, and the sweep of what outlived its owner."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import stat
from dataclasses import dataclass
from pathlib import Path

import psutil

from serve_app.errors import PreflightFailed
from serve_app.fleet.guard import remove_files
from serve_app.fleet.preflight import SHARED_MEMORY

_TAG = re.compile(r"serve_app_(\d+)_(\d+)_(\d+)_(\d+)")
_count = itertools.count()

MAX_LOGS = 8
"""Log files of ended servers that are kept in a state folder."""


@dataclass(frozen=True, slots=True)
class LifeTag:
    """Names one life of one server on this node.

    Shared memory and sockets carry it in their names, so that whoever comes later can tell without any record
    whether their owner still lives. Containers may share `/dev/shm` and not their process ids, hence the namespace.

    Attributes:
        pid_namespace: Inode number of the owner's process id namespace.
        owner_pid: Process that started the server's guard.
        owner_start: When that process started, in clock ticks since boot.
        number: Counts the lives that one owner started.
    """

    pid_namespace: int
    owner_pid: int
    owner_start: int
    number: int

    def __str__(self) -> str:
        return f"serve_app_{self.pid_namespace}_{self.owner_pid}_{self.owner_start}_{self.number}"

    @property
    def shm_prefix(self) -> str:
        """Prefix of this life's entries in `/dev/shm`."""
        return f"{self}_"

    @classmethod
    def new(cls) -> LifeTag:
        """A tag owned by the calling process, not given before."""
        pid = os.getpid()
        return cls(_pid_namespace(), pid, _start_ticks(pid) or 0, next(_count))

    @classmethod
    def parse(cls, name: str) -> LifeTag | None:
        """The tag a name begins with, if it has one."""
        match = _TAG.match(name)
        return cls(*(int(group) for group in match.groups())) if match else None

    def is_stale(self) -> bool:
        """Whether its owner lived in this process id namespace and is gone."""
        return self.pid_namespace == _pid_namespace() and _start_ticks(self.owner_pid) != self.owner_start


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_ticks(pid: int) -> int | None:
    """When a process started (field 22 of /proc/<pid>/stat); `None` when there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def make_private(state_dir: Path) -> None:
    """Make the folder for logs and sockets this user's alone.

    Raises:
        PreflightFailed: Somebody else has made it, who could then put a socket of his own in ours' place.
    """
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = state_dir.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PreflightFailed(f"{state_dir} is not a folder of this user.", "remove it, or ask its owner to.")
    if stat.S_IMODE(status.st_mode) & 0o077:
        state_dir.chmod(0o700)


def sweep(state_dir: Path, *, shm_dir: Path = SHARED_MEMORY) -> list[str]:
    """End and remove what servers left behind whose owner and guard were both killed. Blocks for some milliseconds.

    Returns:
        What was removed, for the log: names of files and `process <pid>`.
    """
    removed = []
    for process in psutil.process_iter(["cmdline"]):
        tags = (LifeTag.parse(part.rpartition("=")[2]) for part in process.info["cmdline"] or ())
        if any(tag is not None and tag.is_stale() for tag in tags) and not _has_guard(process):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
                removed.append(f"process {process.pid}")
    for folder in (shm_dir, state_dir):
        with contextlib.suppress(OSError):
            for path in sorted(folder.iterdir()):
                tag = LifeTag.parse(path.name)
                if tag is not None and path.suffix != ".log" and tag.is_stale():
                    remove_files("", [str(path)])
                    removed.append(path.name)
    return removed


def _has_guard(process: psutil.Process) -> bool:
    """Whether a guard is an ancestor, and so about to end this process itself."""
    try:
        return any(any(part.endswith("guard.py") for part in parent.cmdline()) for parent in process.parents())
    except psutil.Error:
        return False


def prune_logs(state_dir: Path, *, keep: int = MAX_LOGS) -> None:
    """Remove the oldest logs of ended servers."""
    logs = []
    for path in state_dir.glob("serve_app_*.log*"):
        tag = LifeTag.parse(path.name)
        if tag is not None and (tag.is_stale() or tag.owner_pid == os.getpid()):
            with contextlib.suppress(OSError):
                logs.append((path.stat().st_mtime, path))
    for _, path in sorted(logs, reverse=True)[keep:]:
        remove_files("", [str(path)])
