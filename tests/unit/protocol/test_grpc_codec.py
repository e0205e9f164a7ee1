"""ModelInferRequest and ModelInferResponse to messages and back: typed and raw contents, parameters, refusals."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from serve_app.errors import (
    BackendFailed,
    InvalidRequest,
    ServeAppError,
    TensorDatatypeMismatch,
    TensorShapeMismatch,
)
from serve_app.protocol import grpc_codec
from serve_app.protocol.messages import InferRequest, InferResponse, RequestedOutput
from serve_app.protocol.tensor import Tensor


def message(*inputs: tuple[str, list[int], dict[str, Any]], raw: list[bytes] | None = None) -> Any:
    pb = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=raw or [])
    for index, (datatype, shape, contents) in enumerate(inputs):
        entry = pb.inputs.add(name=f"x{index}", datatype=datatype, shape=shape)
        for field, values in contents.items():
            getattr(entry.contents, field).extend(values)
    return pb


@pytest.mark.parametrize(
    ("datatype", "field", "values", "expected"),
    [
        ("BOOL", "bool_contents", [True, False], b"\1\0"),
        ("INT8", "int_contents", [-1, 2], b"\xff\2"),
        ("INT16", "int_contents", [-1, 2], struct.pack("<2h", -1, 2)),
        ("INT32", "int_contents", [-1, 2], struct.pack("<2i", -1, 2)),
        ("INT64", "int64_contents", [-(2**63), 2], struct.pack("<2q", -(2**63), 2)),
        ("UINT8", "uint_contents", [255, 2], b"\xff\2"),
        ("UINT16", "uint_contents", [65535, 2], struct.pack("<2H", 65535, 2)),
        ("UINT32", "uint_contents", [2**32 - 1, 2], struct.pack("<2I", 2**32 - 1, 2)),
        ("UINT64", "uint64_contents", [2**64 - 1, 2], struct.pack("<2Q", 2**64 - 1, 2)),
        ("FP32", "fp32_contents", [0.1, float("inf")], struct.pack("<2f", 0.1, float("inf"))),
        ("FP64", "fp64_contents", [0.1, float("-inf")], struct.pack("<2d", 0.1, float("-inf"))),
        ("BYTES", "bytes_contents", [b"\xff", b""], b"\1\0\0\0\xff\0\0\0\0"),
    ],
)
def test_typed_contents(datatype: str, field: str, values: list[Any], expected: bytes) -> None:
    """Each datatype is read from its own contents field, in requests and in responses."""
    request = grpc_codec.decode_infer_request(message((datatype, [2], {field: values})))
    assert bytes(request.inputs[0].data) == expected
    pb = service_pb2.ModelInferResponse(model_name="m")
    getattr(pb.outputs.add(name="y", datatype=datatype, shape=[2]).contents, field).extend(values)
    assert bytes(grpc_codec.decode_infer_response(pb).outputs[0].data) == expected


def test_raw_contents() -> None:
    """Raw contents are taken as they are, in the order of the inputs."""
    pb = message(("FP16", [1], {}), ("BYTES", [1], {}), raw=[b"ab", b"\1\0\0\0z"])
    assert [tensor.data for tensor in grpc_codec.decode_infer_request(pb).inputs] == [b"ab", b"\1\0\0\0z"]


def test_empty_tensors_need_no_contents() -> None:
    """A tensor without elements is complete without any contents."""
    request = grpc_codec.decode_infer_request(message(("FP32", [0, 2], {}), ("BYTES", [0], {})))
    assert [tensor.data for tensor in request.inputs] == [b"", b""]


@pytest.mark.parametrize(
    ("pb", "error", "text"),
    [
        (
            message(("FP32", [1], {"fp32_contents": [1]}), raw=[b"1234"]),
            InvalidRequest,
            "inputs[0].contents: got contents beside raw_input_contents",
        ),
        (message(("FP32", [1], {}), ("FP32", [1], {}), raw=[b"1234"]), InvalidRequest, "raw_input_contents: got 1"),
        (message(("FP32", [1], {}), raw=[b"1234", b"1234"]), InvalidRequest, "raw_input_contents: got 2 entries"),
        (message(("FP32", [1], {}), raw=[b"12345"]), TensorShapeMismatch, "inputs[0]: got 5 bytes of data, expected 4"),
        (message(("FP32", [1], {})), TensorShapeMismatch, "inputs[0]: got 0 bytes of data, expected 4"),
        (message(("FP32", [3], {"fp32_contents": [1]})), TensorShapeMismatch, "inputs[0]: got 4 bytes of data"),
        (
            message(("INT8", [1], {"fp32_contents": [1]})),
            TensorDatatypeMismatch,
            "inputs[0].contents: got fp32_contents, expected int_contents for INT8",
        ),
        (
            message(("INT8", [1], {"int_contents": [1], "fp32_contents": [1]})),
            TensorDatatypeMismatch,
            "inputs[0].contents: got int_contents and fp32_contents",
        ),
        (
            message(("INT8", [2], {"int_contents": [1, 300]})),
            TensorDatatypeMismatch,
            "inputs[0].contents.int_contents[1]: got a number out of range, expected one that fits INT8",
        ),
        (
            message(("FP16", [1], {"fp32_contents": [1]})),
            TensorDatatypeMismatch,
            "inputs[0].contents: got fp32_contents, expected raw_input_contents for FP16",
        ),
        (message(("FP31", [1], {}), raw=[b""]), TensorDatatypeMismatch, "inputs[0].datatype: got 'FP31'"),
        (message(("FP32", [-1], {}), raw=[b"1234"]), TensorShapeMismatch, "inputs[0].shape: got [-1]"),
    ],
)
def test_wrong_contents_are_refused(pb: Any, error: type, text: str) -> None:
    """Contents that are mixed, missing, of another type or of another size are refused with their path."""
    with pytest.raises(error) as caught:
        grpc_codec.decode_infer_request(pb)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("key", "value", "choice"),
    [
        ("b", True, "bool_param"),
        ("i", 5, "int64_param"),
        ("i", -(2**63), "int64_param"),
        ("priority", 2**64 - 1, "uint64_param"),
        ("priority", 1, "int64_param"),
        ("s", "", "string_param"),
        ("d", 1.5, "double_param"),
        ("triton_enable_empty_final_response", True, "bool_param"),
    ],
)
def test_parameters_both_ways(key: str, value: Any, choice: str) -> None:
    """Each type of value has its member of the protobuf's oneof, of which Triton takes no `uint64_param` but one."""
    pb = grpc_codec.encode_infer_request(InferRequest("m", [], parameters={key: value}))
    assert pb.parameters[key].WhichOneof("parameter_choice") == choice
    back = grpc_codec.decode_infer_request(pb).parameters
    assert back == {key: value}
    assert type(back[key]) is type(value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("triton_x", {"int64_param": 1}),
        ("custom", {"uint64_param": 2**63}),
        ("timeout", {"int64_param": -1}),
        ("priority", {"string_param": "x"}),
        ("sequence_start", {"int64_param": 1}),
        ("unset", {}),
    ],
)
def test_wrong_parameters_are_refused(key: str, value: dict[str, Any]) -> None:
    """Reserved keys, unset values and those of a type or range that Triton refuses are refused by their key."""
    pb = message()
    pb.parameters[key].SetInParent()
    for field, content in value.items():
        setattr(pb.parameters[key], field, content)
    with pytest.raises(InvalidRequest) as caught:
        grpc_codec.decode_infer_request(pb)
    assert caught.value.field == f"parameters.{key}"


