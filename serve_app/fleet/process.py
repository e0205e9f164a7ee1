"""One life of one `tritonserver`: start it under its guard, wait until it is ready, watch it, stop it within a bound.

Uses no signals and no asyncio child watcher, so it runs in any event loop in any thread: the guard tells over a
pipe what becomes of the server, and the end of that pipe is the guard's own end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from serve_app.clock import Clock, MonotonicClock
from serve_app.errors import ServeAppError, ServerStartFailed
from serve_app.fleet import guard
from serve_app.fleet.command import Listen
from serve_app.fleet.life import LifeTag
from serve_app.fleet.probe import ServerProbe
from serve_app.fleet.server_log import is_port_taken, last_errors, read_tail

KILL_MARGIN_S = 2.0
"""Time after `--exit-timeout-secs` at which a server that is still there is killed."""

REAP_MARGIN_S = 8.0
"""Time that the guard may take beyond that; afterwards the owner kills guard and server itself."""

READY_POLL_S = 0.05
"""Pause between two looks at a starting server."""


def free_ports(host: str, count: int) -> list[int]:
    """Ports of `host` that nothing listens on now; somebody else may take one before the server does.

    Raises:
        ServerStartFailed: The address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(count)]
        try:
            for each in sockets:
                each.bind((host, 0))
        except OSError as problem:
            raise ServerStartFailed("tritonserver", f"cannot listen on {host}: {problem.strerror}") from None
        return [int(each.getsockname()[1]) for each in sockets]


