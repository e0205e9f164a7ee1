"""Everything that would make `tritonserver` fail, hang or starve later, checked before anything is started.

Each check raises `PreflightFailed` with one sentence of problem and one of fix. They take what they look at as
arguments, with the machine's own as defaults. All block, for some milliseconds.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from serve_app.errors import PreflightFailed
from serve_app.fleet.repository import RepositoryModel, list_models
from serve_app.fleet.runtime import RuntimeSource, TritonRuntime, loaded_objects
from serve_app.settings import MIB, TritonServerArgs

PYTHON_VERSIONS = ((3, 10), (3, 13))
"""Oldest and newest Python for which both Ray and a python backend stub exist."""

ARCHITECTURES = ("x86_64", "aarch64")
"""What the pinned wheel is built for."""

MIN_GLIBC = (2, 35)
"""From the wheel's tag, manylinux_2_35."""

MIN_MEMORY_BYTES = 512 * MIB
"""A server is 40-120 MiB and each python stub 40-70 MiB, before any weights."""

MIN_DISK_BYTES = 256 * MIB
"""Logs of a few lives, and models that are fetched."""

MIN_SHARED_MEMORY_BYTES = 32 * MIB
"""Each python model instance takes 1 MiB of `/dev/shm` and grows with its largest batch."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is, not a place for temporary files

MAX_SOCKET_PATH = 107
"""Longest path of a unix socket on Linux (`sun_path` of 108 bytes, the last one a NUL)."""


def check_host(
    args: TritonServerArgs,
    *,
    runtime: TritonRuntime,
    repository: Path,
    state_dir: Path,
    environ: Mapping[str, str] = os.environ,
) -> list[RepositoryModel]:
    """Run every check that one server of the fleet needs on this machine.

    Args:
        args: What is to be started.
        runtime: From `TritonRuntime.find`.
        repository: Absolute path of the model repository.
        state_dir: Folder for logs and sockets.
        environ: Environment that `tritonserver` will get, before `runtime` adds to it.

    Returns:
        The models that will be loaded at start.

    Raises:
        PreflightFailed: The first check that failed.
    """
    check_python()
    if runtime.source is RuntimeSource.WHEEL:
        check_architecture()
        check_glibc()
    models = check_repository(repository, args.models)
    check_stub(runtime, environ=environ)
    check_shared_memory()
    check_memory()
    check_disk(state_dir)
    return models


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> None:
    """Refuse a Python that Ray or the python backend does not support."""
    oldest, newest = PYTHON_VERSIONS
    if not oldest <= version <= newest:
        raise PreflightFailed(
            f"This is Python {version[0]}.{version[1]}.",
            "use Python 3.10, 3.11, 3.12 or 3.13 for the virtual environment.",
        )


def check_architecture(machine: str | None = None, system: str | None = None) -> None:
    """Refuse a machine for which the pinned wheel has no binary."""
    machine, system = machine or platform.machine(), system or platform.system()
    if system != "Linux" or machine not in ARCHITECTURES:
        raise PreflightFailed(
            f"There is no tritonserver wheel for {system} on {machine}.",
            f"use Linux on {' or '.join(ARCHITECTURES)}, or name servers that run elsewhere in `endpoints:`.",
        )


def check_glibc(version: str | None = None) -> None:
    """Refuse a C library that is older than the one the wheel was built for, or another one (musl)."""
    if version is None:
        name, version = platform.libc_ver()
        if name != "glibc":
            version = ""
    needed = ".".join(map(str, MIN_GLIBC))
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        raise PreflightFailed(
            "This system has no GNU C library (glibc).", f"use a distribution with glibc {needed} or newer."
        ) from None
    if (major, minor) < MIN_GLIBC:
        raise PreflightFailed(
            f"The C library is glibc {version}; tritonserver needs {needed} or newer.",
            "use Debian 12, Ubuntu 22.04 or newer, or NVIDIA's container image.",
        )


def check_stub(runtime: TritonRuntime, *, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to start where the python backend's stub cannot run: `tritonserver` would then hang for ever."""
    if runtime.stub is None:
        return
    if not runtime.stub.exists():
        raise PreflightFailed(
            f"The python backend's stub is missing: {runtime.stub}.", "install the Triton runtime again."
        )
    objects = loaded_objects(runtime.stub, runtime.environment(environ))
    missing = sorted(name for name, path in objects.items() if path is None)
    for name in missing:
        if name.startswith("libpython"):
            version = name.removeprefix("libpython").split(".so")[0]
            raise PreflightFailed(
                f"The shared library {name} is not on this machine; Python models cannot run without it.",
                f"install it (`apt install libpython{version}`), or use Python 3.13, whose library is bundled.",
            )
    if missing:
        raise PreflightFailed(
            f"The python backend's stub lacks the shared libraries {', '.join(missing)}.",
            "install the Triton runtime again, and do not move its folder.",
        )


