"""Large messages around protobuf: the same bytes and the same meaning, without its copies."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from serve_app.errors import BackendFailed, InvalidRequest
from serve_app.protocol import grpc_codec, wire
from serve_app.protocol.messages import InferRequest, InferResponse
from serve_app.protocol.tensor import Tensor

LARGE = bytes(range(256)) * (wire.LARGE_BYTES // 256)


def request_pb(contents: list[bytes], **fields: Any) -> Any:
    tensors = [
        service_pb2.ModelInferRequest.InferInputTensor(name=f"x{i}", datatype="UINT8", shape=[len(data)])
        for i, data in enumerate(contents)
    ]
    return service_pb2.ModelInferRequest(model_name="m", inputs=tensors, raw_input_contents=contents, **fields)


@settings(deadline=None)
@given(contents=st.lists(st.binary(max_size=300), max_size=5), request_id=st.text(max_size=200))
def test_it_reads_what_protobuf_writes(contents: list[bytes], request_id: str) -> None:
    """The same message and contents as protobuf's own, whatever their number and lengths."""
    message = request_pb(contents, id=request_id)
    message.parameters["priority"].uint64_param = 2**64 - 1
    head, raw = wire.parse(message.SerializeToString(), service_pb2.ModelInferRequest, wire.RAW_INPUT_FIELD)
    assert [bytes(data) for data in raw] == contents
    del message.raw_input_contents[:]
    assert head == message


@settings(deadline=None)
@given(contents=st.lists(st.binary(max_size=300), max_size=5))
def test_it_writes_what_protobuf_writes(contents: list[bytes]) -> None:
    """Byte for byte, from any kind of buffer."""
    message = request_pb(contents)
    head = request_pb(contents)
    del head.raw_input_contents[:]
    buffers = [memoryview(bytearray(data)) if i % 2 else data for i, data in enumerate(contents)]
    large = wire.LargeMessage(head, wire.RAW_INPUT_FIELD, buffers)
    assert large.SerializeToString() == message.SerializeToString()


@settings(deadline=None)
@given(data=st.binary(max_size=200), cut=st.integers(0, 60), extra=st.binary(max_size=20))
def test_broken_bytes_are_judged_as_protobuf_judges_them(data: bytes, cut: int, extra: bytes) -> None:
    """Whatever protobuf refuses is refused, and what it takes means the same."""
    for wire_form in (data, request_pb([data], id="7").SerializeToString()[:cut] + extra):
        try:
            expected = service_pb2.ModelInferRequest.FromString(wire_form)
        except DecodeError:
            with pytest.raises(DecodeError):
                wire.parse(wire_form, service_pb2.ModelInferRequest, wire.RAW_INPUT_FIELD)
            continue
        head, raw = wire.parse(wire_form, service_pb2.ModelInferRequest, wire.RAW_INPUT_FIELD)
        assert [bytes(part) for part in raw] == list(expected.raw_input_contents)
        del head.raw_input_contents[:], expected.raw_input_contents[:]
        assert head == expected


def test_contents_are_views_of_the_message() -> None:
    """Nothing of a tensor is copied on the way in."""
    data = request_pb([LARGE]).SerializeToString()
    message = wire.read_infer_request(data)
    assert message.model_name == "m"
    tensor = grpc_codec.decode_infer_request(message).inputs[0]
    assert isinstance(tensor.data, memoryview)
    assert tensor.data.obj is data
    assert tensor.data == LARGE


def test_a_large_request_travels_by_pickle() -> None:
    """Ray Serve's default proxy sends what it has read to a replica in that way."""
    back = pickle.loads(pickle.dumps(wire.read_infer_request(request_pb([LARGE], id="7").SerializeToString())))
    request = grpc_codec.decode_infer_request(back)
    assert (back.model_name, request.id, request.inputs[0].data) == ("m", "7", LARGE)


def test_many_fields_are_left_to_protobuf() -> None:
    """A message of millions of empty contents does not become millions of objects."""
    data = request_pb([b""] * 10_000).SerializeToString()
    _, raw = wire.parse(data, service_pb2.ModelInferRequest, wire.RAW_INPUT_FIELD)
    assert len(raw) == 10_000
    assert not isinstance(raw, list)


def test_large_messages_make_the_round_trip() -> None:
    """Requests and responses, with ids and parameters, between our own writer and reader."""
    tensor = Tensor("x", "UINT8", (len(LARGE),), memoryview(bytearray(LARGE)))
    request = InferRequest("m", [tensor], "2", "id", parameters={"priority": 3})
    large = grpc_codec.large_infer_request(request)
    assert large is not None
    back = grpc_codec.decode_infer_request(wire.read_infer_request(large.SerializeToString()))
    assert (back.model_name, back.model_version, back.id, back.parameters) == ("m", "2", "id", {"priority": 3})
    assert back.inputs[0].data == LARGE
    response = InferResponse("m", [tensor], "2", "id", {"n": 1})
    answer = grpc_codec.large_infer_response(response)
    assert answer is not None
    again = grpc_codec.decode_infer_response(wire.read_infer_response(answer.SerializeToString()))
    assert (again.id, again.parameters, again.outputs[0].data) == ("id", {"n": 1}, LARGE)


def test_small_messages_go_by_protobuf() -> None:
    """Which costs less for them."""
    tensor = Tensor("x", "UINT8", (3,), b"abc")
    assert grpc_codec.large_infer_request(InferRequest("m", [tensor])) is None
    assert grpc_codec.large_infer_response(InferResponse("m", [tensor])) is None
    pb = wire.read_infer_request(request_pb([b"abc"]).SerializeToString())
    assert pb.raw_input_contents == [b"abc"]


def test_large_nonsense_is_an_error_of_ours() -> None:
    """The caller's where the caller sent it, the backend's where Triton did."""
    nonsense = b"\xff" * wire.LARGE_BYTES
    with pytest.raises(InvalidRequest, match="ModelInferRequest"):
        grpc_codec.decode_infer_request(wire.read_infer_request(nonsense))
    assert wire.read_infer_request(nonsense).model_name == ""
    with pytest.raises(BackendFailed, match="ModelInferResponse"):
        grpc_codec.decode_infer_response(nonsense)
