"""Server reflection behind the same gate as every other RPC.

Ray Serve has a reflection of its own (`enable_reflection`), which answers in Serve's gRPC server before any servicer is
asked, and so without a key.
"""

# RPC names are the methods' names.
# ruff: noqa: N802
from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from functools import lru_cache
from typing import Any

from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from serve_app.ingress.grpc_health import telling_errors
from serve_app.ingress.guard import RpcGuard

Message = Any

SERVICE_NAMES = ("grpc.health.v1.Health", "inference.GRPCInferenceService", reflection.SERVICE_NAME)
"""What reflection tells of."""


def add_reflection_service(servicer: Any, server: Any) -> None:
    """What `grpc_options.grpc_servicer_functions` names: registers reflection with Ray Serve."""
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)


@lru_cache(maxsize=1)
def _descriptors() -> Any:
    return reflection.aio.ReflectionServicer(SERVICE_NAMES)


class ReflectionServicer:
    """The RPC `ServerReflectionInfo` of `grpc.reflection.v1alpha`."""

    _guard: RpcGuard | None = None

    async def ServerReflectionInfo(self, requests: AsyncIterable[Message], grpc_context: Any) -> AsyncIterator[Message]:
        """Names and descriptions of the services."""
        if self._guard is not None:
            with telling_errors(grpc_context):
                self._guard.admit("ServerReflectionInfo", None, grpc_context)
        async for answer in _descriptors().ServerReflectionInfo(requests, grpc_context):
            yield answer
