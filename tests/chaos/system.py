"""The product as it is put under faults: two replicas of the front and two servers."""

from __future__ import annotations

import os
from typing import Any

import psutil
import requests
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.chaos.traffic import MODEL
from tests.support.stack import Stack, name_of
from tests.support.waiting import wait_until_sync


class ChaosStack(Stack):
    """A product with two of everything that there can be two of."""

    def _first_document(self) -> dict[str, Any]:
        document = super()._first_document()
        document["applications"][0]["args"]["num_replicas"] = 2
        document["applications"][1]["deployments"][0]["num_replicas"] = 2
        return document

    def named(self, name: str) -> list[psutil.Process]:
        """Its processes of that name."""
        return [process for process in self.processes() if name_of(process) == name]

    def actors(self, what: str) -> list[psutil.Process]:
        """Processes of Ray actors whose title begins with that, the longest running first."""
        found = []
        for process in self.processes():
            try:
                title = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if title.startswith(f"ray::{what}") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        assert found, f"no process ray::{what}"
        return sorted(found, key=psutil.Process.create_time)

    @staticmethod
    def stubs(server: psutil.Process, model: str) -> list[psutil.Process]:
        """The living processes in which a server runs a python model."""
        found = []
        for child in server.children():
            try:
                if f"/{model}/" in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.Error:
                continue
        return found

    @staticmethod
    def is_serving(server: psutil.Process) -> bool:
        """Whether a tritonserver says that it is ready, all its models loaded."""
        for connection in server.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN:
                continue
            with triton_grpc.InferenceServerClient(f"127.0.0.1:{connection.laddr.port}") as client:
                try:
                    return bool(client.is_server_ready(client_timeout=1.0))
                except InferenceServerException:  # a port for something else
                    continue
        return False

    def resize_fleet(self, num_servers: int) -> None:
        """Deploy that many servers."""
        self._document["applications"][0]["deployments"] = [{"name": "TritonServer", "num_replicas": num_servers}]
        self._put()

    def remove_fleet(self) -> None:
        """Deploy the file without the fleet; it is part of the next deploy again."""
        document = self._document
        try:
            self._document = {**document, "applications": document["applications"][1:]}
            self._put()
        finally:
            self._document = document

    def resize_front(self, num_replicas: int) -> None:
        """Deploy that many replicas of the front."""
        self._document["applications"][1]["deployments"][0]["num_replicas"] = num_replicas
        self._put()

    def redeploy_front(self) -> None:
        """Deploy other `args` of the front, for which Serve replaces its replicas one by one; waits for the end."""
        before = {process.pid for process in self.actors("ServeReplica:models:ModelServer")}
        args = self._document["applications"][1]["args"]
        args["resolve_interval_s"] = 11.0 - args.get("resolve_interval_s", 5.0)
        self._put()
        wait_until_sync(
            lambda: not before & {process.pid for process in self.actors("ServeReplica:models:ModelServer")},
            timeout_s=120,
            what="other replicas",
        )
        self.wait_for_replicas(2)

    def change_settings(self) -> None:
        """Deploy another `user_config`, which Serve hands to the replicas as they run."""
        deployment = self._document["applications"][1]["deployments"][0]
        batching = deployment["user_config"]["default"]["batching"]
        batching["mode"] = "continuous" if batching["mode"] == "serve_batch" else "serve_batch"
        self._put()

    def wait_for_replicas(self, count: int) -> None:
        """Until the front has exactly so many, and Serve calls the app running."""
        wait_until_sync(
            lambda: len(self.actors("ServeReplica:models:ModelServer")) == count and self._is_running("models"),
            timeout_s=120,
            what=f"{count} replicas of the front",
        )

    def wait_for_servers(self, count: int) -> None:
        """Until so many servers run, and Serve calls the app running."""
        wait_until_sync(
            lambda: len(self.tritonservers()) == count and self._is_running("triton"),
            timeout_s=120,
            what=f"{count} servers",
        )

    def _is_running(self, app: str) -> bool:
        answer = requests.get(f"{self._dashboard}/api/serve/applications/", timeout=30)
        return bool(answer.ok and answer.json()["applications"][app]["status"] == "RUNNING")

    def is_whole(self) -> bool:
        """Whether everything of which there are two is there twice, and both apps run."""
        try:
            servers = self.live_servers(self.tritonservers())
            num_servers = sum(bool(self.stubs(server, MODEL)) and self.is_serving(server) for server in servers)
            num_replicas = len(self.actors("ServeReplica:models:ModelServer"))
            return num_servers == num_replicas == 2 and self._is_running("models") and self._is_running("triton")
        except (AssertionError, requests.RequestException, KeyError, psutil.Error):
            return False


def load_factor() -> float:
    """How many times more than its CPUs the machine has to do."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
