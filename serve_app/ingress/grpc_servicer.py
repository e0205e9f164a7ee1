"""Triton's `GRPCInferenceService` over the data plane.

Ray Serve calls the methods of the deployment that are named like the RPCs, so this is a class for the deployment to
inherit from. Errors set the status on Serve's gRPC context and are raised again: Serve then sends that status. Those
of overload are not raised: Serve would log each with its trace, and leave out the metadata that says when to come back.
"""

# RPC names are the methods' names.
# ruff: noqa: N802
from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from functools import partial, wraps
from typing import Any

import grpc
from google.protobuf import empty_pb2
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from serve_app.dataplane import DataPlane
from serve_app.errors import Overloaded, ServeAppError, Unsupported
from serve_app.ingress.control_routes import server_metadata
from serve_app.ingress.grpc_errors import tell_error
from serve_app.ingress.grpc_health import HealthServicer
from serve_app.ingress.grpc_reflection import ReflectionServicer
from serve_app.ingress.grpc_stream import InferStream, admitted
from serve_app.ingress.guard import answering_for
from serve_app.ingress.memory import give_back
from serve_app.protocol.grpc_codec import decode_infer_request, encode_infer_response, large_infer_response
from serve_app.protocol.wire import read_infer_request
from serve_app.shared_memory import NO_SHARED_MEMORY

logger = logging.getLogger(__name__)

Message = Any
Rpc = Callable[[Any, Message, Any], Awaitable[Message]]


def name_generated_modules() -> None:
    """Make Triton's generated protobuf modules importable by the names their messages are pickled under.

    They were generated as top-level modules, so a message pickles as `grpc_service_pb2.ModelInferRequest`. Ray
    Serve's default proxy pickles messages on their way to the replica; both ends call this first.
    """
    sys.modules.setdefault("grpc_service_pb2", service_pb2)
    sys.modules.setdefault("model_config_pb2", model_config_pb2)


def add_inference_service(servicer: Any, server: Any) -> None:
    """What `grpc_options.grpc_servicer_functions` names: registers Triton's service with Ray Serve."""
    name_generated_modules()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, _Registration(server))


class _Registration:
    """A server to which methods are added, with `ModelInfer` reading large requests without a copy."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Nothing: the generated code names every method a second time, below."""

    def add_registered_method_handlers(self, service_name: str, handlers: dict[str, Any]) -> None:
        """Add a service's methods under both of grpc's registrations."""
        infer = handlers["ModelInfer"]._replace(request_deserializer=read_infer_request)
        handlers = {**handlers, "ModelInfer": infer}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, handlers),))
        self._server.add_registered_method_handlers(service_name, handlers)


def answering_errors(rpc: Rpc) -> Rpc:
    """An RPC whose errors become gRPC statuses; of an error that is not ours the client learns nothing."""

    @wraps(rpc)
    async def call(self: Any, request: Message, grpc_context: Any) -> Message:
        try:
            if self._guard is None:
                return await rpc(self, request, grpc_context)
            with answering_for(self._guard.admit(rpc.__name__, request, grpc_context)):
                return await rpc(self, request, grpc_context)
        except Overloaded as error:
            tell_error(error, grpc_context)
            return empty_pb2.Empty()  # not sent, for the status is not OK
        except Exception as error:
            if not isinstance(error, ServeAppError):
                logger.exception("%s failed in a way that has no error class", rpc.__name__)
            tell_error(error, grpc_context)
            raise

    return call


def _refusing(rpc_name: str, reason: str) -> Rpc:
    """An RPC that answers UNIMPLEMENTED and says why."""

    async def refuse(self: Any, request: Message, grpc_context: Any) -> Message:
        raise Unsupported(rpc_name, reason)

    refuse.__name__ = rpc_name
    refuse.__doc__ = f"UNIMPLEMENTED: {reason}"
    return answering_errors(refuse)


