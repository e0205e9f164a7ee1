"""What a server of our own fleet refuses to whoever finds its port, and what stays secret about it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import pytest_asyncio
import requests
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.endpoint import ADMIN_RPCS, SECRET_NAME
from serve_app.fleet.supervisor import TritonSupervisor
from serve_app.protocol.arrays import request_of_arrays
from tests.support.front import running_plane
from tests.support.triton_server import running_triton, write_model

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TritonSupervisor]:
    """A server as the fleet starts it, with Triton's own HTTP and the most that it can log."""
    repository = tmp_path_factory.mktemp("restricted")
    write_model(repository, "identity")
    write_model(repository, "spare")
    args = {"restrict_admin": True, "allow_http": True, "log_verbose": 9, "models": ["identity"]}
    async with running_triton(repository, args=args) as supervisor:
        yield supervisor


async def call(server: TritonSupervisor, rpc_name: str, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
    assert server.endpoint is not None
    async with grpc.aio.insecure_channel(server.endpoint.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            await getattr(stub, rpc_name)(getattr(service_pb2, f"{rpc_name}Request")(), metadata=metadata, timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.details()
    return ""


@pytest.mark.parametrize("rpc_name", sorted(ADMIN_RPCS))
async def test_administration_is_refused_without_the_secret(server: TritonSupervisor, rpc_name: str) -> None:
    """None, and a wrong one; no such call does anything."""
    for metadata in ((), ((f"triton-grpc-protocol-{SECRET_NAME}", "guess"),)):
        assert "This protocol is restricted" in await call(server, rpc_name, metadata)
    assert server.endpoint is not None
    right = ((f"triton-grpc-protocol-{SECRET_NAME}", server.endpoint.secret),)
    assert "restricted" not in await call(server, rpc_name, right)


async def test_tritons_own_http_is_restricted_alike(server: TritonSupervisor) -> None:
    """Where it is open at all."""
    assert server._process is not None
    url = f"http://127.0.0.1:{server._process.listen.http_port}"
    for method, path in (
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/repository/models/spare/load"),
        ("POST", "/v2/repository/models/identity/unload"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("GET", "/v2/logging"),
        ("GET", "/v2/trace/setting"),
    ):
        assert (await asyncio.to_thread(requests.request, method, f"{url}{path}", timeout=20)).status_code == 403
    health = await asyncio.to_thread(requests.get, f"{url}/v2/health/ready", timeout=20)
    assert health.status_code == 200


async def test_the_front_knows_the_secret(server: TritonSupervisor) -> None:
    """Inference needs none; what does goes through the front as ever, and so does the fleet's own care."""
    assert server.endpoint is not None
    async with running_plane(server.endpoint) as (plane, _):
        answer = await plane.infer(request_of_arrays("identity", {"INPUT0": np.ones((1, 2), np.float32)}))
        assert answer.outputs[0].to_numpy().tolist() == [[1.0, 1.0]]
        await plane.control.load_model(service_pb2.RepositoryModelLoadRequest(model_name="spare"))
        index = {entry.name: entry.state for entry in await plane.repository_index()}
        assert index == {"identity": "READY", "spare": "READY"}
        await plane.control.log_settings(service_pb2.LogSettingsRequest())
        await plane.control.trace_setting(service_pb2.TraceSettingRequest())
        await plane.control.unload_model(service_pb2.RepositoryModelUnloadRequest(model_name="spare"))
    await server.load_model("spare")
    await server.unload_model("spare")


async def test_where_the_secret_can_be_seen(server: TritonSupervisor) -> None:
    """In no log and no text about a server; in Triton's own command line, for it takes it from nowhere else."""
    assert server.endpoint is not None
    secret = server.endpoint.secret
    assert len(secret) >= 32
    log = Path(server.statistics()["log"])
    assert log.read_bytes()
    assert secret not in log.read_text(errors="replace")
    assert secret not in repr(server.endpoint) + repr(server) + str(server.statistics())
    pid = server.statistics()["pid"]
    seen = set()
    for process in psutil.process_iter():
        try:
            if secret in " ".join(process.cmdline()):
                seen.add(process.pid)
            if process.uids().real == os.getuid():
                assert secret not in str(process.environ())
        except psutil.Error:
            continue
    assert seen == {pid}
