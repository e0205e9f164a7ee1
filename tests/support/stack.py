"""The whole product as a user runs it: `serve-app up` in a process of its own, with ports and a folder of its own."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import requests
import tritonclient.grpc as triton_grpc
import yaml

from tests.support.waiting import wait_until_sync

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
START_S = 150.0


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now; below the kernel's ephemeral ones, so that none is lent out."""
    found: list[int] = []
    candidate = 20000 + os.getpid() % 4000
    while len(found) < count:
        candidate += 1
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", candidate))
            except OSError:
                continue
            found.append(candidate)
    return found


@dataclass(frozen=True)
class TritonCounts:
    """What all servers of the fleet have counted for one model.

    Attributes:
        num_requests: ModelInfer calls answered.
        num_rows: Rows in them.
        largest_batch: Most rows in one execution; not a difference in `a - b`.
    """

    num_requests: int
    num_rows: int
    largest_batch: int

    def __sub__(self, before: TritonCounts) -> TritonCounts:
        return TritonCounts(
            self.num_requests - before.num_requests, self.num_rows - before.num_rows, self.largest_batch
        )


class Stack:
    """A running product.

    Args:
        folder: For the repository, the file of applications and the log of `serve-app up`.
        run_dir: Short path for `SERVE_APP_RUN_DIR`.
        environ: Added to the environment of `serve-app up`.
        model_server_args: `args` of the front, in place of the file's.
    """

    app_name = "models"

    def __init__(
        self,
        folder: Path,
        *,
        run_dir: Path,
        environ: Mapping[str, str] | None = None,
        model_server_args: Mapping[str, Any] | None = None,
    ) -> None:
        names = ("http", "grpc", "dashboard", "stats", "metrics", "fallback_http", "fallback_grpc")
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._folder = folder
        self._run_dir = run_dir
        self._environ = {
            **os.environ,
            "SERVE_APP_RUN_DIR": str(run_dir),
            "SERVE_APP_HOME": str(ROOT),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(self._ports["stats"]),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(self._ports["metrics"]),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(self._ports["fallback_http"]),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(self._ports["fallback_grpc"]),
            # Not shared with another run on this machine; see cluster/serve.env.
            "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(self._ports["http"] + 5000),
            "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(self._ports["http"] + 5200),
            **(environ or {}),
        }
        self.http = f"127.0.0.1:{self._ports['http']}"
        self.grpc = f"127.0.0.1:{self._ports['grpc']}"
        self._file = folder / "deployments.yaml"
        self._document = self._first_document()
        if model_server_args is not None:
            self._document["applications"][1]["args"] = dict(model_server_args)
        self._process: subprocess.Popen[bytes] | None = None

    def _first_document(self) -> dict[str, Any]:
        document: dict[str, Any] = yaml.safe_load((ROOT / "deployments.yaml").read_text())
        document["http_options"]["port"] = self._ports["http"]
        document["grpc_options"]["port"] = self._ports["grpc"]
        triton, _ = document["applications"]
        triton["args"]["model_repository"] = str(self.repository)
        return document

    @property
    def repository(self) -> Path:
        """The model repository of the fleet."""
        return self._folder / "model_repository"

    @property
    def driver_env(self) -> Path:
        """To be sourced by a program that connects."""
        return self._run_dir / "driver.env"

    # --- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it and wait until every model is ready.

        Raises:
            AssertionError: It ended, or took too long; says what it printed.
        """
        repository = self.repository
        if not repository.exists():
            repository.mkdir()
            for source in (ROOT / "model_repository", ROOT / "tests" / "support" / "model_repository"):
                for model in source.iterdir():
                    if model.is_dir():
                        shutil.copytree(model, repository / model.name)
        self._write()
        log = self._folder / "up.log"
        command = [str(BIN / "serve-app"), "up", str(self._file), "--dashboard-port", str(self._ports["dashboard"])]
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, env=self._environ, stdout=output, stderr=output)
        wait_until_sync(
            lambda: "Ready in" in log.read_text() or self._process is None or self._process.poll() is not None,
            timeout_s=START_S,
            what=log,
        )
        assert self._process.poll() is None, log.read_text()

    def stop(self) -> None:
        """Stop it as Ctrl-C does; raises when it does not end well."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            status = self._process.wait(90)
            self._process = None
            assert status == 0, (self._folder / "up.log").read_text()

    def processes(self) -> list[psutil.Process]:
        """Every process of the instance, by the marker in its environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SERVE_APP_INSTANCE", "").startswith(str(self._run_dir)):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    # --- changing it --------------------------------------------------------------------------------------

    def _write(self) -> None:
        self._file.write_text(yaml.safe_dump(self._document, sort_keys=False))

    def deploy(self) -> None:
        """`serve deploy` of the file as it is now, as a user would type it."""
        self._write()
        command = [str(BIN / "serve"), "deploy", "-a", self._dashboard, str(self._file)]
        subprocess.run(command, env=self._environ, check=True, capture_output=True, timeout=60)

    def _put(self) -> None:
        """What `serve deploy` does, without the seconds that its imports take."""
        self._write()
        answer = requests.put(f"{self._dashboard}/api/serve/applications/", json=self._document, timeout=60)
        answer.raise_for_status()

    @property
    def _dashboard(self) -> str:
        return f"http://127.0.0.1:{self._ports['dashboard']}"

    def configure(self, user_config: Mapping[str, Any], *, by_command: bool = False) -> None:
        """Put other settings of the models in force, unless they are; returns when every replica has them.

        Args:
            user_config: Of the ModelServer deployment.
            by_command: Type `serve deploy` for it.
        """
        from serve_app.settings import ModelServerConfig

        wanted = ModelServerConfig.model_validate(user_config)
        deployment = self._document["applications"][1]["deployments"][0]
        if deployment["user_config"] != user_config or by_command:
            deployment["user_config"] = copy.deepcopy(dict(user_config))
            self.deploy() if by_command else self._put()
            wait_until_sync(
                lambda: bool(self.model_server_statistics()["config"] == wanted), timeout_s=30, what=user_config
            )

    def deploy_user_config(self, user_config: Mapping[str, Any]) -> None:
        """Deploy settings without waiting for them; for those that are refused."""
        self._document["applications"][1]["deployments"][0]["user_config"] = dict(user_config)
        self._put()

    def scale_fleet(self, num_servers: int) -> None:
        """Deploy another number of servers, and wait until the front knows exactly these."""
        self._document["applications"][0]["deployments"] = [{"name": "TritonServer", "num_replicas": num_servers}]
        self._put()
        wait_until_sync(
            lambda: self.num_endpoints() == num_servers and len(self.tritonservers()) == num_servers,
            timeout_s=60,
            what=f"{num_servers} servers",
        )

    # --- asking it ----------------------------------------------------------------------------------------

    @cached_property
    def handle(self) -> Any:
        """The Serve handle of the front; connects this process to the cluster."""
        # First the environment: Ray reads most of it when it is imported.
        for line in self.driver_env.read_text().splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            os.environ[name] = value.strip("'")
        import ray
        from ray import serve

        if not ray.is_initialized():
            ray.init(namespace="serve", logging_level=logging.WARNING, log_to_driver=False)
        return serve.get_app_handle(self.app_name)

    @cached_property
    def client(self) -> Any:
        """Our client; closed by `close_clients`."""
        from serve_app.client import ModelClient

        assert self.handle is not None
        return ModelClient(self.app_name)

    def close_clients(self) -> None:
        """Close what `handle` and `client` opened."""
        import ray

        if "client" in self.__dict__:
            self.client.close()
        if "handle" in self.__dict__:
            ray.shutdown()

    def model_server_statistics(self) -> dict[str, Any]:
        """What a replica of the front says of itself."""
        # In a thread of its own: Ray refuses to block one that runs an event loop, as that of many a test does.
        with ThreadPoolExecutor(1) as thread:
            handle = self.handle
            statistics: dict[str, Any] = thread.submit(lambda: handle.statistics.remote().result(timeout_s=20)).result()
        return statistics

    def num_endpoints(self) -> int:
        """Servers that the front can ask now."""
        count: int = self.model_server_statistics()["router"].num_available
        return count

    def replica_pids(self) -> set[int]:
        """Processes of the front's replicas and of the fleet's."""
        pids = {process.pid for process in self.processes() if name_of(process).startswith("ray::ServeReplica")}
        assert pids
        return pids

    def tritonservers(self) -> list[psutil.Process]:
        """The fleet's server processes."""
        return [process for process in self.processes() if name_of(process) == "tritonserver"]

    def sent_since(self, before: TritonCounts, model: str, *, num_rows: int) -> TritonCounts:
        """What was sent since an earlier look, once Triton has counted `num_rows`: it counts after it has answered."""
        wait_until_sync(
            lambda: (self.triton_statistics(model) - before).num_rows >= num_rows, timeout_s=10, what=f"{num_rows} rows"
        )
        return self.triton_statistics(model) - before

    def triton_statistics(self, model: str) -> TritonCounts:
        """A model's counts, read from Triton itself and summed over the fleet, once they stand still.

        It counts after it has answered: what was answered a moment ago may not be among them.
        """
        before, counts = None, self._count(model)
        ends_at = time.monotonic() + 10.0
        while counts != before and time.monotonic() < ends_at:
            time.sleep(0.1)
            before, counts = counts, self._count(model)
        return counts

    def _count(self, model: str) -> TritonCounts:
        num_requests = num_rows = largest = 0
        for endpoint in self.model_server_statistics()["router"].endpoints:
            with triton_grpc.InferenceServerClient(endpoint.endpoint.address) as client:
                for entry in client.get_inference_statistics(model).model_stats:
                    num_requests += entry.inference_stats.success.count
                    num_rows += entry.inference_count
                    largest = max([largest, *(batch.batch_size for batch in entry.batch_stats)])
        return TritonCounts(num_requests, num_rows, largest)

    @staticmethod
    def live_servers(servers: list[psutil.Process]) -> list[psutil.Process]:
        """Those of some processes that still run."""
        living = []
        for process in servers:
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
            except psutil.Error:
                continue
        return living


def name_of(process: psutil.Process) -> str:
    """A process's name; empty for one that has ended since it was found."""
    try:
        name: str = process.name()
    except psutil.Error:
        return ""
    return name
