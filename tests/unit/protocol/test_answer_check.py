"""What counts as an answer: the right names, datatypes, shapes and rows, and data that fills them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import AnswerMalformed
from serve_app.protocol.answer_check import decode_answer, find_fault
from serve_app.protocol.grpc_codec import encode_infer_response
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec, RequestedOutput, TensorSpec
from serve_app.protocol.tensor import Tensor

SPEC = ModelSpec(
    name="m",
    version="",
    versions=("1",),
    platform="python",
    inputs={"X": TensorSpec("X", "FP32", (-1, -1))},
    outputs={"Y": TensorSpec("Y", "FP32", (-1, 4)), "Z": TensorSpec("Z", "INT64", (-1, -1))},
    max_batch_size=8,
)


def tensor(name: str, *shape: int, dtype: type[np.generic] = np.float32) -> Tensor:
    return Tensor.from_numpy(name, np.zeros(shape, dtype))


def request(rows: int = 2, outputs: tuple[RequestedOutput, ...] = ()) -> InferRequest:
    return InferRequest("m", [tensor("X", rows, 3)], outputs=list(outputs))


def test_what_the_model_declares_is_an_answer() -> None:
    """All outputs, or some when nothing was asked for by name."""
    for outputs in ([tensor("Y", 2, 4), tensor("Z", 2, 9, dtype=np.int64)], [tensor("Z", 2, 0, dtype=np.int64)]):
        assert find_fault(InferResponse("m", outputs), request(), SPEC) is None


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ([tensor("Y", 3, 4)], "for 2 rows"),
        ([tensor("Y", 1, 4)], "for 2 rows"),
        ([tensor("Y", 2, 5)], "FP32[2, 5]"),
        ([tensor("Y", 2, 4, 1)], "FP32[2, 4, 1]"),
        ([tensor("Y", 2, 4, dtype=np.int32)], "INT32[2, 4]"),
        ([tensor("W", 2, 4)], "does not have"),
        ([tensor("Y", 2, 4), tensor("Y", 2, 4)], "twice"),
    ],
)
def test_what_is_no_answer(outputs: list[Tensor], says: str) -> None:
    """Other rows, shapes, datatypes and names than the model's."""
    fault = find_fault(InferResponse("m", outputs), request(), SPEC)
    assert fault is not None
    assert says in fault


def test_requested_outputs_are_all_there_and_nothing_else() -> None:
    """By name; one with a classification is a text, whatever the model declares."""
    wanted = request(outputs=(RequestedOutput("Y"),))
    assert "lacks" in (find_fault(InferResponse("m", []), wanted, None) or "")
    both = [tensor("Y", 2, 4), tensor("Z", 2, 1, dtype=np.int64)]
    assert "not asked for" in (find_fault(InferResponse("m", both), wanted, None) or "")
    classes = Tensor.from_numpy("Y", np.array([[b"1:a"], [b"2:b"]], object))
    top = request(outputs=(RequestedOutput("Y", {"classification": 1}),))
    assert find_fault(InferResponse("m", [classes]), top, SPEC) is None


@given(missing=st.integers(1, 31))
def test_truncated_contents_are_no_answer(missing: int) -> None:
    """Wherever the data is cut off; and it is the model that is named."""
    pb = encode_infer_response(InferResponse("m", [tensor("Y", 2, 4)]))
    pb.raw_output_contents[0] = pb.raw_output_contents[0][:-missing]
    with pytest.raises(AnswerMalformed, match=r"^model 'm' failed: "):
        decode_answer(pb, request(), SPEC)


@pytest.mark.parametrize("data", [b"\x01\x00\x00\x00", b"\x01\x00\x00\x00ab", b"\x05\x00\x00\x00a", b""])
def test_bytes_that_are_no_elements_are_no_answer(data: bytes) -> None:
    """However the answer would be written: it is the model's fault, and no caller's."""
    answer = InferResponse("m", [Tensor("S", "BYTES", (1,), data)])
    assert "malformed" in (find_fault(answer, request(), None) or "")
    assert find_fault(InferResponse("m", [Tensor("S", "BYTES", (1,), b"\x01\x00\x00\x00a")]), request(), None) is None