def test_small_unsigned_parameters_become_plain_integers() -> None:
    """A `uint64_param` that fits is sent on as the `int64_param` that Triton wants."""
    pb = message()
    pb.parameters["sequence_id"].uint64_param = 7
    request = grpc_codec.decode_infer_request(pb)
    assert grpc_codec.encode_infer_request(request).parameters["sequence_id"].int64_param == 7


def test_sequence_ids_are_unsigned() -> None:
    """The upper half of 64 bits goes on as the `int64_param` of the same bits; below 0 there is none."""
    pb = message()
    pb.parameters["sequence_id"].uint64_param = 2**64 - 9
    request = grpc_codec.decode_infer_request(pb)
    assert request.parameters["sequence_id"] == 2**64 - 9
    assert grpc_codec.encode_infer_request(request).parameters["sequence_id"].int64_param == -9
    pb.parameters["sequence_id"].int64_param = -9
    with pytest.raises(InvalidRequest, match="sequence_id"):
        grpc_codec.decode_infer_request(pb)


def test_requested_outputs() -> None:
    """Outputs keep order and parameters, but for `binary_data`, which means something over HTTP only."""
    pb = message()
    entry = pb.outputs.add(name="y")
    entry.parameters["classification"].int64_param = 3
    entry.parameters["binary_data"].bool_param = True
    pb.outputs.add(name="a")
    outputs = grpc_codec.decode_infer_request(pb).outputs
    assert outputs == [RequestedOutput("y", {"classification": 3}), RequestedOutput("a")]
    again = grpc_codec.encode_infer_request(InferRequest("m", [], outputs=outputs)).outputs
    assert again[0].parameters["classification"].int64_param == 3
    entry.parameters["classification"].int64_param = 0
    with pytest.raises(InvalidRequest, match=r"outputs\[0\].parameters.classification"):
        grpc_codec.decode_infer_request(pb)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_sent(kind: Any) -> None:
    """Tensors over bytes, bytearray and memoryview give the same message."""
    tensor = Tensor("x", "INT8", (3,), kind(b"abc"))
    pb = grpc_codec.encode_infer_request(InferRequest("m", [tensor], "2", "id"))
    assert (list(pb.raw_input_contents), pb.model_version, pb.id) == ([b"abc"], "2", "id")
    assert not pb.inputs[0].HasField("contents")
    pb = grpc_codec.encode_infer_response(InferResponse("m", [tensor], "2", "id"))
    assert (list(pb.raw_output_contents), pb.model_version, pb.id) == ([b"abc"], "2", "id")


