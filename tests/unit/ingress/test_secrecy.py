"""What a request carries does not come back in an error, and does not end in a log: tensors, keys, stack traces."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.triton.fake import FakeModel, Lie
from tests.support.asgi import Answer, request
from tests.support.guarded_front import GuardedFront, guarded_front
from tests.support.keys import SECRETS, WRONG, key_of

# In every tensor, as text and as bytes; no part of it is in anything else.
MARK = "PATIENT-4711"
INFER, GENERATE = "/v2/models/words/infer", "/v2/models/words/generate"
TRACE = 'Traceback (most recent call last):\n  File "/secret/model.py", line 7, in execute\nValueError: boom'
SECRET_HEADERS = {
    "none": {},
    "wrong": {"authorization": f"Bearer {WRONG}"},
    "wrong basic": {"authorization": "Basic " + base64.b64encode(f"me:{WRONG}".encode()).decode()},
    "too small": {"x-api-key": key_of("reader")},
    "right": {"x-api-key": key_of("admin")},
}


@pytest.fixture
async def front() -> AsyncIterator[GuardedFront]:
    async with guarded_front() as front:
        front.fake.models["words"] = FakeModel("words", datatype="BYTES", dims=(1,))
        yield front


async def post(front: GuardedFront, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    return await request(front.app, "POST", path, body, headers, leave=asyncio.Event())


def document(**change: Any) -> bytes:
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "BYTES", "data": [MARK], **change}
    return json.dumps({"inputs": [tensor]}).encode()


def element(text: str) -> bytes:
    return len(text).to_bytes(4, "little") + text.encode()


def binary(data: bytes, size: int) -> tuple[bytes, dict[str, str]]:
    parameters = {"binary_data_size": size}
    header = json.dumps(
        {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "BYTES", "parameters": parameters}]}
    ).encode()
    return header + data, {"inference-header-content-length": str(len(header))}


BODIES: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "right": (INFER, document(), {}),
    "no JSON": (INFER, document()[:-3], {}),
    "a bare text": (INFER, json.dumps(MARK).encode(), {}),
    "inputs of text": (INFER, json.dumps({"inputs": MARK}).encode(), {}),
    "input of text": (INFER, json.dumps({"inputs": [MARK]}).encode(), {}),
    "data of text": (INFER, document(data=MARK), {}),
    "data too deep": (INFER, document(data=[[[MARK]]]), {}),
    "too much data": (INFER, document(data=[MARK, MARK]), {}),
    "data of another type": (INFER, document(data=[{"name": MARK}]), {}),
    "text for numbers": (INFER.replace("words", "identity"), document(datatype="FP32"), {}),
    "another datatype": (INFER, document(datatype="FP32", data=[1.0]), {}),
    "another shape": (INFER, document(shape=[1, 2]), {}),
    "another name": (INFER, document(name="INPUT7"), {}),
    "binary cut off": (INFER, *binary(element(MARK)[:-2], len(element(MARK)))),
    "binary with a wrong length": (INFER, *binary(b"\xff\xff\xff\x7f" + MARK.encode(), 4 + len(MARK))),
    "binary of another size": (INFER, *binary(element(MARK), 3)),
    "packed that is not": (INFER, document(), {"content-encoding": "gzip"}),
    "generate": (GENERATE, json.dumps({"INPUT0": MARK}).encode(), {}),
    "generate, deep": (GENERATE, json.dumps({"INPUT0": [[[[MARK]]]]}).encode(), {}),
    "generate, no JSON": (GENERATE, json.dumps({"INPUT0": MARK}).encode()[:-1], {}),
}
FAULTS = ["backend", "trace", "lie", "unknown status", "late"]


def break_it(front: GuardedFront, fault: str) -> None:
    model = front.fake.models["words"]
    if fault == "backend":
        front.fake.fail_next(grpc.StatusCode.INTERNAL, "out of memory", times=8)
    elif fault == "trace":
        front.fake.fail_next(grpc.StatusCode.INTERNAL, f"failed: boom\n\nAt:\n  {TRACE}", times=8)
    elif fault == "unknown status":
        front.fake.fail_next(grpc.StatusCode.UNKNOWN, "Exception calling application", times=8)
    elif fault == "lie":
        model.lie = Lie.SHAPE
    elif fault == "late":
        model.latency_s = 30.0


def check(texts: list[str], caplog: pytest.LogCaptureFixture) -> None:
    logged = [logging.Formatter().format(record) for record in caplog.records if record.name.startswith("serve_app")]
    for text in [*texts, *logged]:
        assert MARK not in text
        assert base64.b64encode(MARK.encode()).decode() not in text
        assert not [secret for secret in SECRETS if secret in text]
        assert "Traceback" not in text
        assert "/secret/" not in text


@pytest.mark.parametrize("kind", BODIES)
async def test_a_request_that_fails_is_not_repeated(
    front: GuardedFront, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With every kind of key, in answers and headers and in all that is logged."""
    caplog.set_level(logging.DEBUG)
    path, body, more = BODIES[kind]
    answers = [await post(front, path, body, {**headers, **more}) for headers in SECRET_HEADERS.values()]
    errors = [f"{answer.headers} {answer.body!r}" for answer in answers if answer.status != 200]
    assert len(errors) >= 4
    check(errors, caplog)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_backend_that_fails_says_no_more_than_why(
    front: GuardedFront, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Over HTTP, generate, gRPC and a stream: one line of the backend's text, nothing of the request."""
    caplog.set_level(logging.DEBUG)
    break_it(front, fault)
    headers = {**SECRET_HEADERS["right"], "x-request-timeout-seconds": "0.5"}
    texts = []
    for path, body in ((INFER, document()), (GENERATE, json.dumps({"INPUT0": MARK}).encode())):
        answer = await post(front, path, body, headers)
        assert answer.status in (500, 503, 504), answer.body
        texts.append(f"{answer.headers} {answer.body!r}")
    message = service_pb2.ModelInferRequest(model_name="words")
    message.inputs.add(name="INPUT0", datatype="BYTES", shape=[1, 1])
    message.raw_input_contents.append(element(MARK))
    async with grpc.aio.insecure_channel(front.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = tuple(SECRET_HEADERS["right"].items())
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ModelInfer(message, metadata=metadata, timeout=0.5)
        texts.append(raised.value.details() or "")
        if fault != "late":
            call = stub.ModelStreamInfer(iter([message]), metadata=metadata, timeout=20)
            texts += [answer.error_message async for answer in call]
            assert texts[-1]
    check(texts, caplog)
    assert all("\n" not in text for text in texts)
