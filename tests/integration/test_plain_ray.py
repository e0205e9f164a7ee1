"""Ray's own commands do what `serve-app up` does: `ray start` and `serve deploy`, and `serve run`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
import yaml

from tests.support.stack import BIN, ROOT, free_ports, name_of
from tests.support.triton_server import running_triton
from tests.support.waiting import wait_until, wait_until_sync

pytestmark = pytest.mark.integration

BODY = {"inputs": [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [0.0] * 64}]}


class PlainRay:
    """A shell with `cluster/serve.env` sourced, and what was started from it."""

    def __init__(self, folder: Path) -> None:
        names = ("http", "grpc", "dashboard", "gcs", "client", "stats", "metrics", "fallback_http", "fallback_grpc")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.temporary = Path(f"/tmp/sp-{os.getpid()}")
        self.file = folder / "deployments.yaml"
        document = yaml.safe_load((ROOT / "deployments.yaml").read_text())
        document["http_options"]["port"] = self.ports["http"]
        document["grpc_options"]["port"] = self.ports["grpc"]
        self.file.write_text(yaml.safe_dump(document))
        self.marker = f"plain-{os.getpid()}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_APP_"))}
        self._environ = {
            **kept,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PLAIN_RAY": self.marker,
            "RAY_SERVE_HAPROXY_STATS_PORT": str(self.ports["stats"]),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(self.ports["metrics"]),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(self.ports["fallback_http"]),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(self.ports["fallback_grpc"]),
            "RAY_ADDRESS": "",
        }

    def popen(self, command: str, **environ: str) -> subprocess.Popen[str]:
        """Start a command as a user would type it after sourcing the switches."""
        script = f"set -a; . cluster/serve.env; set +a; exec {command}"
        environment = {**self._environ, **environ}
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str, **environ: str) -> str:
        """Run a command to its end."""
        process = self.popen(command, **environ)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        return output

    def processes(self) -> list[psutil.Process]:
        """Everything that came of these commands."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("PLAIN_RAY") == self.marker:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self) -> None:
        """End everything; `ray stop` would end other Rays of this machine too."""
        for _ in range(20):
            left = self.processes()
            if not left:
                break
            for process in left:
                try:
                    process.kill()
                except psutil.Error:
                    continue
            psutil.wait_procs(left, timeout=2)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def answers(self) -> bool:
        """Whether digits are read."""
        try:
            answer = requests.post(
                f"http://127.0.0.1:{self.ports['http']}/v2/models/digits/infer", json=BODY, timeout=10
            )
        except (requests.ConnectionError, requests.Timeout):  # while it stops, requests may also wait in vain
            return False
        return answer.status_code == 200


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainRay]:
    """`ray start --head`, with ports of its own."""
    plain = PlainRay(tmp_path_factory.mktemp("plain"))
    ports = plain.ports
    try:
        plain.run(
            f"ray start --head --port={ports['gcs']} --ray-client-server-port={ports['client']} "
            f"--dashboard-port={ports['dashboard']} --temp-dir={plain.temporary} --num-cpus=8 "
            f"--object-store-memory=300000000 --min-worker-port=0 --max-worker-port=0 --disable-usage-stats"
        )
        yield plain
    finally:
        plain.kill()


def test_serve_deploy_then_serve_run(plain: PlainRay) -> None:
    """Both deploy the same file to a running Ray, and nothing of the fleet is left when Serve is shut down."""
    address, dashboard = f"127.0.0.1:{plain.ports['gcs']}", f"http://127.0.0.1:{plain.ports['dashboard']}"
    plain.run(f"serve deploy -a {dashboard} {plain.file}")
    wait_until_sync(plain.answers, timeout_s=150, what="serve deploy")
    plain.run(f"serve shutdown -y -a {dashboard}")
    wait_until_sync(lambda: not plain.answers(), timeout_s=60, what="serve shutdown")
    with plain.popen(f"serve run -a {address} {plain.file}", RAY_ADDRESS=address) as running:
        wait_until_sync(lambda: plain.answers() or running.poll() is not None, timeout_s=150, what="serve run")
        assert running.poll() is None, running.communicate()[0]
        os.killpg(running.pid, signal.SIGINT)
        try:
            running.communicate(timeout=30)
        except subprocess.TimeoutExpired:  # Ray's command now and then stays in its own shutdown
            os.killpg(running.pid, signal.SIGKILL)
    plain.run(f"serve shutdown -y -a {dashboard}")
    wait_until_sync(
        lambda: not any(name_of(process) == "tritonserver" for process in plain.processes()),
        timeout_s=60,
        what="the end of the fleet",
    )


async def test_triton_servers_of_the_users_own(plain: PlainRay) -> None:
    """Without the fleet app and with `endpoints`, the front uses the servers behind a DNS name and starts none."""
    dashboard = f"http://127.0.0.1:{plain.ports['dashboard']}"
    async with running_triton(ROOT / "model_repository", args={"models": ["digits"]}) as server:
        assert server.endpoint is not None
        document = yaml.safe_load(plain.file.read_text())
        front = document["applications"][1]
        port = server.endpoint.address.rsplit(":", 1)[1]
        front["args"] = {"endpoints": [f"dns:///localhost:{port}"], "resolve_interval_s": 1.0}
        document["applications"] = [front]
        file = plain.file.with_name("endpoints.yaml")
        file.write_text(yaml.safe_dump(document))
        await asyncio.to_thread(plain.run, f"serve deploy -a {dashboard} {file}")
        await wait_until(plain.answers, timeout_s=90, what=lambda: "serve deploy without a fleet")
        assert [process for process in plain.processes() if name_of(process) == "tritonserver"] == []
        repository = f"http://127.0.0.1:{plain.ports['http']}/v2/repository/models/identity"
        for verb, is_loaded in (("load", True), ("unload", False)):
            answer = await asyncio.to_thread(requests.post, f"{repository}/{verb}", timeout=60)
            assert answer.status_code == 200, answer.text
            probe = f"http://127.0.0.1:{plain.ports['http']}/v2/models/identity/ready"
            assert (await asyncio.to_thread(requests.get, probe, timeout=30)).ok is is_loaded
        await asyncio.to_thread(plain.run, f"serve shutdown -y -a {dashboard}")