def check_shared_memory(folder: Path = SHARED_MEMORY, *, min_bytes: int = MIN_SHARED_MEMORY_BYTES) -> None:
    """Refuse a `/dev/shm` that cannot be written to or is nearly full: python models live in it."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as problem:
        raise PreflightFailed(
            f"{folder} cannot be written to ({problem.strerror}).", "mount a tmpfs there that this user may write to."
        ) from None
    if free < min_bytes:
        raise PreflightFailed(
            f"{folder} has {free // MIB} MiB free; at least {min_bytes // MIB} MiB are needed.",
            "remove what is left there, or give the container more (`docker run --shm-size=1g`).",
        )


def check_memory(available_bytes: int | None = None, *, min_bytes: int = MIN_MEMORY_BYTES) -> None:
    """Refuse a machine, or a container, with too little memory left for one server."""
    available = available_memory_bytes() if available_bytes is None else available_bytes
    if available < min_bytes:
        raise PreflightFailed(
            f"{available // MIB} MiB of memory are available; at least {min_bytes // MIB} MiB are needed.",
            "stop what else runs here, or raise the container's memory limit.",
        )


def available_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that new processes can use: the machine's, or what is left of the container's limit (cgroup v2)."""
    available = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        statistics = dict(
            line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines() if line
        )
    except (OSError, ValueError):  # Not in a container, or no limit ("max").
        return available
    # Page cache that the kernel gives back first is not in use.
    reclaimable = int(statistics.get("inactive_file", 0))
    return max(0, min(available, limit - used + reclaimable))


def check_disk(folder: Path, *, min_bytes: int = MIN_DISK_BYTES) -> None:
    """Refuse a folder that cannot be made or written to, or whose disk is nearly full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as problem:
        raise PreflightFailed(
            f"{folder} cannot be written to ({problem.strerror}).", "choose another folder, or change its permissions."
        ) from None
    if free < min_bytes:
        raise PreflightFailed(
            f"The disk of {folder} has {free // MIB} MiB free; at least {min_bytes // MIB} MiB are needed.",
            "make room, or choose a folder on another disk.",
        )


def check_repository(repository: Path, models: Sequence[str] = ()) -> list[RepositoryModel]:
    """Refuse a repository from which nothing, or not all that is asked for, can be loaded.

    Args:
        repository: Folder of models.
        models: Models asked for; empty means every one that has a version folder.

    Returns:
        The models to load. A model that is broken inside is Triton's to find: the others are served beside it.
    """
    try:
        found = {model.name: model for model in list_models(repository)}
    except FileNotFoundError:
        raise PreflightFailed(
            f"The model repository {repository} does not exist.", "correct `model_repository:`, or set SERVE_APP_HOME."
        ) from None
    except OSError as problem:
        raise PreflightFailed(
            f"The model repository {repository} cannot be read ({problem.strerror}).",
            "`model_repository:` must be a folder this user may read.",
        ) from None
    for name in models:
        if name not in found:
            raise PreflightFailed(
                f"There is no model {name!r} in {repository}.",
                f"correct `models:`; there are {', '.join(found) or 'none'}.",
            )
        if not found[name].is_servable:
            raise PreflightFailed(
                f"The model {name!r} in {repository} has no version folder.",
                f"build or fetch it, so that there is a folder {name}/1, or take it out of `models:`.",
            )
    chosen = [found[name] for name in dict.fromkeys(models)] or [m for m in found.values() if m.is_servable]
    if not chosen:
        raise PreflightFailed(
            f"The model repository {repository} has no model that can be served.",
            "put in a folder per model, with `config.pbtxt` and a version folder such as `1/`.",
        )
    return chosen


def check_port(host: str, port: int, *, what: str = "The port") -> None:
    """Refuse an address that something else listens on, or that is not this machine's.

    Args:
        host: Address to bind; `0.0.0.0` for all.
        port: TCP port; 0 is always free.
        what: How the error names it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do, so that connections of an earlier life in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE:
                raise PreflightFailed(
                    f"{what} {host}:{port} is taken{_port_owner(port)}.", "stop that process, or choose another port."
                ) from None
            raise PreflightFailed(
                f"{what} {host}:{port} cannot be used ({problem.strerror}).", "choose another address or port."
            ) from None


def _port_owner(port: int) -> str:
    try:
        connections = psutil.net_connections(kind="tcp")
        pid = next(c.pid for c in connections if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN)
        return f" by process {pid} ({psutil.Process(pid).name()})" if pid else ""
    except (psutil.Error, OSError, StopIteration):
        return ""  # Another user's process: the port is taken all the same.


def check_socket_path(path: str) -> None:
    """Refuse a unix socket path that the kernel would not take."""
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH:
        raise PreflightFailed(
            f"The socket path {path} has {size} bytes; the kernel takes {MAX_SOCKET_PATH}.",
            "choose a shorter state folder, or `transport: tcp`.",
        )