class GrpcServicer(HealthServicer, ReflectionServicer):
    """The RPCs; `_plane` is the deployment's, set before the first call."""

    _plane: DataPlane

    @answering_errors
    async def ServerLive(self, request: Message, grpc_context: Any) -> Message:
        """Whether this replica takes requests at all."""
        return service_pb2.ServerLiveResponse(live=self._plane.is_live())

    @answering_errors
    async def ServerReady(self, request: Message, grpc_context: Any) -> Message:
        """Whether a request would be answered now."""
        return service_pb2.ServerReadyResponse(ready=await self._plane.is_ready())

    @answering_errors
    async def ModelReady(self, request: Message, grpc_context: Any) -> Message:
        """Whether a server has the model loaded; false for unknown models, as in Triton."""
        return service_pb2.ModelReadyResponse(ready=await self._plane.is_model_ready(request.name, request.version))

    @answering_errors
    async def ServerMetadata(self, request: Message, grpc_context: Any) -> Message:
        """Name, version and extensions of this server."""
        return service_pb2.ServerMetadataResponse(**server_metadata(self._plane))

    @answering_errors
    async def ModelMetadata(self, request: Message, grpc_context: Any) -> Message:
        """Triton's metadata of the model, unchanged."""
        return await self._plane.model_metadata(request.name, request.version)

    @answering_errors
    async def ModelConfig(self, request: Message, grpc_context: Any) -> Message:
        """Triton's configuration of the model, unchanged."""
        return await self._plane.model_config(request.name, request.version)

    @answering_errors
    async def RepositoryIndex(self, request: Message, grpc_context: Any) -> Message:
        """The models that are served here, with their states."""
        models = await self._plane.repository_index(is_ready_only=request.ready)
        return service_pb2.RepositoryIndexResponse(models=models)

    @answering_errors
    async def ModelInfer(self, request: Message, grpc_context: Any) -> Message:
        """One inference request."""
        with admitted(self._plane, request):
            decoded = decode_infer_request(request)
            await give_back(decoded.size_bytes)
            answer = await self._plane.infer(decoded)
        await give_back(answer.size_bytes)
        return large_infer_response(answer) or encode_infer_response(answer)

    async def ModelStreamInfer(
        self, requests: AsyncIterable[Message], grpc_context: Any
    ) -> AsyncGenerator[Message, None]:
        """Many requests and the responses to each; see `InferStream`."""
        metadata = dict(grpc_context.invocation_metadata() or ())
        try:
            admit = None
            if (guard := self._guard) is not None:
                principal = guard.admit("ModelStreamInfer", None, grpc_context)
                admit = partial(guard.admit_message, principal, "ModelStreamInfer")
            stream = InferStream(self._plane, ends_with_error=metadata.get("triton_grpc_error") == "true", admit=admit)
            async with contextlib.aclosing(stream.answer(requests)) as answers:
                async for answer in answers:
                    yield answer
        except Overloaded as error:
            tell_error(error, grpc_context)
        except Exception as error:
            tell_error(error, grpc_context)
            raise

    @answering_errors
    async def ModelStatistics(self, request: Message, grpc_context: Any) -> Message:
        """What all servers have counted, added up."""
        return await self._plane.control.model_statistics(request.name, request.version)

    @answering_errors
    async def RepositoryModelLoad(self, request: Message, grpc_context: Any) -> Message:
        """Load a model on every server."""
        return await self._plane.control.load_model(request)

    @answering_errors
    async def RepositoryModelUnload(self, request: Message, grpc_context: Any) -> Message:
        """Unload a model on every server."""
        return await self._plane.control.unload_model(request)

    @answering_errors
    async def TraceSetting(self, request: Message, grpc_context: Any) -> Message:
        """Trace settings: read from any server, changed on every one."""
        return await self._plane.control.trace_setting(request)

    @answering_errors
    async def LogSettings(self, request: Message, grpc_context: Any) -> Message:
        """Log settings: read from any server, changed on every one."""
        return await self._plane.control.log_settings(request)

    @answering_errors
    async def SystemSharedMemoryStatus(self, request: Message, grpc_context: Any) -> Message:
        """The shared memory that clients have registered."""
        return await self._plane.shared_memory.status(request)

    @answering_errors
    async def SystemSharedMemoryRegister(self, request: Message, grpc_context: Any) -> Message:
        """Have the servers map shared memory of a client."""
        return await self._plane.shared_memory.register(request)

    @answering_errors
    async def SystemSharedMemoryUnregister(self, request: Message, grpc_context: Any) -> Message:
        """Have them let go of one region, or of all that clients have registered."""
        return await self._plane.shared_memory.unregister(request)

    CudaSharedMemoryStatus = _refusing("CudaSharedMemoryStatus", NO_SHARED_MEMORY)
    CudaSharedMemoryRegister = _refusing("CudaSharedMemoryRegister", NO_SHARED_MEMORY)
    CudaSharedMemoryUnregister = _refusing("CudaSharedMemoryUnregister", NO_SHARED_MEMORY)