class TritonProcess:
    """A `tritonserver` and its guard, from start to end; made once per life.

    Use with `async with`: leaving it stops the server, shielded from cancellation.

    Args:
        argv: Command line, see `command.server_command`.
        env: Environment of the server.
        listen: Where it will listen.
        server_id: The `--id` in `argv`.
        tag: Names its shared memory and sockets.
        log_path: Its log.
        max_log_bytes: Bound of the log.
        stop_timeout_s: The `--exit-timeout-secs` in `argv`.
        secret: The secret in `argv`; empty: none.
        clock: Monotonic clock.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        listen: Listen,
        server_id: str,
        tag: LifeTag,
        log_path: Path,
        max_log_bytes: int,
        stop_timeout_s: float,
        secret: str = "",
        clock: Clock | None = None,
    ) -> None:
        self.listen = listen
        self.server_id = server_id
        self.log_path = log_path
        self.secret = secret
        self.probe = ServerProbe(listen.target, secret=secret)
        self.pid: int | None = None
        self.exit_status: int | None = None
        self.exited = asyncio.Event()
        self._clock = clock or MonotonicClock()
        self._stop_timeout_s = stop_timeout_s + KILL_MARGIN_S
        self._spec: guard.GuardSpec = {
            "argv": list(argv),
            "env": dict(env),
            "log_path": str(log_path),
            "max_log_bytes": max_log_bytes,
            "stop_timeout_s": self._stop_timeout_s,
            "shm_prefix": tag.shm_prefix,
            "paths": [listen.bound_socket_path] if listen.socket_path else [],
        }
        self._guard: subprocess.Popen[bytes] | None = None
        self._events = b""
        self._ending: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        if self.exited.is_set():
            state = f"ended with {self.exit_status}"
        else:
            state = "running" if self.pid is not None else "not started"
        return f"<TritonProcess {self.server_id} at {self.listen.target}: pid {self.pid}, {state}>"

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._guard is not None and not self.exited.is_set()

    @property
    def guard_pid(self) -> int | None:
        """Process id of the guard."""
        return self._guard.pid if self._guard is not None else None

    async def __aenter__(self) -> TritonProcess:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def start(self) -> None:
        """Start guard and server; returns before either has done anything. Needs a running loop.

        Raises:
            ServerStartFailed: The guard cannot be started.
        """
        # No code of ours runs between fork and exec (no `preexec_fn`), so that live gRPC threads do no harm, and
        # closing all other descriptors keeps our end of its pipes out of every other child.
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self.log_path.open("ab") as log:
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", guard.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                    start_new_session=True,
                )
        except OSError as problem:
            raise ServerStartFailed(self._what, f"cannot start its guard: {problem.strerror}") from None
        assert self._guard.stdout is not None
        os.set_blocking(self._guard.stdout.fileno(), False)
        asyncio.get_running_loop().add_reader(self._guard.stdout.fileno(), self._on_event)
        # Fits a pipe's 64 KiB in any sane environment; beyond that it waits for the guard, which reads at once.
        self._send(json.dumps(self._spec).encode() + b"\n")

    async def wait_ready(self, timeout_s: float) -> str:
        """Wait until this very server, and no other at its address, says that it is ready.

        Args:
            timeout_s: Budget in seconds.

        Returns:
            The server's release, as in `2.51.0`.

        Raises:
            ServerStartFailed: It ended, or was not ready in time; the reason is from its log.
        """
        deadline = self._clock.now() + timeout_s
        while not self.exited.is_set():
            with contextlib.suppress(ServeAppError):
                name, version = await self.probe.server_name(timeout_s=1.0)
                if name == self.server_id and await self.probe.is_ready(timeout_s=1.0):
                    return version
            if self._clock.now() >= deadline:
                reason = f"it was not ready within {timeout_s:.3g} s"
                raise ServerStartFailed(self._what, f"{reason}; its log is {self.log_path}")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.exited.wait(), READY_POLL_S)
        raise ServerStartFailed(self._what, self.exit_reason())

    def exit_reason(self) -> str:
        """Why it ended: its status, and the last errors in its log."""
        status = self.exit_status
        if status is None:
            how = "its guard was killed"
        elif status < 0:
            with contextlib.suppress(ValueError):
                return f"it was ended by {signal.Signals(-status).name}"
            how = f"it was ended by signal {-status}"
        else:
            how = f"it ended with status {status}"
        errors = last_errors(read_tail(self.log_path))
        return f"{how}: {errors}" if errors else f"{how}; its log is {self.log_path}"

    @property
    def is_port_taken(self) -> bool:
        """Whether it ended since another process took one of its ports first."""
        return self.exited.is_set() and self.exit_status == 1 and is_port_taken(read_tail(self.log_path))

    def kill(self) -> None:
        """End the server and its stubs at once; `exited` follows."""
        self._send(b"kill\n")

    async def aclose(self) -> None:
        """Stop: SIGTERM, which lets calls under way finish, then SIGKILL; returns when nothing is left.

        Takes at most the stop timeout and a margin. Goes on when the caller is cancelled.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self.probe.aclose()
        if self._guard is None:
            return
        self._send(b"stop\n")
        try:
            await asyncio.wait_for(self.exited.wait(), self._stop_timeout_s + REAP_MARGIN_S)
        except asyncio.TimeoutError:
            self._guard.kill()
            await self.exited.wait()

    @property
    def _what(self) -> str:
        return f"tritonserver {self.server_id}"

    def _send(self, data: bytes) -> None:
        if self._guard is None or self._guard.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):  # It is gone, which `_on_event` finds out.
            self._guard.stdin.write(data)

    def _on_event(self) -> None:
        """Read what the guard says; called by the loop."""
        assert self._guard is not None
        assert self._guard.stdout is not None
        try:
            data = os.read(self._guard.stdout.fileno(), 4096)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._guard.stdout.fileno())
            self._ending = asyncio.ensure_future(self._end())
            return
        *lines, self._events = (self._events + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            self.pid = event.get("started", self.pid)
            self.exit_status = event.get("exited", self.exit_status)

    async def _end(self) -> None:
        """The guard is gone: clean up what it could not, if it was killed."""
        assert self._guard is not None
        if self.exit_status is None and self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            # Its group has an id until the last stub is gone and reaped, here by init or the nearest subreaper.
            for _ in range(100):
                try:
                    os.killpg(self.pid, 0)
                except OSError:
                    break
                await asyncio.sleep(0.02)
        if self.exit_status is None:
            guard.remove_files(self._spec["shm_prefix"], self._spec["paths"])
        while self._guard.poll() is None:  # noqa: ASYNC110 - its pipe has ended, so it takes a moment at most
            await asyncio.sleep(0.005)
        for pipe in (self._guard.stdin, self._guard.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.exited.set()
