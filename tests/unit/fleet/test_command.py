"""The command line of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serve_app.fleet.command import Listen, server_command
from serve_app.settings import TritonServerArgs

TCP = Listen("10.0.0.5", 4001, "", 4002)


def command(args: TritonServerArgs | None = None, **changes: Any) -> list[str]:
    """A command with everything that a test does not care about filled in."""
    values: dict[str, Any] = {
        "tritonserver": Path("/t/tritonserver"),
        "backend_directory": Path("/t/backends"),
        "cache_directory": None,
        "repository": Path("/models"),
        "models": ["a", "b"],
        "can_disable_auto_complete": True,
        "listen": TCP,
        "server_id": "life-1",
        "shm_prefix": "p_",
    }
    return server_command(args or TritonServerArgs(), **{**values, **changes})


def test_defaults() -> None:
    """One broken model stops neither start nor readiness; models are loaded by name; metrics stay on this machine."""
    argv = command()
    assert argv[0] == "/t/tritonserver"
    for expected in (
        "--id=life-1",
        "--model-control-mode=explicit",
        "--load-model=a",
        "--load-model=b",
        "--exit-on-error=false",
        "--strict-readiness=false",
        "--exit-timeout-secs=8",
        "--grpc-address=10.0.0.5",
        "--grpc-port=4001",
        "--metrics-address=127.0.0.1",
        "--metrics-port=4002",
        "--allow-http=false",
        "--allow-gpu-metrics=false",
        "--disable-auto-complete-config",
        "--backend-config=python,thread-pool-size=2",
        "--backend-config=python,shm-region-prefix-name=p_",
    ):
        assert expected in argv
    assert not any(argument.startswith("--cache-directory") for argument in argv)


def test_switches() -> None:
    """GPU metrics need a GPU, HTTP is opened on this machine only when asked, and extra arguments come last."""
    args = TritonServerArgs(num_gpus=0.5, allow_http=True, log_verbose=1, extra_arguments=["--log-info=false"])
    argv = command(args, can_disable_auto_complete=False, listen=Listen("h", 1, "", 2, 3), cache_directory=Path("/c"))
    assert "--allow-gpu-metrics=true" in argv
    assert argv[argv.index("--allow-http=true") + 1 :][:2] == ["--http-address=127.0.0.1", "--http-port=3"]
    assert "--cache-directory=/c" in argv
    assert "--log-verbose=1" in argv
    assert "--disable-auto-complete-config" not in argv
    assert argv[-1] == "--log-info=false"


def test_addresses() -> None:
    """Clients are told what the server listens on: Triton appends a port to socket paths; IPv6 needs brackets."""
    listen = Listen("", 0, "/run/x.sock", 4002)
    argv = command(listen=listen)
    assert "--grpc-address=unix:/run/x.sock" in argv
    assert listen.bound_socket_path == "/run/x.sock:8001"
    assert listen.target == "unix:/run/x.sock:8001"
    assert "--grpc-port=8001" in argv
    assert TCP.target == "10.0.0.5:4001"
    assert TCP.bound_socket_path == ""
    assert Listen("::1", 5, "", 6).target == "[::1]:5"
    assert TCP.metrics_url == "http://127.0.0.1:4002/metrics"