@pytest.mark.parametrize(
    ("datatype", "shape", "raw"),
    [("FP31", [1], [b"1234"]), ("FP32", [2], [b"1234"]), ("FP32", [1], [b"1234", b"1234"]), ("FP32", [1], [])],
)
def test_an_answer_that_makes_no_sense_is_the_backends_fault(datatype: str, shape: list[int], raw: list[bytes]) -> None:
    """A response whose data does not fit itself is no error of the caller."""
    pb = service_pb2.ModelInferResponse(model_name="m", raw_output_contents=raw)
    pb.outputs.add(name="y", datatype=datatype, shape=shape)
    with pytest.raises(BackendFailed, match="model 'm' failed"):
        grpc_codec.decode_infer_response(pb)


def test_integers_of_more_than_64_bits_are_refused() -> None:
    """A parameter that no protobuf member can hold is an error with its key, not protobuf's own."""
    with pytest.raises(InvalidRequest, match=r"parameters.n: got an integer of more than 64 bits"):
        grpc_codec.encode_infer_request(InferRequest("m", [], parameters={"n": 2**64}))


@given(st.binary(max_size=80))
def test_any_message_is_a_request_or_a_typed_error(data: bytes) -> None:
    """Whatever protobuf can parse is a request or one of our errors."""
    try:
        pb = service_pb2.ModelInferRequest.FromString(data)
    except DecodeError:
        return
    with contextlib.suppress(ServeAppError):
        assert isinstance(grpc_codec.decode_infer_request(pb), InferRequest)
