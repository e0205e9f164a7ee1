"""What is refused in an HTTP inference request, and the field that each refusal names."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import (
    BackendFailed,
    InvalidRequest,
    RequestTooLarge,
    ServeAppError,
    TensorDatatypeMismatch,
    TensorShapeMismatch,
    Unsupported,
)
from serve_app.protocol import binary, client_codec
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec, RequestedOutput, TensorSpec
from serve_app.protocol.output_plan import BINARY_ONLY, JSON_ONLY, OutputPlan
from serve_app.protocol.tensor import Tensor
from serve_app.settings import LimitSettings

LIMITS = LimitSettings(max_inputs=3, max_rank=4, max_json_bytes=2000, max_request_bytes=4000)


def decode(
    document: Any, tail: bytes = b"", *, header_length: int | None = -1, spec: ModelSpec | None = None
) -> binary.DecodedRequest:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    if header_length == -1:
        header_length = len(text) if tail else None
    return binary.decode_infer_request(
        text + tail, model_name="m", model_version="", header_length=header_length, limits=LIMITS, spec=spec
    )


def x(datatype: str = "FP32", shape: Any = (1,), **members: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": datatype, "shape": shape, **members}]}


def data_of(datatype: str, shape: list[int], data: Any) -> bytes:
    return bytes(decode(x(datatype, shape, data=data)).request.inputs[0].data)


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "error", "text"),
    [
        ("FP32", [2], [1], TensorShapeMismatch, "inputs[0].data: got 1 elements, expected 2 for shape [2]"),
        ("FP32", [1], [], TensorShapeMismatch, "inputs[0].data: got 0 elements, expected 1 for shape [1]"),
        ("FP32", [1], 5, InvalidRequest, "inputs[0].data: got an integer, expected an array"),
        ("FP32", [1], None, InvalidRequest, "inputs[0].data: got null, expected an array"),
        ("FP32", [], {}, InvalidRequest, "inputs[0].data: got an object, expected an array"),
        ("FP32", [2], [1, "2"], TensorDatatypeMismatch, "inputs[0].data[1]: got a string, expected a number for"),
        ("FP32", [2], [1, None], TensorDatatypeMismatch, "inputs[0].data[1]: got null, expected a number for"),
        ("FP32", [2], [1, True], TensorDatatypeMismatch, "inputs[0].data[1]: got a boolean, expected a number for"),
        ("FP32", [2], [1, {}], TensorDatatypeMismatch, "inputs[0].data[1]: got an object, expected a number for"),
        ("FP32", [2], [1, 1e39], TensorDatatypeMismatch, "inputs[0].data[1]: got a number out of range, expected one"),
        ("INT32", [2], [1, 2.0], TensorDatatypeMismatch, "inputs[0].data[1]: got a number, expected an integer for"),
        ("INT32", [2], [1, 2**31], TensorDatatypeMismatch, "inputs[0].data[1]: got a number out of range"),
        ("UINT8", [2], [0, -1], TensorDatatypeMismatch, "inputs[0].data[1]: got a number out of range"),
        ("INT64", [1], [2**64], TensorDatatypeMismatch, "inputs[0].data[0]: got a number, expected an integer"),
        ("BOOL", [1], [1], TensorDatatypeMismatch, "inputs[0].data[0]: got an integer, expected true or false"),
        ("BYTES", [2], ["a", 1], TensorDatatypeMismatch, "inputs[0].data[1]: got an integer, expected a string"),
        ("FP16", [1], [1.0], TensorDatatypeMismatch, "inputs[0].data: got FP16 as JSON, expected binary data"),
        ("BF16", [1], [1.0], TensorDatatypeMismatch, "inputs[0].data: got BF16 as JSON, expected binary data"),
        ("FP32", [2, 2], [[1, 2], [3]], TensorShapeMismatch, "inputs[0].data[1]: got an array of 1 elements, expected"),
        ("FP32", [2, 2], [[1, 2], 3], TensorShapeMismatch, "inputs[0].data[1]: got an integer, expected an array of 2"),
        ("FP32", [2, 2], [1, [2, 3]], TensorShapeMismatch, "inputs[0].data: got 2 elements, expected 4"),
        ("FP32", [3, 2], [[1, 2, 3], [4, 5, 6]], TensorShapeMismatch, "inputs[0].data: got an array of 2 arrays"),
        ("FP32", [2, 3], [[1, 2], [3, 4]], TensorShapeMismatch, "inputs[0].data[0]: got an array of 2 elements"),
        ("FP32", [2], [[1], [2]], TensorShapeMismatch, "inputs[0].data[0]: got an array, expected a number"),
        ("FP32", [], [[1]], TensorShapeMismatch, "inputs[0].data: got an array of 1 arrays"),
        ("INT8", [2, 2], [[1, 2], [3, 300]], TensorDatatypeMismatch, "inputs[0].data[1][1]: got a number out of range"),
        ("INT8", [2, 2], [[1, 2], [3, "4"]], TensorDatatypeMismatch, "inputs[0].data[1][1]: got a string, expected"),
        ("INT8", [2, 2], [1, 2, 3, "4"], TensorDatatypeMismatch, "inputs[0].data[3]: got a string, expected"),
        ("INT8", [], "4", TensorDatatypeMismatch, "inputs[0].data: got a string, expected an integer"),
        ("INT8", [], ["4"], TensorDatatypeMismatch, "inputs[0].data[0]: got a string, expected an integer"),
        (
            "BYTES",
            [2, 2],
            [["a", "b"], "cd"],
            TensorShapeMismatch,
            "inputs[0].data[1]: got a string, expected an array",
        ),
        (
            "FP32",
            [1, 2, 2],
            [[[1, 2], [3, 4, 5]]],
            TensorShapeMismatch,
            "inputs[0].data[0][1]: got an array of 3 elements, expected an array of 2 elements, as in shape [1, 2, 2]",
        ),
        ("FP32", [0, 2], [[1, 2]], TensorShapeMismatch, "inputs[0].data: got an array of 1 arrays"),
    ],
)
def test_wrong_data_is_refused(datatype: str, shape: list[int], data: Any, error: type, text: str) -> None:
    """Data that fits not its datatype or shape is refused with its path, what it is and what it should be."""
    with pytest.raises(error) as caught:
        decode(x(datatype, shape, data=data))
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "expected"),
    [
        ("FP32", [2, 2], [[1, 2.5], [3, 4]], struct.pack("<4f", 1, 2.5, 3, 4)),
        ("FP32", [2, 2], [1, 2.5, 3, 4], struct.pack("<4f", 1, 2.5, 3, 4)),
        ("FP64", [1], [2**70], struct.pack("<d", 2.0**70)),
        ("UINT64", [1], [2**64 - 1], b"\xff" * 8),
        ("INT8", [2], [-128, 127], b"\x80\x7f"),
        ("BOOL", [2], [True, False], b"\1\0"),
        ("INT16", [], [7], b"\7\0"),
        ("INT16", [], 7, b"\7\0"),
        ("BYTES", [], "a", b"\1\0\0\0a"),
        ("FP32", [0], [], b""),
        ("FP32", [3, 0], [[], [], []], b""),
        ("FP32", [2, 0, 5], [[], []], b""),
        ("FP32", [0, 3], [], b""),
        ("BYTES", [2], ["\u00e9\0", ""], b"\3\0\0\0\xc3\xa9\0\0\0\0\0"),
        ("FP32", [1, 1, 1], [[[1]]], struct.pack("<f", 1)),
    ],
)
def test_data_becomes_row_major_little_endian(datatype: str, shape: list[int], data: Any, expected: bytes) -> None:
    """Nested as the shape or flat, scalars and empty tensors too, data becomes the bytes that Triton reads."""
    assert data_of(datatype, shape, data) == expected


@pytest.mark.parametrize(
    ("document", "error", "field"),
    [
        (b"", InvalidRequest, "body"),
        (b"{", InvalidRequest, "body"),
        (b"[]", InvalidRequest, "body"),
        (b"\xff", InvalidRequest, "body"),
        (b'{"inputs":' + b"[" * 1900, InvalidRequest, "body"),
        ({}, InvalidRequest, "inputs"),
        ({"inputs": None}, InvalidRequest, "inputs"),
        ({"inputs": {}}, InvalidRequest, "inputs"),
        ({"inputs": [5]}, InvalidRequest, "inputs[0]"),
        ({"inputs": [{}]}, InvalidRequest, "inputs[0].name"),
        ({"inputs": [{"name": ""}]}, InvalidRequest, "inputs[0].name"),
        ({"inputs": [{"name": 5}]}, InvalidRequest, "inputs[0].name"),
        ({"inputs": [{"name": "x", "shape": [1]}]}, TensorDatatypeMismatch, "inputs[0].datatype"),
        (x("FP31", data=[1]), TensorDatatypeMismatch, "inputs[0].datatype"),
        (x("fp32", data=[1]), TensorDatatypeMismatch, "inputs[0].datatype"),
        ({"inputs": [{"name": "x", "datatype": "FP32"}]}, InvalidRequest, "inputs[0].shape"),
        (x(shape=5, data=[1]), InvalidRequest, "inputs[0].shape"),
        (x(shape=[1, -1], data=[1]), TensorShapeMismatch, "inputs[0].shape[1]"),
        (x(shape=[1.0], data=[1]), TensorShapeMismatch, "inputs[0].shape[0]"),
        (x(shape=[True], data=[1]), TensorShapeMismatch, "inputs[0].shape[0]"),
        (x(shape=[0, 2**63], data=[]), TensorShapeMismatch, "inputs[0].shape[1]"),
        (x(), InvalidRequest, "inputs[0]"),
        (x(parameters=[]), InvalidRequest, "inputs[0].parameters"),
        (x(data=[1], parameters={"binary_data_size": 4}), InvalidRequest, "inputs[0]"),
        ({**x(data=[1]), "id": 5}, InvalidRequest, "id"),
        ({**x(data=[1]), "id": None}, InvalidRequest, "id"),
        ({**x(data=[1]), "parameters": []}, InvalidRequest, "parameters"),
        ({**x(data=[1]), "parameters": {"a": None}}, InvalidRequest, "parameters.a"),
        ({**x(data=[1]), "parameters": {"a": [1]}}, InvalidRequest, "parameters.a"),
        ({**x(data=[1]), "parameters": {"a": 2**63}}, InvalidRequest, "parameters.a"),
        ({**x(data=[1]), "parameters": {"triton_a": 1}}, InvalidRequest, "parameters.triton_a"),
        (
            {**x(data=[1]), "parameters": {"triton_enable_empty_final_response": True}},
            InvalidRequest,
            "parameters.triton_enable_empty_final_response",
        ),
        ({**x(data=[1]), "parameters": {"priority": "1"}}, InvalidRequest, "parameters.priority"),
        ({**x(data=[1]), "parameters": {"timeout": -1}}, InvalidRequest, "parameters.timeout"),
        ({**x(data=[1]), "parameters": {"sequence_start": 1}}, InvalidRequest, "parameters.sequence_start"),
        ({**x(data=[1]), "parameters": {"sequence_id": 1.5}}, InvalidRequest, "parameters.sequence_id"),
        ({**x(data=[1]), "parameters": {"binary_data_output": 1}}, InvalidRequest, "parameters.binary_data_output"),
        ({**x(data=[1]), "outputs": {}}, InvalidRequest, "outputs"),
        ({**x(data=[1]), "outputs": ["y"]}, InvalidRequest, "outputs[0]"),
        ({**x(data=[1]), "outputs": [{}]}, InvalidRequest, "outputs[0].name"),
        (
            {**x(data=[1]), "outputs": [{"name": "y", "parameters": {"binary_data": "true"}}]},
            InvalidRequest,
            "outputs[0].parameters.binary_data",
        ),
        (
            {**x(data=[1]), "outputs": [{"name": "y", "parameters": {"classification": 0}}]},
            InvalidRequest,
            "outputs[0].parameters.classification",
        ),
    ],
)
def test_a_malformed_body_is_refused_by_its_field(document: Any, error: type[InvalidRequest], field: str) -> None:
    """Each malformed part of a body is refused with its path; nothing in the text is longer than a line."""
    with pytest.raises(error) as caught:
        decode(document)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("key", ["a\nb", "k" * 500])
def test_a_strange_key_makes_no_strange_text(key: str) -> None:
    """Whatever the caller names a parameter, the text is one short line."""
    with pytest.raises(InvalidRequest) as caught:
        decode({"inputs": [], "parameters": {key: None}})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_nan_words_say_what_to_do() -> None:
    """A body with NaN in it is told that binary data carries it."""
    with pytest.raises(InvalidRequest, match="send them as binary data"):
        decode(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[NaN]}]}')


@pytest.mark.parametrize(
    ("document", "header_length", "what", "unit"),
    [
        ({"inputs": [], "pad": "x" * 2000}, None, "JSON of the request", "bytes"),
        ({"inputs": [], "pad": "x" * 4000}, 20, "request body", "bytes"),
        ({"inputs": [x()["inputs"][0]] * 4}, None, "inputs", "tensors"),
        (x(shape=[1] * 5, data=[1]), None, "inputs[0].shape", "dimensions"),
    ],
)
def test_sizes_beyond_a_limit_are_too_large(document: Any, header_length: int | None, what: str, unit: str) -> None:
    """Whatever has a limit is refused as too large, naming what, and in which unit."""
    with pytest.raises(RequestTooLarge) as caught:
        decode(document, header_length=header_length)
    assert (caught.value.what, caught.value.unit) == (what, unit)


@pytest.mark.parametrize(
    ("sizes", "tail", "error", "field"),
    [
        ([-1], 4, InvalidRequest, "inputs[0].parameters.binary_data_size"),
        (["4"], 4, InvalidRequest, "inputs[0].parameters.binary_data_size"),
        ([4.0], 4, InvalidRequest, "inputs[0].parameters.binary_data_size"),
        ([True], 4, InvalidRequest, "inputs[0].parameters.binary_data_size"),
        ([4, 8], 8, InvalidRequest, "inputs[1].parameters.binary_data_size"),
        ([4, 4], 7, InvalidRequest, "inputs[1].parameters.binary_data_size"),
        ([8], 8, TensorShapeMismatch, "inputs[0].parameters.binary_data_size"),
        ([0], 4, TensorShapeMismatch, "inputs[0].parameters.binary_data_size"),
        ([4], 5, InvalidRequest, "body"),
        ([2**70], 4, InvalidRequest, "inputs[0].parameters.binary_data_size"),
    ],
)
def test_binary_sizes_must_add_up(sizes: list[Any], tail: int, error: type[InvalidRequest], field: str) -> None:
    """Binary sizes are non-negative integers that fit their shapes and use up the body exactly."""
    inputs = [
        {"name": f"x{i}", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": size}}
        for i, size in enumerate(sizes)
    ]
    with pytest.raises(error) as caught:
        decode({"inputs": inputs}, b"\0" * tail)
    assert caught.value.field == field


def test_binary_and_json_inputs_mix() -> None:
    """Binary tensors are taken from the body in the order of the inputs that have a size."""
    document = {
        "id": "7",
        "parameters": {"binary_data_output": True, "custom": 1},
        "inputs": [
            {"name": "a", "datatype": "INT16", "shape": [1], "parameters": {"binary_data_size": 2}},
            {"name": "b", "datatype": "INT8", "shape": [1], "data": [9]},
            {"name": "c", "datatype": "FP16", "shape": [1], "parameters": {"binary_data_size": 2, "other": 1}},
        ],
        "outputs": [{"name": "y", "parameters": {"binary_data": True, "classification": 3}}, {"name": "z"}],
    }
    decoded = decode(document, b"\1\0\2\0")
    request = decoded.request
    assert [bytes(tensor.data) for tensor in request.inputs] == [b"\1\0", b"\t", b"\2\0"]
    assert request.id == "7"
    assert request.parameters == {"custom": 1}
    assert request.outputs == [RequestedOutput("y", {"classification": 3}), RequestedOutput("z")]
    assert [decoded.wants_binary.is_binary(name) for name in "yz"] == [True, False]


@pytest.mark.parametrize(
    ("text", "length"),
    [
        (None, None),
        ("", 0),
        ("  ", 0),
        ("0", 0),
        (" 12 ", 12),
        ("-1", ...),
        ("abc", ...),
        ("1_0", ...),
        ("\u0661", ...),
        ("9" * 30, ...),
    ],
)
def test_header_length(text: str | None, length: Any) -> None:
    """The header is a plain number; an empty one is a raw binary request; anything else is refused."""
    if length is ...:
        with pytest.raises(InvalidRequest, match="Inference-Header-Content-Length"):
            binary.parse_header_length(text)
    else:
        assert binary.parse_header_length(text) == length


def test_header_length_beyond_the_body() -> None:
    """A JSON part longer than the body is refused."""
    with pytest.raises(InvalidRequest, match="Inference-Header-Content-Length: got 99, expected at most the body's 2"):
        decode(b"{}", header_length=99)


def spec(*inputs: TensorSpec, rows: int = 0) -> ModelSpec:
    return ModelSpec("m", "", ("1",), "", {tensor.name: tensor for tensor in inputs}, {}, rows)


@pytest.mark.parametrize(
    ("tensor", "rows", "size", "shape"),
    [
        (TensorSpec("x", "FP32", (2, 3)), 0, 24, (2, 3)),
        (TensorSpec("x", "FP32", (-1, 3)), 0, 24, (2, 3)),
        (TensorSpec("x", "FP32", (-1, 3)), 4, 12, (1, 3)),
        (TensorSpec("x", "INT16", (-1, -1, 2)), 4, 12, (1, 3, 2)),
        (TensorSpec("x", "BYTES", (-1, 1)), 4, 5, (1, 1)),
        (TensorSpec("x", "BYTES", (-1,)), 0, 5, (1,)),
        (TensorSpec("x", "UINT8", (-1,)), 0, 5, (5,)),
    ],
)
def test_raw_binary_request(tensor: TensorSpec, rows: int, size: int, shape: tuple[int, ...]) -> None:
    """With header length 0 the body is the only input: one row, its dynamic dimension as the size makes it."""
    decoded = decode(b"a" * size, header_length=0, spec=spec(tensor, rows=rows))
    (got,) = decoded.request.inputs
    prefix = b"\5\0\0\0" if tensor.datatype == "BYTES" else b""
    assert (got.name, got.datatype, got.shape, bytes(got.data)) == ("x", tensor.datatype, shape, prefix + b"a" * size)
    assert decoded.wants_binary == BINARY_ONLY


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (None, Unsupported),
        (spec(), InvalidRequest),
        (spec(TensorSpec("x", "FP32", (1,)), TensorSpec("y", "FP32", (1,))), InvalidRequest),
        (spec(TensorSpec("x", "FP32", (3,))), TensorShapeMismatch),
        (spec(TensorSpec("x", "FP32", (-1, 3))), TensorShapeMismatch),
        (spec(TensorSpec("x", "FP32", (-1, 0))), TensorShapeMismatch),
        (spec(TensorSpec("x", "FP32", (-1, -1))), TensorShapeMismatch),
        (spec(TensorSpec("x", "BYTES", (2,))), TensorShapeMismatch),
    ],
)
def test_raw_binary_request_that_cannot_be_one(model: ModelSpec | None, error: type) -> None:
    """A raw body is refused for models with another number of inputs and where its size settles no shape."""
    with pytest.raises(error):
        decode(b"a" * 16, header_length=0, spec=model)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (Tensor("y", "FP16", (1,), b"\0\0"), "outputs[0].data: got FP16 as JSON"),
        (Tensor("y", "BF16", (1,), b"\0\0"), "outputs[0].data: got BF16 as JSON"),
        (Tensor("y", "BYTES", (2,), b"\0\0\0\0\1\0\0\0\xff"), "outputs[0].data[1]: got bytes that are not UTF-8"),
    ],
)
def test_an_answer_that_is_no_json_is_refused(tensor: Tensor, text: str) -> None:
    """What JSON cannot carry is refused, and the text says to ask for binary data."""
    with pytest.raises(InvalidRequest) as caught:
        binary.encode_infer_response(InferResponse("m", [tensor], "1"), JSON_ONLY)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    "tensor", [Tensor("y", "FP32", (2,), b"\0\0\0\0"), Tensor("y", "BYTES", (2,), b"\0\0\0\0\x09\0\0\0\xff")]
)
def test_an_answer_that_does_not_fit_itself_is_the_backends_fault(tensor: Tensor) -> None:
    """Output data that does not fill its shape is no error of the caller."""
    with pytest.raises(BackendFailed, match="model 'm' failed"):
        binary.encode_infer_response(InferResponse("m", [tensor], "1"), JSON_ONLY)


def test_non_finite_numbers_are_tritons_words() -> None:
    """NaN and infinities are written as Triton writes them; the numbers beside them are as always."""
    data = struct.pack("<5f", 0.1, float("nan"), float("inf"), float("-inf"), -0.0)
    body = binary.encode_infer_response(InferResponse("m", [Tensor("y", "FP32", (5,), data)], "1"), JSON_ONLY).body
    assert b'"data":[0.1,NaN,Infinity,-Infinity,-0.0]' in body


def test_the_answers_members() -> None:
    """Members come in Triton's order; `id` and `parameters` only where there are any; sizes count the JSON."""
    tensor = Tensor("y", "INT8", (2, 1), b"\1\2")
    body = binary.encode_infer_response(InferResponse("m", [tensor], "3", "q", {"p": 1}), JSON_ONLY)
    assert body.body == (
        b'{"id":"q","model_name":"m","model_version":"3","parameters":{"p":1},'
        b'"outputs":[{"name":"y","datatype":"INT8","shape":[2,1],"data":[1,2]}]}'
    )
    assert body.media_type == "application/json"
    body = binary.encode_infer_response(InferResponse("m", [tensor], "3"), BINARY_ONLY)
    text = (
        b'{"model_name":"m","model_version":"3","outputs":[{"name":"y","datatype":"INT8","shape":[2,1],'
        b'"parameters":{"binary_data_size":2}}]}'
    )
    assert body.chunks == (text, b"\1\2")
    assert body.header_length == len(text)
    assert body.media_type == "application/octet-stream"


