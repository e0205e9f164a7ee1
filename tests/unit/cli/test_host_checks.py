"""Each check of the machine says in one sentence what is wrong and what to do."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.cli.deployments_file import DeploymentsFile
from serve_app.cli.host_checks import (
    Listener,
    PortUse,
    check_haproxy,
    check_open_files,
    check_ports,
    listener_on,
    port_problem,
    ports_to_use,
)
from serve_app.cli.processes import MARKER
from serve_app.cli.run_folder import RunFolder
from serve_app.errors import PreflightFailed
from serve_app.settings import LauncherSettings

FOLDER = RunFolder(Path("/tmp/sa-test"))
FILE = DeploymentsFile(
    path=Path("/srv/deployments.yaml"),
    config={"applications": []},
    host="127.0.0.1",
    http_port=8000,
    grpc_port=9000,
    applications=("a",),
    routed=("a",),
    routes=("",),
)
HTTP = PortUse("HTTP", "127.0.0.1", 8000, "--http-port")


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_every_fixed_port_of_the_mode_is_checked() -> None:
    """HAProxy and the proxy behind it need ports that deployments.yaml does not show; Ray's own proxy does not."""
    haproxy = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_STATS_PORT": "8405"}
    assert [use.port for use in ports_to_use(FILE, LauncherSettings(), haproxy)] == [
        *(8000, 9000, 8265, 8405, 9101, 8500, 9500)
    ]
    assert [use.port for use in ports_to_use(FILE, LauncherSettings(), {})] == [8000, 9000, 8265]


def test_a_taken_port_names_its_process(listening: int) -> None:
    """Whoever finds a port taken is told by whom, and by which option to have another."""
    with pytest.raises(PreflightFailed) as caught:
        check_ports([PortUse("HTTP", "127.0.0.1", listening, "--http-port")], folder=FOLDER)
    assert f"process {os.getpid()}) holds port {listening} (HTTP)." in caught.value.problem
    assert caught.value.fix == "stop that process, or choose another port with --http-port."


def test_a_port_of_an_earlier_run_is_known_by_its_marker() -> None:
    """Whatever its name, a leftover of an instance is told from a stranger, and the fix is `serve-app down`."""
    script = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "time.sleep(60)"
    )
    environ = {**os.environ, MARKER: FOLDER.marker_prefix + secrets.token_hex(4)}
    with subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        owner = listener_on(port)
        process.kill()
    assert owner is not None
    problem, fix = port_problem(PortUse("HTTP", "127.0.0.1", port, "--http-port"), owner, FOLDER)
    assert problem.startswith("A leftover python")
    assert fix == "run `serve-app down`."


@pytest.mark.parametrize(
    ("owner", "problem", "fix"),
    [
        (
            Listener(7, "haproxy", is_orphan=True, marker=None),
            "A leftover HAProxy of an earlier Ray (process 7) holds port 8000 (HTTP).",
            "run `kill 7`, or choose another port with --http-port.",
        ),
        (
            Listener(7, "haproxy", is_orphan=False, marker=None),
            "haproxy (process 7) holds port 8000 (HTTP).",
            "stop that process, or choose another port with --http-port.",
        ),
        (
            Listener(7, "haproxy", is_orphan=True, marker="/tmp/other#1"),
            "haproxy of the instance in /tmp/other (process 7) holds port 8000 (HTTP).",
            "run `SERVE_APP_RUN_DIR=/tmp/other serve-app down`, or choose another port with --http-port.",
        ),
    ],
)
def test_who_holds_a_port_decides_the_fix(owner: Listener, problem: str, fix: str) -> None:
    """An orphan is to be killed, a living program to be left alone or stopped by its own means."""
    assert port_problem(HTTP, owner, FOLDER) == (problem, fix)


def test_two_uses_of_one_port_are_refused() -> None:
    """The second server would fail minutes later."""
    with pytest.raises(PreflightFailed, match="gRPC and HTTP would both use port 8000"):
        check_ports([HTTP, PortUse("gRPC", "127.0.0.1", 8000, "--grpc-port")], folder=FOLDER)


def test_a_port_that_is_no_number_is_named() -> None:
    """A slip in a variable is found before Ray falls over it."""
    environ = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_METRICS_PORT": "91o1"}
    with pytest.raises(PreflightFailed, match=r"RAY_SERVE_HAPROXY_METRICS_PORT is '91o1'"):
        ports_to_use(FILE, LauncherSettings(), environ)


def test_haproxy_must_be_there() -> None:
    """Ray's own is found; a path of the user's must exist."""
    check_haproxy({})
    with pytest.raises(PreflightFailed, match="there is no file /nowhere/haproxy"):
        check_haproxy({"RAY_SERVE_HAPROXY_BINARY_PATH": "/nowhere/haproxy"})


def test_a_low_limit_on_open_files_is_refused() -> None:
    """HAProxy would end at once with an alert in a log that nobody reads; the fix that is named is enough."""
    with pytest.raises(PreflightFailed, match=r"may open 4096 files .* RAY_SERVE_HAPROXY_MAXCONN=1984"):
        check_open_files({}, hard_limit=4096)
    check_open_files({"RAY_SERVE_HAPROXY_MAXCONN": "1984"}, hard_limit=4096)
    check_open_files({}, hard_limit=-1)
