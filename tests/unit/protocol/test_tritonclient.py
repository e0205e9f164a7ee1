"""Bodies of NVIDIA's own HTTP client: what it writes we read, what we write it reads."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton_http

from serve_app.protocol import binary
from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.messages import InferResponse, RequestedOutput
from serve_app.protocol.output_plan import BINARY_ONLY, JSON_ONLY, OutputPlan
from serve_app.protocol.tensor import Tensor
from serve_app.settings import LimitSettings

ARRAYS: dict[str, Any] = {
    "BOOL": np.array([[True, False]]),
    "FP16": np.array([[1.5, np.nan]], np.float16),
    "BF16": np.array([[1.5, -2.0]], ml_dtypes.bfloat16),
    "FP32": np.array([[0.1, 1e-45]], np.float32),
    "FP64": np.array([[0.1, 1e300]]),
    "BYTES": np.array([["a", "\u00e9\u4e2d"]], object),
    **{
        name: np.array([[np.iinfo(name.lower()).min, np.iinfo(name.lower()).max]], row.numpy_dtype)
        for name, row in DATATYPES.items()
        if "INT" in name
    },
}


def decode(body: bytes, header_length: int | None) -> binary.DecodedRequest:
    return binary.decode_infer_request(
        body, model_name="m", model_version="", header_length=header_length, limits=LimitSettings()
    )


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("is_binary", [True, False])
def test_its_requests_are_read(datatype: str, is_binary: bool) -> None:
    """An input of any datatype, as binary data or as the client's JSON, arrives as the same tensor."""
    if not is_binary and not DATATYPES[datatype].has_json:
        return
    array = ARRAYS[datatype]
    entry = triton_http.InferInput("x", array.shape, datatype)
    entry.set_data_from_numpy(array, binary_data=is_binary)
    decoded = decode(*triton_http.InferenceServerClient.generate_request_body([entry], request_id="7"))
    (got,) = decoded.request.inputs
    want = Tensor.from_numpy("x", array)
    assert (got.name, got.datatype, got.shape, bytes(got.data)) == ("x", datatype, (1, 2), bytes(want.data))
    assert decoded.request.id == "7"
    assert decoded.wants_binary == BINARY_ONLY  # the client asks for that when it lists no outputs
    assert decoded.request.parameters == {}


def test_its_outputs_and_parameters_are_read() -> None:
    """Requested outputs, each in its form, and sequence, priority and timeout parameters arrive."""
    entry = triton_http.InferInput("x", [1], "INT8").set_data_from_numpy(np.zeros(1, np.int8))
    outputs = [
        triton_http.InferRequestedOutput("a", binary_data=True),
        triton_http.InferRequestedOutput("b", binary_data=False, class_count=2),
    ]
    decoded = decode(
        *triton_http.InferenceServerClient.generate_request_body(
            [entry], outputs=outputs, sequence_id=5, sequence_start=True, priority=1, timeout=9, parameters={"k": "v"}
        )
    )
    assert decoded.request.outputs == [RequestedOutput("a"), RequestedOutput("b", {"classification": 2})]
    assert decoded.wants_binary == OutputPlan(False, {"a": True, "b": False})
    assert decoded.request.parameters == {
        "sequence_id": 5,
        "sequence_start": True,
        "sequence_end": False,
        "priority": 1,
        "timeout": 9,
        "k": "v",
    }


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("is_binary", [True, False])
def test_our_answers_are_read(datatype: str, is_binary: bool) -> None:
    """The client reads every datatype that we write, as binary data and as JSON."""
    if not is_binary and not DATATYPES[datatype].has_json:
        return
    tensor = Tensor.from_numpy("y", ARRAYS[datatype])
    body = binary.encode_infer_response(InferResponse("m", [tensor], "1", "7"), BINARY_ONLY if is_binary else JSON_ONLY)
    result = triton_http.InferResult.from_response_body(body.body, header_length=body.header_length)
    got = result.as_numpy("y")
    if datatype == "BYTES":
        got = np.array([[x if isinstance(x, bytes) else x.encode() for x in got.reshape(-1)]], object)
    assert got.shape == (1, 2)
    assert bytes(Tensor.from_numpy("y", got).data) == bytes(tensor.data)
    assert result.get_response()["id"] == "7"


def test_it_reads_nan_from_our_json() -> None:
    """The words that we write for NaN and infinities are what the client understands."""
    array = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    body = binary.encode_infer_response(InferResponse("m", [Tensor.from_numpy("y", array)], "1"), JSON_ONLY)
    got = triton_http.InferResult.from_response_body(body.body).as_numpy("y")
    assert np.array_equal(got, array, equal_nan=True)
