"""`serve-app up` on a real Ray: it serves, and whatever ends it leaves nothing behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from serve_app.cli.exit_codes import ExitCode
from serve_app.cli.processes import find_marked, marker_of
from serve_app.cli.run_folder import RunFolder

# A start takes 20 s on an idle machine with two cores, and a multiple of that on a busy one.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]

PATIENCE_S = 180.0
SUPPORT = Path(__file__).parents[1] / "support"
REPOSITORY = Path(__file__).parents[2]
PORT_VARIABLES = (
    "SERVE_APP_HTTP_PORT",
    "SERVE_APP_GRPC_PORT",
    "SERVE_APP_DASHBOARD_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)


@dataclass
class Bench:
    """A place for one instance after the other: run folder, ports, file of applications.

    Attributes:
        tmp_path: For the file, output and kept logs.
        environ: Variables of every command.
    """

    tmp_path: Path
    environ: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.folder = RunFolder(Path(f"/tmp/sat-{secrets.token_hex(3)}"))
        self.shared_memory = f"/dev/shm/sat_{secrets.token_hex(6)}"
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PORT_VARIABLES]
            ports = [int(server.getsockname()[1]) for server in servers]
        self.ports = dict(zip(PORT_VARIABLES, ports, strict=True))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_APP_"))}
        self.environ = {
            **clean,
            **{name: str(port) for name, port in self.ports.items()},
            "SERVE_APP_RUN_DIR": str(self.folder.path),
            "XDG_STATE_HOME": str(self.tmp_path / "state"),
            "PYTHONPATH": str(SUPPORT),
        }
        self.write()

    @property
    def http_port(self) -> int:
        return self.ports["SERVE_APP_HTTP_PORT"]

    @property
    def file(self) -> Path:
        return self.tmp_path / "deployments.yaml"

    def write(self, *, args: dict[str, str] | None = None, user_config: dict[str, int] | None = None) -> None:
        """Write the file of applications."""
        app: dict[str, Any] = {"name": "tiny", "import_path": "tiny_v2:build", "route_prefix": "/"}
        app["args"] = {"shared_memory": self.shared_memory, **(args or {})}
        app["deployments"] = [{"name": "TinyV2", "user_config": user_config or {"limit": 1}}]
        self.file.write_text(yaml.safe_dump({"proxy_location": "EveryNode", "applications": [app]}))

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "serve_app.cli.main", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(self.command(*arguments), env=self.environ, capture_output=True, text=True, check=False)

    @contextlib.contextmanager
    def up(self, *arguments: str, **variables: str) -> Iterator[Launched]:
        """`serve-app up`; killed, with all it started, should the test fail."""
        output = self.tmp_path / f"up-{secrets.token_hex(2)}.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                self.command("up", str(self.file), *arguments),
                env={**self.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        launched = Launched(process, output)
        try:
            yield launched
        except BaseException:
            print(launched.text)  # pytest shows it with the failure
            raise
        finally:
            process.kill()
            process.wait()

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

    def assert_nothing_left(self) -> None:
        """No process, port, socket, folder or shared memory of any instance of this bench."""
        assert find_marked(self.folder.marker_prefix) == []
        for port in self.ports.values():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("0.0.0.0", port))  # Raises where somebody listens.
        assert not self.folder.path.exists()
        assert not self.folder.lock_file.exists()
        assert not Path(self.shared_memory).exists()


@dataclass
class Launched:
    """A running `serve-app up`.

    Attributes:
        process: The launcher.
        output: File with what it printed.
    """

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Return once `text` was printed; fails when the launcher ends before."""
        wait_until(lambda: text in self.text or self.process.poll() is not None)
        assert text in self.text, self.text

    def end(self, number: int) -> int:
        """Signal the launcher and return its exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def wait_until(condition: Callable[[], object]) -> None:
    expires_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < expires_at, "it took too long"
        time.sleep(0.05)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.run("down", "--now")
    Path(bench.shared_memory).unlink(missing_ok=True)


def test_up_serves_and_sigterm_leaves_nothing(bench: Bench) -> None:
    """One life of an instance: ready means answering, settings change in place, drivers connect, nothing is left."""
    with bench.up() as launched:
        launched.wait_for("Try:")

        (curl,) = re.findall(r"^  (curl .*)$", launched.text, re.MULTILINE)
        assert curl == f"curl -s http://127.0.0.1:{bench.http_port}/v2/models/tiny"
        before = bench.get("/settings")
        assert before["config"] == {"limit": 1}
        assert before["environ"]["TMPDIR"].startswith(str(bench.folder.path))
        assert Path(bench.shared_memory).exists()

        status = bench.run("status", "--json")
        report = json.loads(status.stdout)
        assert (status.returncode, report["status"]) == (ExitCode.OK, "running")
        assert report["readiness"] == {"state": "ready", "detail": "", "models": ["tiny"]}
        assert report["applications"][0]["replicas"] == {"TinyV2": 1}
        assert "tiny" in bench.run("status").stdout

        second = bench.run("up", str(bench.file))
        assert second.returncode == ExitCode.NOT_READY
        assert f"(process {launched.process.pid}) runs in {bench.folder.path}" in second.stderr

        check_sockets_are_private(bench)
        check_deploy_changes_settings_in_place(bench, report["dashboard"], pid=before["pid"])
        check_driver_passes_64_mb(bench)

        assert launched.end(signal.SIGTERM) == ExitCode.OK
        logs = Path(re.findall(r"Logs of this run: (.*)", launched.text)[0])
        assert (logs / "ray-start.log").is_file()
        assert list(logs.glob("serve/replica_*"))
    bench.assert_nothing_left()


def check_sockets_are_private(bench: Bench) -> None:
    """Ray, which runs what it is sent, listens on 127.0.0.1 only; a replica's own server is Serve's exception."""
    open_to_all = set()
    for process in find_marked(bench.folder.marker_prefix):
        for connection in psutil.Process(process.pid).net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and "127.0.0.1" not in connection.laddr.ip:
                open_to_all.add(process.name)
    assert open_to_all <= {"haproxy", "ray::ServeRepli"}


def check_deploy_changes_settings_in_place(bench: Bench, dashboard: str, *, pid: int) -> None:
    """`serve deploy` of the changed file works against the instance, and the replica's process stays."""
    bench.write(user_config={"limit": 2})
    command = [sys.executable, "-m", "ray.serve.scripts", "deploy", "-a", dashboard, str(bench.file)]
    subprocess.run(command, env=bench.environ, check=True, capture_output=True)
    wait_until(lambda: bench.get("/settings")["config"] == {"limit": 2})
    assert bench.get("/settings")["pid"] == pid


