"""Names and paths that would lead out of a model's folder get no further than here."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

import grpc
import orjson
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.asgi import request
from tests.support.guarded_front import GuardedFront, guarded_front
from tests.support.keys import key_of

PATHS = [
    "../x",
    "../../x",
    "/etc/x",
    "1/../../x",
    "1/..",
    ".",
    "..",
    "",
    "1//x",
    "1/",
    "1\\..\\x",
    "1/x\0",
    "1/x\n",
    "1/" + "x" * 600,
]
NAMES = ["..", ".", "../identity", "a/b", "a\0b", "x" * 300]
ADMIN = {"x-api-key": key_of("admin")}


@pytest.fixture
async def front() -> AsyncIterator[GuardedFront]:
    async with guarded_front() as front:
        yield front


@pytest.mark.parametrize("path", PATHS)
async def test_a_file_stays_in_its_models_folder(front: GuardedFront, path: str) -> None:
    """Over HTTP and gRPC, before any server is asked."""
    body = orjson.dumps({"parameters": {f"file:{path}": base64.b64encode(b"evil").decode()}})
    answer = await request(front.app, "POST", "/v2/repository/models/identity/load", body, ADMIN)
    assert answer.status == 400, answer.body
    assert "inside the model's folder" in answer.json["error"]
    message = service_pb2.RepositoryModelLoadRequest(model_name="identity")
    message.parameters[f"file:{path}"].bytes_param = b"evil"
    async with grpc.aio.insecure_channel(front.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.RepositoryModelLoad(message, metadata=tuple(ADMIN.items()), timeout=20)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert front.fake.rpc_counts["RepositoryModelLoad"] == 0


@pytest.mark.parametrize("path", ["1/model.onnx", "2/saved/variables.data-00000", "labels.txt", "1/with space.bin"])
async def test_files_of_a_model_are_taken(front: GuardedFront, path: str) -> None:
    """In its version, deeper, or beside its configuration."""
    body = orjson.dumps({"parameters": {f"file:{path}": base64.b64encode(b"x").decode()}})
    await request(front.app, "POST", "/v2/repository/models/identity/load", body, ADMIN)
    assert front.fake.rpc_counts["RepositoryModelLoad"] == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_a_model_has_no_path_for_a_name(front: GuardedFront, name: str, verb: str) -> None:
    """Nor one that is a folder's by another way."""
    answer = await request(front.app, "POST", f"/v2/repository/models/{name}/{verb}", b"", ADMIN)
    assert answer.status in (400, 404)
    rpc_name = f"RepositoryModel{verb.capitalize()}"
    message = getattr(service_pb2, f"{rpc_name}Request")(model_name=name)
    async with grpc.aio.insecure_channel(front.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await getattr(stub, rpc_name)(message, metadata=tuple(ADMIN.items()), timeout=20)
    assert raised.value.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
    assert front.fake.rpc_counts[rpc_name] == 0
