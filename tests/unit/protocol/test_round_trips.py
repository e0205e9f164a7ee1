"""Properties of every codec: what is encoded comes back, bit by bit, for every datatype and shape."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.protocol import binary, client_codec, grpc_codec
from serve_app.protocol.messages import InferRequest, InferResponse
from serve_app.protocol.output_plan import BINARY_ONLY, JSON_ONLY, OutputPlan
from serve_app.protocol.tensor import Tensor
from serve_app.settings import LimitSettings
from tests.support.tensors import canonical, has_json, requests, responses, tensors

LIMITS = LimitSettings()


def decode(body: binary.EncodedBody) -> binary.DecodedRequest:
    return binary.decode_infer_request(
        body.body, model_name="m", model_version="2", header_length=body.header_length, limits=LIMITS
    )


def assert_equal(left: InferRequest | InferResponse, right: InferRequest | InferResponse) -> None:
    for name in ("model_name", "model_version", "id", "parameters"):
        assert getattr(left, name) == getattr(right, name)
    if isinstance(left, InferRequest) and isinstance(right, InferRequest):
        assert [canonical(t) for t in left.inputs] == [canonical(t) for t in right.inputs]
        assert left.outputs == right.outputs
    elif isinstance(left, InferResponse) and isinstance(right, InferResponse):
        assert [canonical(t) for t in left.outputs] == [canonical(t) for t in right.outputs]


@given(requests(), st.booleans(), st.data())
def test_http_request(request: InferRequest, is_binary_default: bool, data: st.DataObject) -> None:
    """A request survives HTTP with any mix of JSON and binary inputs, and so does the plan for its outputs."""
    candidates = [tensor.name for tensor in request.inputs if has_json(tensor)]
    json_inputs = data.draw(st.sets(st.sampled_from(candidates))) if candidates else set()
    plan = OutputPlan(is_binary_default, {output.name: data.draw(st.booleans()) for output in request.outputs})
    decoded = decode(client_codec.encode_infer_request(request, plan=plan, json_inputs=json_inputs))
    assert_equal(decoded.request, request)
    for name in (*plan.binary_by_name, "another output"):
        assert decoded.wants_binary.is_binary(name) == plan.is_binary(name)


@given(responses(), st.data())
def test_http_response(response: InferResponse, data: st.DataObject) -> None:
    """A response survives HTTP with any mix of JSON and binary outputs."""
    by_name = {t.name: not has_json(t) or data.draw(st.booleans()) for t in response.outputs}
    body = binary.encode_infer_response(response, OutputPlan(False, by_name))
    assert (body.header_length is None) == (True not in by_name.values())
    assert body.size_bytes == len(body.body)
    assert_equal(client_codec.decode_infer_response(body.body, header_length=body.header_length), response)


@given(requests())
def test_grpc_request(request: InferRequest) -> None:
    """A request survives protobuf with raw contents."""
    pb = grpc_codec.encode_infer_request(request)
    assert_equal(grpc_codec.decode_infer_request(pb.FromString(pb.SerializeToString())), request)


@given(responses())
def test_grpc_response(response: InferResponse) -> None:
    """A response survives protobuf."""
    pb = grpc_codec.encode_infer_response(response)
    assert_equal(grpc_codec.decode_infer_response(pb.FromString(pb.SerializeToString())), response)


@given(tensors(name="x", datatypes=("FP32", "FP64")))
def test_json_floats_keep_their_bits(tensor: Tensor) -> None:
    """Every finite float32 and float64 comes back from JSON as the same bits; NaN and infinities as such."""
    response = InferResponse("m", [tensor], "1")
    body = binary.encode_infer_response(response, JSON_ONLY).body
    back = client_codec.decode_infer_response(body, header_length=None).outputs[0]
    before, after = tensor.to_numpy(), back.to_numpy()
    assert np.array_equal(before, after, equal_nan=True)
    assert np.array_equal(np.signbit(before), np.signbit(after) | np.isnan(before) & np.signbit(before))


@given(tensors(name="x", datatypes=("FP32", "FP64")))
def test_json_floats_are_read_by_the_standard_library(tensor: Tensor) -> None:
    """What is written for floats is JSON as Python, and with it Triton's clients, read it."""
    body = binary.encode_infer_response(InferResponse("null", [tensor], "1"), JSON_ONLY).body
    values = json.loads(body)["outputs"][0]["data"]
    assert np.array_equal(np.array(values, tensor.to_numpy().dtype), tensor.to_numpy().reshape(-1), equal_nan=True)


@given(tensors(name="x"))
def test_numpy(tensor: Tensor) -> None:
    """A tensor survives being an array."""
    assert canonical(Tensor.from_numpy("x", tensor.to_numpy())) == canonical(tensor)


@given(requests())
def test_binary_inputs_are_views_of_the_body(request: InferRequest) -> None:
    """Binary inputs borrow the body: no tensor data is copied."""
    body = client_codec.encode_infer_request(request, plan=BINARY_ONLY)
    text = body.body
    decoded = binary.decode_infer_request(
        text, model_name="m", model_version="", header_length=body.header_length, limits=LIMITS
    )
    for tensor in decoded.request.inputs if body.header_length else ():
        assert isinstance(tensor.data, memoryview)
        assert tensor.data.obj is text


@pytest.mark.parametrize("is_json", [False, True], ids=["binary", "JSON"])
def test_texts_of_every_kind_come_back(is_json: bool) -> None:
    """Empty ones, NULs at the end, one of a megabyte, and in two dimensions."""
    texts = np.array([[b"", "\u00e9\U0001f600".encode(), b"a\0b\0\0"], [b"x" * 2**20, b" ", b"\0"]], np.object_)
    request = InferRequest("m", [Tensor.from_numpy("x", texts)], "2", "", [], {})
    plan = OutputPlan(True, {})
    decoded = decode(client_codec.encode_infer_request(request, plan=plan, json_inputs={"x"} if is_json else set()))
    assert decoded.request.inputs[0].to_numpy().tolist() == texts.tolist()