def check_driver_passes_64_mb(bench: Bench) -> None:
    """A plain synchronous program that sourced driver.env sends a 64 MB tensor through a handle."""
    script = (
        "import numpy, ray; from ray import serve\n"
        "ray.init(log_to_driver=False)\n"
        "handle = serve.get_app_handle('tiny')\n"
        "print(handle.size.remote(numpy.ones(2**24, numpy.float32)).result(timeout_s=60))"
    )
    shell = f'. {bench.folder.driver_env}; exec "$@"'
    run = subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-c", script],
        env=bench.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.strip().endswith(str(2**26)), run.stderr


def test_a_killed_launcher_is_cleaned_up_after(bench: Bench) -> None:
    """After `kill -9` of the launcher, and of all of Ray but HAProxy, the port's holder is named and `up` works again.

    An instance that lost only its launcher goes on serving until `down` stops it, replicas in order.
    """
    with bench.up() as launched:
        launched.wait_for("Ready in")
        launched.process.kill()
        launched.process.wait()
    assert json.loads(bench.run("status", "--json").stdout)["status"] == "orphaned"
    wait_until(lambda: kill_all_but_haproxy(bench) == ["haproxy"])

    elsewhere = subprocess.run(
        bench.command("up", str(bench.file)),
        env={**bench.environ, "SERVE_APP_RUN_DIR": f"{bench.folder.path}b"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert elsewhere.returncode == ExitCode.NOT_READY
    assert f"haproxy of the instance in {bench.folder.path}" in elsewhere.stderr
    assert f"holds port {bench.http_port} (HTTP)" in elsewhere.stderr

    with bench.up() as launched:
        launched.wait_for("Ready in")
        assert "Killing 1 processes that an earlier run left: haproxy" in launched.text
        launched.process.kill()
        launched.process.wait()
    assert bench.get("/settings")["config"] == {"limit": 1}
    down = bench.run("down")
    assert down.returncode == ExitCode.OK, down.stderr
    assert "Stopping the applications: done" in down.stdout
    bench.assert_nothing_left()


def kill_all_but_haproxy(bench: Bench) -> list[str]:
    """One round of it; returns the names of what is there."""
    processes = find_marked(bench.folder.marker_prefix)
    for process in processes:
        if process.name != "haproxy":
            process.send(signal.SIGKILL)
    return [process.name for process in processes]


@pytest.mark.parametrize("moment", ["Starting Ray ...", "Starting Ray Serve ..."])
def test_ctrl_c_while_starting_leaves_nothing(bench: Bench, moment: str) -> None:
    """Whatever was under way, a signal ends it in order, with status 0."""
    with bench.up() as launched:
        launched.wait_for(moment)
        time.sleep(1.0)  # Into the step, where processes start other processes.
        assert launched.end(signal.SIGINT) == ExitCode.OK
        assert "Traceback" not in launched.text
    bench.assert_nothing_left()


def test_down_stops_a_start_from_another_terminal(bench: Bench) -> None:
    """`down` has the launcher stop, which is no failure of either."""
    with bench.up() as launched:
        launched.wait_for("Starting the applications ...")
        down = bench.run("down")
        assert (down.returncode, launched.process.wait(PATIENCE_S)) == (ExitCode.OK, ExitCode.OK), down.stderr
    bench.assert_nothing_left()


def test_a_second_signal_kills_at_once(bench: Bench) -> None:
    """Who does not want to wait presses Ctrl-C twice: status 130, and still nothing is left."""
    with bench.up() as launched:
        launched.wait_for("Starting Ray Serve ...")
        launched.process.send_signal(signal.SIGINT)
        launched.wait_for("Stopping")
        started_at = time.monotonic()
        assert launched.end(signal.SIGINT) == ExitCode.KILLED
        assert time.monotonic() - started_at < 10
    bench.assert_nothing_left()


def test_an_application_that_fails_ends_the_start(bench: Bench) -> None:
    """The application and its error are named in one line, and everything is stopped again."""
    bench.write(args={"start_error": "no such weights"})
    with bench.up() as launched:
        assert launched.process.wait(PATIENCE_S) == ExitCode.FAILED
        assert "Application 'tiny' did not start: " in launched.text
        assert "no such weights" in launched.text
        assert "Traceback" not in launched.text
    bench.assert_nothing_left()


def test_rays_own_proxy_gives_the_same_answers(bench: Bench) -> None:
    """With the one switch off everything works the same, and none of HAProxy's ports is taken."""
    with bench.up(RAY_SERVE_ENABLE_HA_PROXY="0") as launched:
        launched.wait_for("Ready in")
        assert bench.get("/v2/repository/index")[0]["name"] == "tiny"
        assert "haproxy" not in {process.name for process in find_marked(bench.folder.marker_prefix)}
        assert launched.end(signal.SIGTERM) == ExitCode.OK
    bench.assert_nothing_left()


def test_a_taken_port_stops_the_start_before_anything_runs(bench: Bench) -> None:
    """The port, its holder and the option are named, and no process was started for it."""
    with socket.create_server(("127.0.0.1", bench.http_port)):
        run = bench.run("up", str(bench.file))
    assert run.returncode == ExitCode.NOT_READY
    assert f"(process {os.getpid()}) holds port {bench.http_port} (HTTP)" in run.stderr
    assert "--http-port" in run.stderr
    assert marker_of(os.getpid()) is None
    bench.assert_nothing_left()
