"""The front with keys, without Ray: the HTTP application, and a real gRPC server with the servicer that Serve calls."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from starlette.types import ASGIApp
from tritonclient.grpc import service_pb2_grpc

from serve_app.auth.gate import Gate
from serve_app.dataplane import DataPlane
from serve_app.ingress.grpc_health import SERVER_SERVICES
from serve_app.ingress.grpc_servicer import GrpcServicer
from serve_app.ingress.guard import RpcGuard
from serve_app.ingress.http_app import http_app
from serve_app.triton.fake import FakeModel, FakeTriton
from tests.support.front import LIMITS, running_plane
from tests.support.keys import key_store


class GuardedServicer(GrpcServicer):
    """The RPCs over a plane, behind a gate."""

    def __init__(self, plane: DataPlane, gate: Gate | None) -> None:
        self._plane = plane
        self._guard = None if gate is None else RpcGuard(gate, server_names=SERVER_SERVICES)


@dataclass(frozen=True)
class GuardedFront:
    """What clients reach, and what is behind it.

    Attributes:
        app: The HTTP application.
        address: Of the gRPC server.
        gate: What lets calls in.
        fake: The Triton behind, with models `identity` and `other`.
    """

    app: ASGIApp
    address: str
    gate: Gate
    fake: FakeTriton


@contextlib.asynccontextmanager
async def guarded_front(*, is_health_open: bool = True, allow_client_shm: bool = False) -> AsyncIterator[GuardedFront]:
    """A front that knows the keys of `tests.support.keys`."""
    gate = Gate(key_store(), is_health_open=is_health_open)
    async with (
        FakeTriton(FakeModel(), FakeModel(name="other")) as fake,
        running_plane(fake.endpoint, allow_client_shm=allow_client_shm) as (plane, _),
        grpc_server(plane, gate) as address,
    ):
        yield GuardedFront(http_app(plane, LIMITS, gate=gate), address, gate, fake)


@contextlib.asynccontextmanager
async def grpc_server(plane: DataPlane, gate: Gate | None) -> AsyncIterator[str]:
    """All our gRPC services on a free port of 127.0.0.1."""
    server = grpc.aio.server()
    servicer = GuardedServicer(plane, gate)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
