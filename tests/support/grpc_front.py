"""The RPCs over a data plane, without Ray, by Ray Serve's own gRPC server class and as a replica answers them."""

from __future__ import annotations

from typing import Any

from ray.serve._private.grpc_util import gRPCGenericServer

from serve_app.dataplane import DataPlane
from serve_app.ingress.grpc_errors import grpc_status_of
from serve_app.ingress.grpc_servicer import GrpcServicer, add_inference_service
from serve_app.ingress.http_errors import error_text


class PlaneServicer(GrpcServicer):
    """The RPCs of a plane."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane


def grpc_server_of(plane: DataPlane) -> tuple[Any, int]:
    """A server of unary calls, to be started and stopped by the caller, and its port on 127.0.0.1."""
    servicer = PlaneServicer(plane)

    def handler_factory(*, service_method: str, streaming_type: Any) -> Any:
        rpc = getattr(servicer, service_method.rsplit("/", 1)[-1], None)

        async def answer(request: Any, context: Any) -> bytes:  # what a replica does with a unary call
            try:
                message = await rpc(request, context)  # type: ignore[misc]  # of methods that are not called
                return bytes(message.SerializeToString())
            except Exception as error:
                await context.abort(grpc_status_of(error), error_text(error))
                raise

        return answer

    server = gRPCGenericServer(handler_factory)
    port = server.add_insecure_port("127.0.0.1:0")
    add_inference_service(servicer, server)
    return server, port
