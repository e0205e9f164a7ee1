"""Every RPC without a key, with a wrong one, one that is too small, and the right one, over a real channel."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.auth.scopes import REQUIRED_SCOPE, Operation, Scope
from serve_app.ingress.grpc_reflection import SERVICE_NAMES
from serve_app.ingress.grpc_servicer import GrpcServicer
from serve_app.ingress.operations import OF_SERVER_WITHOUT_MODEL, RPCS
from tests.support.guarded_front import GuardedFront, guarded_front
from tests.support.keys import RIGHT, SECRETS, TOO_SMALL, WRONG, key_of

FILES = (service_pb2, health_pb2, reflection_pb2)
METHODS: dict[str, MethodDescriptor] = {
    method.name: method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
async def front() -> AsyncIterator[GuardedFront]:
    async with guarded_front() as front:
        yield front


def metadata(key: str | None) -> tuple[tuple[str, str], ...]:
    return () if key is None else (("authorization", f"Bearer {key}"),)


def request_of(rpc_name: str, model_name: str) -> Any:
    """A request of that RPC, of a model where it has one."""
    message: Any = GetMessageClass(METHODS[rpc_name].input_type)()
    field = RPCS[rpc_name].model_field
    if field and model_name:
        setattr(message, field, model_name)
    if rpc_name in ("ModelInfer", "ModelStreamInfer"):
        message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
        message.raw_input_contents.append(np.float32(1).tobytes())
    if rpc_name == "ServerReflectionInfo":
        message.list_services = "*"
    return message


async def call(front: GuardedFront, rpc_name: str, key: str | None, model_name: str = "identity") -> tuple[Any, str]:
    """Status and details of a call; of a stream, those of its first answer, or the error in it."""
    method = METHODS[rpc_name]
    path = f"/{method.containing_service.full_name}/{rpc_name}"
    codecs = {
        "request_serializer": lambda message: message.SerializeToString(),
        "response_deserializer": GetMessageClass(method.output_type).FromString,
    }
    message, options = request_of(rpc_name, model_name), {"metadata": metadata(key), "timeout": 20}
    async with grpc.aio.insecure_channel(front.address) as channel:
        try:
            if rpc_name in ("ModelStreamInfer", "ServerReflectionInfo"):
                stream = channel.stream_stream(path, **codecs)(iter([message]), **options)
            elif rpc_name == "Watch":
                stream = channel.unary_stream(path, **codecs)(message, **options)
            else:
                await channel.unary_unary(path, **codecs)(message, **options)
                return grpc.StatusCode.OK, ""
            answer = await stream.read()
            stream.cancel()
            return grpc.StatusCode.OK, getattr(answer, "error_message", "")
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()


def test_every_rpc_is_an_operation() -> None:
    """A new RPC has to be listed in `ingress.operations`; till then it needs an `admin` key."""
    assert set(METHODS) == set(RPCS)
    assert sum(len(s.methods) for file in FILES for s in file.DESCRIPTOR.services_by_name.values()) == len(METHODS)
    assert {method.containing_service.full_name for method in METHODS.values()} == set(SERVICE_NAMES)
    assert all(hasattr(GrpcServicer, name) for name in METHODS)
    for name, rpc in RPCS.items():
        assert not rpc.model_field or rpc.model_field in METHODS[name].input_type.fields_by_name
        has_model = {"name", "model_name", "service"} & set(METHODS[name].input_type.fields_by_name)
        assert rpc.model_field or not has_model or rpc.operation is Operation.SHARED_MEMORY


def cases() -> Iterator[tuple[str, str, Operation]]:
    for name, rpc in RPCS.items():
        if rpc.model_field:
            yield name, "identity", rpc.operation
        if not rpc.model_field or name in OF_SERVER_WITHOUT_MODEL:
            yield name, "", OF_SERVER_WITHOUT_MODEL.get(name, rpc.operation)


@pytest.mark.parametrize(("rpc_name", "model_name", "operation"), [*cases()])
async def test_every_rpc_wants_a_key(front: GuardedFront, rpc_name: str, model_name: str, operation: Operation) -> None:
    """None, a wrong one or one that has expired: UNAUTHENTICATED; of a key that is too small: PERMISSION_DENIED."""
    scope = REQUIRED_SCOPE[operation]
    for key in (None, WRONG, key_of("old")):
        code, details = await call(front, rpc_name, key, model_name)
        if operation is Operation.HEALTH:
            assert code is grpc.StatusCode.OK
            continue
        assert code is UNAUTHENTICATED
        assert not any(secret in details for secret in SECRETS)
    if scope in TOO_SMALL:
        code, details = await call(front, rpc_name, key_of(TOO_SMALL[scope]), model_name)
        assert f"lacks the scope {scope.value!r}" in details
        assert code is PERMISSION_DENIED or rpc_name == "ModelStreamInfer"
    code, details = await call(front, rpc_name, key_of(RIGHT[scope]), model_name)
    assert code not in (UNAUTHENTICATED, PERMISSION_DENIED), details
    assert "key" not in details


@pytest.mark.parametrize("rpc_name", [name for name, rpc in RPCS.items() if rpc.model_field])
async def test_a_key_of_some_models_reaches_no_others(front: GuardedFront, rpc_name: str) -> None:
    """By no RPC that names a model, whether there is one by that name or not."""
    key = key_of("small-tuner" if rpc_name == "TraceSetting" else "runner")
    if RPCS[rpc_name].operation is Operation.LOAD_MODEL:
        key = key_of("loader")
    for model_name in ("nothing", "xidentity"):
        code, details = await call(front, rpc_name, key, model_name)
        assert code is PERMISSION_DENIED or rpc_name == "ModelStreamInfer"
        assert f"may not use model {model_name!r}" in details


async def test_a_list_has_the_keys_models_only(front: GuardedFront) -> None:
    """Index and statistics."""
    async with grpc.aio.insecure_channel(front.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for key, names in (("runner", {"identity"}), ("reader", {"identity", "other"})):
            index = await stub.RepositoryIndex(
                service_pb2.RepositoryIndexRequest(), metadata=metadata(key_of(key)), timeout=20
            )
            assert {model.name for model in index.models} == names
            statistics = await stub.ModelStatistics(
                service_pb2.ModelStatisticsRequest(), metadata=metadata(key_of(key)), timeout=20
            )
            assert {model.name for model in statistics.model_stats} == names


async def test_each_request_of_a_stream_is_asked_about(front: GuardedFront) -> None:
    """A stream that is open does not let other models in; what is refused is answered, and the stream goes on."""

    async def requests() -> AsyncIterator[Any]:
        for model_name in ("identity", "other", "identity"):
            yield request_of("ModelStreamInfer", model_name)

    async with grpc.aio.insecure_channel(front.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(requests(), metadata=metadata(key_of("runner")), timeout=20)
        errors = sorted([answer.error_message async for answer in call])
    assert errors == ["", "", "key 'runner' may not use model 'other': it is not one of its models"]


class Revocable:
    """A key that can be taken away."""

    def __init__(self, front: GuardedFront) -> None:
        self._keys = front.gate._keys
        self.is_revoked = False

    def find(self, key: str) -> Any:
        return None if self.is_revoked else self._keys.find(key)

    def get(self, key_id: str) -> Any:
        return None if self.is_revoked else self._keys.get(key_id)


async def test_a_key_that_is_taken_away_ends_its_streams(front: GuardedFront) -> None:
    """The next request of an open stream is refused, and an open health watch ends."""
    front.gate._keys = keys = Revocable(front)
    async with grpc.aio.insecure_channel(front.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(metadata=metadata(key_of("runner")), timeout=30)
        await call.write(request_of("ModelStreamInfer", "identity"))
        assert not (await call.read()).error_message
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="identity"), metadata=metadata(key_of("runner")), timeout=30
        )
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        keys.is_revoked = True
        await call.write(request_of("ModelStreamInfer", "identity"))
        assert "no valid API key" in (await call.read()).error_message
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await watch.read()
        assert raised.value.code() is UNAUTHENTICATED


async def test_reflection_tells_those_with_a_key(front: GuardedFront) -> None:
    """Names of the services, to a key of any scope."""
    async with grpc.aio.insecure_channel(front.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="*")
        call = stub.ServerReflectionInfo(iter([request]), metadata=metadata(key_of("reader")), timeout=20)
        answer = await call.read()
    assert {service.name for service in answer.list_services_response.service} == set(SERVICE_NAMES)


def basic(key: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"any:{key}".encode()).decode()}


@pytest.mark.parametrize("headers", [{"x-api-key": key_of("runner")}, basic(key_of("runner"))])
async def test_tritons_client_sends_a_key(front: GuardedFront, headers: dict[str, str]) -> None:
    """Unchanged, by the argument `headers` that each of its methods has."""
    async with triton_grpc.InferenceServerClient(front.address) as client:
        tensor = triton_grpc.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[7]], np.float32))
        answer = await client.infer("identity", [tensor], headers=headers)
        assert answer.as_numpy("OUTPUT0").tolist() == [[7.0]]


def test_scopes_of_the_tables_are_scopes() -> None:
    """Each operation has one."""
    assert set(REQUIRED_SCOPE) == set(Operation)
    assert set(RIGHT) == set(Scope)
