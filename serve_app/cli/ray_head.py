"""The local Ray: its command line, its environment, and the process that owns it."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import serve_app
from serve_app.cli.processes import MARKER
from serve_app.cli.run_folder import RunFolder
from serve_app.errors import ServerStartFailed
from serve_app.settings import LauncherSettings

HAPROXY_SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"

_FOREIGN = ("RAY_ADDRESS", "RAY_JOB_ID", "RAY_NAMESPACE", "RAY_TMPDIR", "RAY_API_SERVER_ADDRESS", "RAY_REDIS_ADDRESS")
"""Variables that would bind our Ray, or programs in it, to another one."""


def head_environment(
    environ: Mapping[str, str],
    switches: Mapping[str, str],
    *,
    folder: RunFolder,
    instance: str,
    home: Path,
    metrics_port: int,
) -> dict[str, str]:
    """The environment of `ray start`, which all of Ray, Serve, HAProxy and the replicas inherit.

    Args:
        environ: The user's environment.
        switches: From `cluster/serve.env`; win over `environ`.
        folder: Everything that would lie in a shared place goes here.
        instance: Value of the marker.
        home: Folder of `deployments.yaml`; import paths in it start here.
        metrics_port: Free port for the dashboard's own metrics; its default clashes with any other Ray's.
    """
    result = {name: value for name, value in environ.items() if name not in _FOREIGN}
    result.update(switches)
    result.update(
        {
            MARKER: instance,
            "SPT_NOENV": "1",  # setproctitle would else overwrite the environment, and the marker with it
            "TMPDIR": str(folder.temporary),
            "PYTHONPATH": os.pathsep.join(_import_folders(home, environ.get("PYTHONPATH", ""))),
            "PYTHONUNBUFFERED": "1",
            "DASHBOARD_METRIC_PORT": str(metrics_port),
            "RAY_START_HOOK": "serve_app.cli.ray_start_hook.adjust",
            # By default two Rays on one machine would share /tmp/haproxy-serve.
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder.haproxy / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder.haproxy / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder.haproxy),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder.haproxy / "server-state"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder.haproxy / "metrics.sock"),
        }
    )
    # Replicas find `haproxy`, `ray` and user scripts of this environment even where it is not activated.
    result["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    return result


def head_command(settings: LauncherSettings, folder: RunFolder, *, agent_port: int) -> list[str]:
    """The command line of the head. `--block`: the command owns Ray's processes, and they end with it.

    Args:
        settings: CPUs, object store and dashboard port.
        folder: Ray's temporary folder is in it.
        agent_port: Free port for the dashboard's agent; its default clashes with any other Ray's.
    """
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        "--port=0",
        "--node-ip-address=127.0.0.1",
        f"--temp-dir={folder.ray}",
        f"--num-cpus={settings.num_cpus}",
        f"--object-store-memory={settings.object_store_bytes}",
        "--include-dashboard=true",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={settings.dashboard_port}",
        f"--dashboard-agent-listen-port={agent_port}",
        # Any free port: the default range holds ports people choose for HTTP, and the replicas' own must be off it.
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--include-log-monitor=false",  # copies logs to drivers; ours has none
        "--no-monitor",  # the autoscaler of nodes
    ]


def driver_environment(environment: Mapping[str, str], *, gcs_address: str) -> dict[str, str]:
    """What a program needs in its environment to connect to the instance with a plain `ray.init()`.

    Args:
        environment: Of the head; the marker and what belongs to processes of the instance alone is left out.
        gcs_address: From `RayHead.gcs_address`.
    """
    names = re.compile(r"RAY_(SERVE_(?!HAPROXY|FALLBACK|DIRECT)|AUTH|ENABLE|USAGE)\w*")
    return {"RAY_ADDRESS": gcs_address, **{k: v for k, v in sorted(environment.items()) if names.fullmatch(k)}}


def raise_open_files_limit(*, wanted: int = 65536) -> None:
    """Let this process and what it starts open as many files as they may, up to `wanted`.

    Shells give 1,024; each connection of a client is one in HAProxy and one in a replica.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RayHead:
    """The process `ray start --block` and what it says of itself.

    It has a session of its own, so that Ctrl-C in a terminal reaches the launcher alone, which stops Ray in order.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: RunFolder) -> None:
        self._process, self._folder = process, folder

    def __repr__(self) -> str:
        status = self._process.poll()
        return f"<RayHead pid {self.pid}, {'running' if status is None else f'ended with {status}'}>"

    @classmethod
    def start(cls, command: list[str], environment: Mapping[str, str], *, folder: RunFolder, home: Path) -> RayHead:
        """Start it; returns at once."""
        with folder.head_log.open("wb") as log:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process, folder)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended; collects it when it has."""
        return self._process.poll() is None

    @property
    def gcs_address(self) -> str | None:
        """`host:port` of the cluster once every process of Ray is up, `None` before."""
        try:
            return (self._folder.ray / "ray_current_cluster").read_text(encoding="ascii").strip() or None
        except OSError:
            return None

    def terminate(self) -> None:
        """Ask it to stop Ray's processes and itself."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Block until it has ended, and collect it; gives up silently after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def failure(self) -> ServerStartFailed:
        """Why it ended, from the last line that it printed."""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            text = self._folder.head_log.read_text(encoding="utf-8", errors="replace")
            lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
        return ServerStartFailed("Ray", lines[-1][:300] if lines else f"it ended with {self._process.poll()}")


def _import_folders(home: Path, inherited: str) -> list[str]:
    """Where the cluster looks for modules: the project, this package if it is not installed, what was set before."""
    package = Path(serve_app.__file__).parent.parent
    installed = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    folders = [str(home), *([] if package in installed else [str(package)]), *inherited.split(os.pathsep)]
    return list(dict.fromkeys(folder for folder in folders if folder))
