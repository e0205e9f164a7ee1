"""The command line of one `tritonserver`, as a pure function of the settings and what was chosen for this life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serve_app.endpoint import ADMIN_PROTOCOLS, SECRET_NAME
from serve_app.settings import TritonServerArgs

UNIX_SOCKET_SUFFIX_PORT = 8001
"""Triton appends `:<grpc-port>` to the path of a unix socket; the path alone makes it unique."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Where one server listens.

    Attributes:
        grpc_host: Address that gRPC binds; empty with a unix socket.
        grpc_port: TCP port of gRPC; unused with a unix socket.
        socket_path: Path of the unix socket without the suffix that Triton appends; empty for TCP.
        metrics_port: TCP port on 127.0.0.1 of the Prometheus metrics.
        http_port: TCP port on 127.0.0.1 of Triton's own HTTP endpoint; `None` leaves it closed.
    """

    grpc_host: str
    grpc_port: int
    socket_path: str
    metrics_port: int
    http_port: int | None = None

    @property
    def bound_socket_path(self) -> str:
        """File that appears when the server listens on a unix socket; empty for TCP."""
        return f"{self.socket_path}:{UNIX_SOCKET_SUFFIX_PORT}" if self.socket_path else ""

    @property
    def target(self) -> str:
        """What gRPC clients connect to."""
        if self.socket_path:
            return f"unix:{self.bound_socket_path}"
        host = f"[{self.grpc_host}]" if ":" in self.grpc_host else self.grpc_host
        return f"{host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """Prometheus metrics, reachable from this node alone."""
        return f"http://127.0.0.1:{self.metrics_port}/metrics"


def server_command(
    args: TritonServerArgs,
    *,
    tritonserver: Path,
    backend_directory: Path,
    cache_directory: Path | None,
    repository: Path,
    models: Sequence[str],
    can_disable_auto_complete: bool,
    listen: Listen,
    server_id: str,
    shm_prefix: str,
    secret: str = "",
) -> list[str]:
    """Build the argument list.

    A model that does not load must not keep the others away: `--exit-on-error=false`, and readiness that does not
    depend on every model. `server_id` becomes the name in the server's metadata, so that a probe knows that it
    reached this server and not another that took the port first.

    Args:
        args: Settings; `extra_arguments` come last and win.
        tritonserver: The binary.
        backend_directory: Backends.
        cache_directory: Response cache implementations; `None` for the binary's default.
        repository: Model repository.
        models: Models loaded at start.
        can_disable_auto_complete: Whether every model has a full config.
        listen: Addresses.
        server_id: This life's id.
        shm_prefix: Prefix of the python backend's shared memory, unique on the node.
        secret: What callers of `endpoint.ADMIN_RPCS` have to show; empty: nothing.

    Returns:
        `argv`.
    """
    if listen.socket_path:
        address = [f"--grpc-address=unix:{listen.socket_path}", f"--grpc-port={UNIX_SOCKET_SUFFIX_PORT}"]
    else:
        address = [f"--grpc-address={listen.grpc_host}", f"--grpc-port={listen.grpc_port}"]
    command = [
        str(tritonserver),
        f"--id={server_id}",
        f"--model-repository={repository}",
        f"--backend-directory={backend_directory}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in models),
        "--exit-on-error=false",
        "--strict-readiness=false",
        f"--exit-timeout-secs={args.stop_timeout_s}",
        *address,
        "--allow-metrics=true",
        "--metrics-address=127.0.0.1",
        f"--metrics-port={listen.metrics_port}",
        f"--allow-gpu-metrics={'true' if args.num_gpus > 0 else 'false'}",
        f"--log-verbose={args.log_verbose}",
        "--backend-config=python,thread-pool-size=2",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
    ]
    if listen.http_port is None:
        command.append("--allow-http=false")
    else:
        command += ["--allow-http=true", "--http-address=127.0.0.1", f"--http-port={listen.http_port}"]
    if secret:
        command.append(f"--grpc-restricted-protocol={ADMIN_PROTOCOLS}:{SECRET_NAME}={secret}")
        if listen.http_port is not None:
            command.append(f"--http-restricted-api={ADMIN_PROTOCOLS}:{SECRET_NAME}={secret}")
    if cache_directory is not None:
        command.append(f"--cache-directory={cache_directory}")
    if can_disable_auto_complete:
        command.append("--disable-auto-complete-config")
    return [*command, *args.extra_arguments]
