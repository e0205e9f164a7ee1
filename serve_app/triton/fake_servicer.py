"""The RPCs of `FakeTriton`: gRPC's calling convention on one side, its plain methods on the other."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2

from serve_app.triton.fake_control import FakeControlServicer
from serve_app.triton.fake_model import Failure, FakeModel, unknown_model
from serve_app.triton.fake_regions import FakeRegionServicer

if TYPE_CHECKING:
    from serve_app.triton.fake import FakeTriton


class FakeServicer(FakeControlServicer, FakeRegionServicer):
    """The RPCs; method names and signatures are the generated ones."""

    def __init__(self, fake: FakeTriton) -> None:
        self._fake = fake

    def _model(self, rpc: str, name: str, version: str, context: Any) -> FakeModel | None:
        self._fake.rpc_counts[rpc] += 1
        model = self._fake.models.get(name)
        failure = model.find_failure(version) if model else unknown_model(name)
        if failure is not None:
            context.set_code(failure.code)
            context.set_details(failure.text)
            return None
        return model

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        self._fake.rpc_counts["ServerLive"] += 1
        return service_pb2.ServerLiveResponse(live=self._fake.is_live)

    async def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        self._fake.rpc_counts["ServerReady"] += 1
        return service_pb2.ServerReadyResponse(ready=self._fake.is_ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        self._fake.rpc_counts["ServerMetadata"] += 1
        return service_pb2.ServerMetadataResponse(name="triton", version="2.51.0", extensions=["model_repository"])

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        self._fake.rpc_counts["ModelReady"] += 1
        model = self._fake.models.get(request.name)
        is_ready = model is not None and model.find_failure(request.version) is None
        return service_pb2.ModelReadyResponse(ready=is_ready)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        model = self._model("ModelMetadata", request.name, request.version, context)
        return model.metadata() if model else service_pb2.ModelMetadataResponse()

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        model = self._model("ModelConfig", request.name, request.version, context)
        return model.config() if model else service_pb2.ModelConfigResponse()

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        self._fake.rpc_counts["RepositoryIndex"] += 1
        entry = service_pb2.RepositoryIndexResponse.ModelIndex
        models = [
            entry(name=model.name, version=version, state="READY" if model.is_ready else "UNAVAILABLE")
            for model in self._fake.models.values()
            for version in model.versions
            if model.is_ready or not request.ready
        ]
        return service_pb2.RepositoryIndexResponse(models=models)

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        self._fake.rpc_counts["ModelInfer"] += 1
        result = await self._fake.infer(request, peer=context.peer(), timeout_s=context.time_remaining())
        if isinstance(result, Failure):
            context.set_code(result.code)
            context.set_details(result.text)
            return service_pb2.ModelInferResponse()
        return result

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802  # generated name
        self._fake.rpc_counts["ModelStreamInfer"] += 1
        metadata = dict(context.invocation_metadata() or ())
        async for request in requests:
            answers = self._fake.stream(request, peer=context.peer(), timeout_s=context.time_remaining())
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    if not isinstance(answer, Failure):
                        yield service_pb2.ModelStreamInferResponse(infer_response=answer)
                    elif metadata.get("triton_grpc_error") == "true":
                        await context.abort(answer.code, answer.text)
                    else:
                        infer_response = service_pb2.ModelInferResponse(id=request.id)
                        yield service_pb2.ModelStreamInferResponse(
                            error_message=answer.text, infer_response=infer_response
                        )
