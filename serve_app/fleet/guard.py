"""The parent of one `tritonserver`, a process of its own: whatever dies, it ends the rest and leaves nothing behind.

Run as a script with the standard library alone (`python -I -S guard.py`), so that it starts in 20 ms, stays small
and single-threaded. The owner (see `process`) holds the other ends of two pipes:

* stdin: one line of JSON (`GuardSpec`), later the lines `stop` (ask, wait, kill) and `kill` (at once). Its end
  means that the owner is gone, even by SIGKILL, and is treated as `stop`.
* stdout: lines of JSON, `{"started": pid}`, then `{"exited": status}` once everything is cleaned up.

A `tritonserver` that has died is reaped at once, since its stubs live on while it is a zombie. It gets SIGTERM from
the kernel when the guard itself is killed; that signal is bound to the thread that started it, and the guard has
but one. Its log is a file and not a pipe, so that nothing can ever block it; the guard bounds the file's size.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import select
import signal
import sys
import time
from types import FrameType
from typing import Any, TypedDict


class GuardSpec(TypedDict):
    """What the guard starts and cleans up.

    Attributes:
        argv: Command line of `tritonserver`; `argv[0]` is an absolute path.
        env: Its whole environment.
        log_path: File that its stdout and stderr are appended to.
        max_log_bytes: Size beyond which the log is moved to `<log_path>.1` and begun anew.
        stop_timeout_s: Time between SIGTERM and SIGKILL.
        shm_prefix: Entries of `/dev/shm` with this prefix are removed at the end.
        paths: Files that are removed at the end: sockets.
    """

    argv: list[str]
    env: dict[str, str]
    log_path: str
    max_log_bytes: int
    stop_timeout_s: float
    shm_prefix: str
    paths: list[str]


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""Numbers of `prctl` on Linux (linux/prctl.h)."""

TICK_S = 0.5
"""How often the log's size and the owner's life are looked at, beside the events that wake the guard at once."""

REAP_TIMEOUT_S = 5.0
"""How long killed processes may take to be gone; only uninterruptible I/O takes longer."""


class Guard:
    """One `tritonserver` and all that it starts.

    Args:
        spec: What to start.
        owner_pid: Parent of this process.
        commands: What the owner has sent already.
    """

    def __init__(self, spec: GuardSpec, owner_pid: int, commands: bytes = b"") -> None:
        self.spec = spec
        self.owner_pid = owner_pid
        self.pid = 0
        self.exit_status: int | None = None
        self.kill_at: float | None = None
        self._input = commands
        self._log_fd = -1

    def run(self) -> None:
        """Start the server, wait until it ends for whatever reason, clean up, tell the owner."""
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_read, False)
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write)
        signal.signal(signal.SIGCHLD, _ignore)
        os.set_blocking(0, False)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._log_fd = os.open(self.spec["log_path"], os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.pid = self._start()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._tell({"started": self.pid})
        self._carry_out()
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(wakeup_read, select.POLLIN)
        while self.exit_status is None:
            for fd, _ in poll.poll(self._wait_ms()):
                if fd == 0:
                    if not self._read_commands():
                        poll.unregister(0)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wakeup_read, 4096)
            self._reap()
            self._bound_log()
            if os.getppid() != self.owner_pid:
                self.stop()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.kill()
        self._clean_up()
        self._tell({"exited": self.exit_status})

    def stop(self) -> None:
        """Ask the server to end; it is killed when it has not after `stop_timeout_s`."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + self.spec["stop_timeout_s"]
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the server, and every process it has started, at once."""
        self.kill_at = time.monotonic() + REAP_TIMEOUT_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop()

    def _wait_ms(self) -> int:
        if self.kill_at is None:
            return int(TICK_S * 1000)
        return int(1000 * min(TICK_S, max(0.0, self.kill_at - time.monotonic()))) + 1

    def _read_commands(self) -> bool:
        """Carry out what the owner has sent; False when there will be no more."""
        try:
            data = os.read(0, 4096)
        except BlockingIOError:
            return True
        if not data:
            self.stop()
            return False
        self._input += data
        self._carry_out()
        return True

    def _carry_out(self) -> None:
        *lines, self._input = self._input.split(b"\n")
        for line in lines:
            if line == b"stop":
                self.stop()
            elif line == b"kill":
                self.kill()

    def _start(self) -> int:
        guard_pid = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:  # In the child, which must not return from here.
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != guard_pid:  # The guard died before the line above.
                os._exit(125)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(self._log_fd, 1)
            os.dup2(self._log_fd, 2)
            os.execve(self.spec["argv"][0], self.spec["argv"], self.spec["env"])  # noqa: S606 - no shell is wanted
        except BaseException as problem:  # noqa: BLE001 - nothing may escape into the parent's code
            os.write(2, f"E0000 guard: cannot start {self.spec['argv'][0]}: {problem}\n".encode())
        os._exit(126)

    def _reap(self) -> None:
        """Collect every dead child: the server, and what it left to us as its subreaper."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.exit_status = os.waitstatus_to_exitcode(status)

    def _clean_up(self) -> None:
        """Kill whatever the server left running, then remove its files."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + REAP_TIMEOUT_S
        while time.monotonic() < deadline:
            self._reap()
            children = children_of(os.getpid())
            if not children:
                break
            for pid in children:  # Also those that have left the server's process group.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        remove_files(self.spec["shm_prefix"], self.spec["paths"])

    def _bound_log(self) -> None:
        """Copy a log that has grown too large aside, and begin it anew; what is written in between may be lost.

        The server holds the file open in append mode, so it writes on at the new end.
        """
        try:
            size = os.fstat(self._log_fd).st_size
            limit = self.spec["max_log_bytes"]
            if size > limit:
                tail = os.pread(self._log_fd, limit, size - limit)
                temporary = self.spec["log_path"] + ".1.tmp"
                with open(temporary, "wb") as copy:
                    copy.write(tail)
                os.replace(temporary, self.spec["log_path"] + ".1")
                os.ftruncate(self._log_fd, 0)
        except OSError:  # A full disk: the next round tries again, and the server does not mind.
            with contextlib.suppress(OSError):
                os.ftruncate(self._log_fd, 0)

    def _tell(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # The owner is gone.
            os.write(1, json.dumps(event).encode() + b"\n")


def prctl(option: int, value: int) -> None:
    """Call prctl(2), which the standard library lacks; a kernel that refuses it is no reason not to serve."""
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def children_of(parent: int) -> list[int]:
    """Process ids of living and dead children of a process."""
    children = []
    for path in glob.iglob("/proc/[0-9]*/stat"):
        try:
            with open(path, "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:  # Gone meanwhile.
            continue
        if int(fields[1]) == parent:
            children.append(int(path.split("/")[2]))
    return children


def remove_files(shm_prefix: str, paths: list[str]) -> None:
    """Remove shared memory by prefix, and files by path."""
    regions = glob.glob(f"/dev/shm/{glob.escape(shm_prefix)}*") if shm_prefix else []  # noqa: S108 - shared memory
    for path in [*regions, *paths]:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Have the signal, which then interrupts `poll`."""


def read_spec() -> tuple[GuardSpec, bytes]:
    """Read the first line of stdin; what came with it is returned beside it."""
    data = b""
    while b"\n" not in data:
        part = os.read(0, 65536)
        if not part:
            raise SystemExit("the owner is gone before it said what to start")
        data += part
    line, _, rest = data.partition(b"\n")
    spec: GuardSpec = json.loads(line)
    return spec, rest


if __name__ == "__main__":
    parent = os.getppid()
    first, others = read_spec()
    Guard(first, parent, others).run()
    sys.exit(0)
