"""Requests made to cost: each is refused early, by an error that names what was too much."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from starlette.types import ASGIApp
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.ingress.http_app import http_app
from serve_app.settings import LimitSettings
from serve_app.triton.fake import FakeModel, FakeTriton
from tests.support.asgi import request
from tests.support.front import running_plane
from tests.support.guarded_front import grpc_server

MIB = 1024 * 1024
LIMITS = LimitSettings(max_request_bytes=4 * MIB, max_json_bytes=2 * MIB, max_inputs=8, max_rank=4)
INFER = "/v2/models/identity/infer"


@pytest.fixture
async def front() -> AsyncIterator[tuple[ASGIApp, str]]:
    """The HTTP application and the gRPC address."""
    async with (
        FakeTriton(FakeModel()) as fake,
        running_plane(fake.endpoint, limits=LIMITS) as (plane, _),
        grpc_server(plane, None) as address,
    ):
        yield http_app(plane, LIMITS), address


def tensor(**change: Any) -> dict[str, Any]:
    return {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0], **change}


def body(*inputs: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


DEEP = 100_000
BODIES = {
    "too many tensors": (body(*[tensor(name=f"T{number}") for number in range(9)]), 413, "9 tensors, the limit is 8"),
    "too many dimensions": (body(tensor(shape=[1] * 5)), 413, "5 dimensions, the limit is 4"),
    "too much JSON": (body(tensor(data=[1.0] * 600_000, shape=[1, 600_000])), 413, "the limit is 2097152 bytes"),
    "too much": (b" " * (4 * MIB + 1), 413, "the limit is 4194304 bytes"),
    "brackets without end": (b"[" * MIB, 400, ""),
    "deep arrays": (b"[" * DEEP + b"]" * DEEP, 400, ""),
    "deep data": (b'{"inputs":[{"name":"INPUT0","shape":[1,1],"datatype":"FP32","data":%s%s}]}', 400, ""),
    "deep objects": (b'{"inputs":' * DEEP + b"1" + b"}" * DEEP, 400, ""),
    "huge dimension": (body(tensor(shape=[1, 2**62])), 400, ""),
    "huge product": (body(tensor(shape=[2**31, 2**31, 2**31])), 400, ""),
    "negative dimension": (body(tensor(shape=[1, -5])), 400, ""),
    "huge number": (body(tensor(shape=[1, 10**400])), 400, ""),
    "long name": (body(tensor(name="n" * MIB)), 413, "the limit is 262144 bytes"),
    "many parameters": (
        body(tensor(shape=[1, 3]), parameters={f"p{n}": n for n in range(50_000)}),
        413,
        "limit is 262144",
    ),
}
BODIES["deep data"] = (BODIES["deep data"][0] % (b"[" * DEEP, b"]" * DEEP), 400, "")


@pytest.mark.parametrize("kind", BODIES)
async def test_what_is_too_much_is_refused(front: tuple[ASGIApp, str], kind: str) -> None:
    """With an error of a bounded length; a limit is named with the size that met it."""
    data, status, said = BODIES[kind]
    answer = await request(front[0], "POST", INFER, data)
    assert answer.status == status, answer.body
    assert said in answer.json["error"]
    assert len(answer.body) < 4096


@pytest.mark.parametrize("path", ["/v2/models/identity/generate", "/v2/repository/index", "/v2/logging"])
async def test_other_bodies_are_bounded_too(front: tuple[ASGIApp, str], path: str) -> None:
    """By the limit of JSON, and in depth."""
    assert (await request(front[0], "POST", path, b" " * (2 * MIB + 1))).status == 413
    assert (await request(front[0], "POST", path, b"[" * DEEP + b"]" * DEEP)).status == 400


async def test_grpc_has_the_same_limits(front: tuple[ASGIApp, str]) -> None:
    """Tensors, dimensions and bytes."""
    many, deep, large = (service_pb2.ModelInferRequest(model_name="identity") for _ in range(3))
    for number in range(9):
        many.inputs.add(name=f"T{number}", datatype="FP32", shape=[1, 1])
        many.raw_input_contents.append(b"\0" * 4)
    deep.inputs.add(name="INPUT0", datatype="FP32", shape=[1] * 5)
    deep.raw_input_contents.append(b"\0" * 4)
    large.inputs.add(name="INPUT0", datatype="FP32", shape=[1, MIB + 1])
    large.raw_input_contents.append(b"\0" * (4 * MIB + 4))
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(front[1], options=options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for message, said in (
            (many, "the limit is 8 tensors"),
            (deep, "limit is 4 dimensions"),
            (large, "larger|limit"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=said) as raised:
                await stub.ModelInfer(message, timeout=20)
            assert raised.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