def test_plan_refuses_early_what_json_cannot_carry() -> None:
    """A request for FP16 as JSON is refused before the model runs, unless it asks for a classification."""
    model = ModelSpec("m", "", (), "", {}, {"h": TensorSpec("h", "FP16", (1,)), "f": TensorSpec("f", "FP32", (1,))}, 0)
    half = ModelSpec("m", "", (), "", {}, {"h": TensorSpec("h", "FP16", (1,))}, 0)

    def request(*outputs: RequestedOutput) -> InferRequest:
        return InferRequest("m", [], outputs=list(outputs))

    with pytest.raises(InvalidRequest, match=r"outputs\[1\].parameters.binary_data"):
        OutputPlan(True, {"f": False, "h": False}).check(request(RequestedOutput("f"), RequestedOutput("h")), model)
    with pytest.raises(InvalidRequest, match=r"parameters.binary_data_output"):
        JSON_ONLY.check(request(), half)
    JSON_ONLY.check(request(), model)
    JSON_ONLY.check(request(RequestedOutput("h", {"classification": 1})), model)
    OutputPlan(False, {"h": True}).check(request(RequestedOutput("h")), model)
    BINARY_ONLY.check(request(), half)


@pytest.mark.parametrize(
    ("body", "header_length"),
    [
        (b"", None),
        (b"[" * 100_000, None),
        (b"{}", None),
        (b'{"model_name":"m","outputs":[{}]}', None),
        (b'{"model_name":"m","outputs":5}', None),
        (b'{"model_name":"m","outputs":[]}x', 31),
        (b"{}", 99),
    ],
)
def test_a_client_refuses_an_answer_that_is_none(body: bytes, header_length: int | None) -> None:
    """Whatever is no V2 response is one error for the client."""
    with pytest.raises(BackendFailed, match="no V2 response"):
        client_codec.decode_infer_response(body, header_length=header_length)


