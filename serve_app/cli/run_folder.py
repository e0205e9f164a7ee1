"""The folder of a running instance: where its state, Ray's session and all its sockets lie, and nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from serve_app.errors import PreflightFailed

MAX_PATH_BYTES = 25
"""Longest path of the folder. The longest socket below it is HAProxy's admin socket while it is replaced:
`/h/<56 digits of the node>/admin.sock.<7 digits of the process>.tmp`, and the kernel takes 107 bytes."""

NUM_KEPT_LOGS = 3
"""Earlier runs whose logs are kept."""


@dataclass(frozen=True)
class InstanceState:
    """What a later `serve-app` must know of a running instance; the content of `state.json`.

    Attributes:
        instance: The marker in the environment of every process of the instance.
        launcher_pid: Process of `serve-app up`.
        launcher_started: Its start in seconds since the epoch, since process ids are used again.
        deployments: Path of the file that was deployed.
        host: Where a client on this machine reaches HTTP.
        http_port: HTTP port.
        routes: Route prefixes below which models are served, as `DeploymentsFile.routes`.
        key: API key with which models are looked at; the replicas know its hash by their environment.
        grpc_port: gRPC port; `None` where no gRPC service is registered.
        dashboard_port: Ray's dashboard and REST API on 127.0.0.1.
        ports: Every fixed port of the instance.
    """

    instance: str
    launcher_pid: int
    launcher_started: float
    deployments: str
    host: str
    http_port: int
    grpc_port: int | None
    dashboard_port: int
    ports: tuple[int, ...]
    routes: tuple[str, ...] = ("",)
    key: str = field(default="", repr=False)

    @property
    def is_launcher_alive(self) -> bool:
        """Whether the very process that wrote this still runs."""
        try:
            process = psutil.Process(self.launcher_pid)
            alive = process.status() != psutil.STATUS_ZOMBIE
            return alive and abs(process.create_time() - self.launcher_started) < 2.0
        except psutil.Error:
            return False


@dataclass(frozen=True)
class RunFolder:
    """Paths below one run folder, and the state in it.

    Attributes:
        path: The folder; it exists while an instance runs, or one was killed.
    """

    path: Path

    @classmethod
    def choose(cls, setting: str | None) -> RunFolder:
        """The folder of the settings, else the user's own below `/tmp`."""
        default = f"/tmp/serve-app-{os.getuid()}"  # noqa: S108 - short, and refused where it is another user's
        return cls(Path(setting or default).absolute())

    @property
    def marker_prefix(self) -> str:
        """Start of the marker of every instance that ever ran in this folder."""
        return f"{self.path}#"

    @property
    def ray(self) -> Path:
        """Ray's temporary folder."""
        return self.path / "r"

    @property
    def haproxy(self) -> Path:
        """HAProxy's configuration and sockets."""
        return self.path / "h"

    @property
    def temporary(self) -> Path:
        """`TMPDIR` of every process of the instance."""
        return self.path / "t"

    @property
    def logs(self) -> Path:
        """Logs of Ray, Serve and the replicas while the instance runs."""
        return self.ray / "session_latest" / "logs"

    @property
    def head_log(self) -> Path:
        """What `ray start` prints."""
        return self.path / "ray-start.log"

    @property
    def driver_env(self) -> Path:
        """To be sourced by programs that connect to the instance."""
        return self.path / "driver.env"

    @property
    def state_file(self) -> Path:
        """Where `InstanceState` is."""
        return self.path / "state.json"

    @property
    def lock_file(self) -> Path:
        """Beside the folder; holds the process id of whoever holds the lock."""
        return Path(f"{self.path}.lock")

    def check(self) -> None:
        """Refuse a path that is too long for sockets, or a folder of somebody else.

        Raises:
            PreflightFailed: With what to do instead.
        """
        size = len(os.fsencode(self.path))
        if size > MAX_PATH_BYTES:
            raise PreflightFailed(
                f"The run folder {self.path} has {size} bytes; sockets below it leave room for {MAX_PATH_BYTES}.",
                "set SERVE_APP_RUN_DIR to a shorter path, such as /tmp/serve.",
            )
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PreflightFailed(
                f"{self.path} is not a folder of this user.", "remove it, or set SERVE_APP_RUN_DIR to another path."
            )

    def create(self) -> None:
        """Make the folder and those below it, for this user only."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        for folder in (self.ray, self.haproxy, self.temporary):
            folder.mkdir(mode=0o700, exist_ok=True)

    def remove(self) -> None:
        """Remove the folder and all below it; no process may use it any more."""
        shutil.rmtree(self.path, ignore_errors=True)

    def read_state(self) -> InstanceState | None:
        """The state of the instance that runs here, or was killed here; `None` without one."""
        try:
            values: dict[str, Any] = json.loads(self.state_file.read_text(encoding="utf-8"))
            return InstanceState(**{**values, "ports": tuple(values["ports"]), "routes": tuple(values["routes"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write_state(self, state: InstanceState) -> None:
        """Write the state so that a reader finds all of it or none."""
        draft = self.state_file.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(state), indent=2), encoding="utf-8")
        draft.replace(self.state_file)

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the right to start or clean up here; yields `False` where another process holds it.

        The lock is the kernel's and ends with its process, however that ends. It is taken on a file beside the
        folder, which is removed by whoever holds the lock.
        """
        path = self.lock_file
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as problem:
            raise PreflightFailed(
                f"{path} cannot be opened ({problem.strerror}).",
                "remove it if it is another user's, or set SERVE_APP_RUN_DIR to a path in a folder you may write to.",
            ) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if not _is_still_at(path, descriptor):  # Its last holder removed it between our open and our lock.
                yield False
                return
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def lock_holder(self) -> int | None:
        """Process id of whoever holds the lock; only to be trusted while `locked` yields `False`."""
        try:
            return int(self.lock_file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def keep_logs(self, folder: Path, name: str) -> Path | None:
        """Move the logs out of the folder before it is removed; those of earlier runs go, but for a few.

        Args:
            folder: Where kept logs lie.
            name: Name of this run's logs; sorts by time.

        Returns:
            Where they are now, or `None` where there were none or they cannot be moved.
        """
        kept = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.logs.is_dir():
                shutil.move(str(self.logs.resolve()), kept)
            if self.head_log.is_file():
                kept.mkdir(exist_ok=True)
                shutil.move(str(self.head_log), kept / self.head_log.name)
            for old in sorted(folder.iterdir())[:-NUM_KEPT_LOGS]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError:
            return None
        return kept if kept.is_dir() else None


def _is_still_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
