"""`grpc.health.v1.Health` over the data plane: what Kubernetes' gRPC probes and gRPC's own clients ask.

Registered beside Triton's service; as there, Ray Serve calls the methods that are named like the RPCs.
"""

# RPC names are the methods' names.
# ruff: noqa: N802
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from serve_app.dataplane import DataPlane
from serve_app.errors import ModelNotFound, ServeAppError, Unavailable
from serve_app.ingress.grpc_errors import tell_error
from serve_app.ingress.guard import RpcGuard

Message = Any

SERVER_SERVICES = frozenset({"", "inference.GRPCInferenceService"})
"""The `service` names that mean the whole server; any other is the name of a model."""

WATCH_INTERVAL_S = 1.0
"""How often a watch looks: one cheap call to one Triton server each."""

_Status = health_pb2.HealthCheckResponse


def add_health_service(servicer: Any, server: Any) -> None:
    """What `grpc_options.grpc_servicer_functions` names: registers the health service with Ray Serve."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)


@contextlib.contextmanager
def telling_errors(grpc_context: Any) -> Iterator[None]:
    """Within it, an error of ours sets the call's status before it goes on."""
    try:
        yield
    except ServeAppError as error:
        tell_error(error, grpc_context)
        raise


class HealthServicer:
    """The RPCs; `_plane` is the deployment's, set before the first call."""

    _plane: DataPlane
    _guard: RpcGuard | None = None

    async def Check(self, request: Message, grpc_context: Any) -> Message:
        """SERVING or NOT_SERVING; NOT_FOUND for a `service` that is neither the server nor a model."""
        with telling_errors(grpc_context):
            if self._guard is not None:
                self._guard.admit("Check", request, grpc_context)
            return _Status(status=await self._health_of(request.service))

    async def Watch(self, request: Message, grpc_context: Any) -> AsyncIterator[Message]:
        """The status now and after each change, SERVICE_UNKNOWN included; ends when this replica does, or the key."""
        sent: int | None = None
        guard, principal = self._guard, None
        if guard is not None:
            with telling_errors(grpc_context):
                principal = guard.admit("Watch", request, grpc_context)
        while True:
            if guard is not None and sent is not None:
                with telling_errors(grpc_context):
                    guard.admit_message(principal, "Watch", request)
            try:
                status = await self._health_of(request.service)
            except ModelNotFound:
                status = _Status.SERVICE_UNKNOWN
            if status != sent:
                sent = status
                yield _Status(status=status)
            if not self._plane.is_live():
                return
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _health_of(self, service: str) -> int:
        if service in SERVER_SERVICES:
            is_ready = await self._plane.is_ready()
        else:
            is_ready = await self._plane.is_model_ready(service)
            if not is_ready:
                with contextlib.suppress(Unavailable):
                    await self._plane.check_known(service)
        status: int = _Status.SERVING if is_ready else _Status.NOT_SERVING
        return status