def test_a_client_does_not_send_what_json_cannot_carry() -> None:
    """NaN as a JSON input is refused at the client, with what to do."""
    request = InferRequest("m", [Tensor("x", "FP32", (1,), struct.pack("<f", float("nan")))])
    with pytest.raises(TensorDatatypeMismatch, match="expected binary data"):
        client_codec.encode_infer_request(request, json_inputs=["x"])


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**65), 2**65), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["name", "shape", "datatype", "data", "parameters", "binary_data_size"]), inner, max_size=4
        ),
    ),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "name": st.one_of(st.just("x"), json_values),
        "datatype": st.one_of(st.sampled_from(["FP32", "BYTES", "INT8", "BOOL", "FP16"]), json_values),
        "shape": st.one_of(st.lists(st.integers(0, 3), max_size=3), json_values),
        "data": json_values,
        "parameters": json_values,
    },
)
documents = st.one_of(
    json_values,
    st.fixed_dictionaries(
        {"inputs": st.lists(entries, max_size=2)},
        optional={"outputs": json_values, "parameters": json_values, "id": json_values},
    ),
)


@given(documents, st.binary(max_size=12), st.integers(-2, 2))
def test_any_body_is_a_request_or_a_typed_error(document: Any, tail: bytes, shift: int) -> None:
    """Whatever comes in, the answer is a request or one of our errors with a short text of one line."""
    text = json.dumps(document).encode()
    message = ""
    try:
        decode(text, tail, header_length=max(0, len(text) + shift))
    except ServeAppError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1000


@given(st.binary(max_size=64))
def test_any_bytes_are_a_typed_error(body: bytes) -> None:
    """Bytes that are no JSON at all are our error too."""
    with pytest.raises(InvalidRequest):
        decode(body, header_length=None)
