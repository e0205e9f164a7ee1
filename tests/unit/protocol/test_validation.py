"""Requests beside the model they are for: what passes, with how many rows, and what each refusal says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.errors import (
    InvalidRequest,
    RequestTooLarge,
    TensorDatatypeMismatch,
    TensorNameMismatch,
    TensorShapeMismatch,
)
from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.messages import InferRequest, ModelSpec, RequestedOutput, TensorSpec
from serve_app.protocol.tensor import Tensor
from serve_app.protocol.validation import check_request
from serve_app.settings import LimitSettings


def model(*inputs: TensorSpec, max_batch_size: int = 0, **rest: Any) -> ModelSpec:
    outputs = {name: TensorSpec(name, "FP32", (-1,)) for name in ("y", "z")}
    return ModelSpec("m", "", ("1",), "", {t.name: t for t in inputs}, outputs, max_batch_size, **rest)


def zeros(name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
    tensor = Tensor(name, datatype, shape, b"")
    size = DATATYPES[datatype].size_bytes
    return replace(tensor, data=bytes(tensor.num_elements * (4 if size is None else size)))


PLAIN = model(TensorSpec("a", "FP32", (2, 3)), TensorSpec("b", "INT8", (-1,), is_optional=True))
ROWS = model(TensorSpec("a", "FP32", (-1, 3)), TensorSpec("b", "BYTES", (-1, -1), is_optional=True), max_batch_size=4)
OPTIONAL_ROWS = model(TensorSpec("a", "FP32", (-1,), is_optional=True), max_batch_size=4)


def check(spec: ModelSpec, *inputs: Tensor, outputs: tuple[str, ...] = (), limits: LimitSettings | None = None) -> int:
    request = InferRequest("m", list(inputs), outputs=[RequestedOutput(name) for name in outputs])
    return check_request(request, spec, limits or LimitSettings())


@pytest.mark.parametrize(
    ("spec", "inputs", "rows"),
    [
        (PLAIN, [zeros("a", "FP32", (2, 3))], 1),
        (PLAIN, [zeros("b", "INT8", (0,)), zeros("a", "FP32", (2, 3))], 1),
        (PLAIN, [zeros("b", "INT8", (9,)), zeros("a", "FP32", (2, 3))], 1),
        (ROWS, [zeros("a", "FP32", (1, 3))], 1),
        (ROWS, [zeros("a", "FP32", (4, 3)), zeros("b", "BYTES", (4, 0))], 4),
        (ROWS, [zeros("a", "FP32", (100, 3))], 100),
        (model(), [], 1),
        (model(TensorSpec("s", "FP64", ())), [zeros("s", "FP64", ())], 1),
    ],
)
def test_rows_of_a_good_request(spec: ModelSpec, inputs: list[Tensor], rows: int) -> None:
    """The rows are the common first dimension where the model batches, and 1 where it does not."""
    assert check(spec, *inputs) == rows


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_passes(datatype: str) -> None:
    """An input of any datatype passes when its data fills its shape, and not when a byte is missing."""
    spec = model(TensorSpec("a", datatype, (-1, 2)), max_batch_size=8)
    good = zeros("a", datatype, (3, 2))
    assert check(spec, good) == 3
    with pytest.raises(TensorShapeMismatch):
        check(spec, replace(good, data=bytes(good.data)[:-1]))
    with pytest.raises(TensorShapeMismatch):
        check(spec, replace(good, data=bytes(good.data) + b"\0"))


@pytest.mark.parametrize(
    ("spec", "inputs", "error", "text"),
    [
        (PLAIN, [zeros("q", "FP32", (2, 3))], TensorNameMismatch, "input 'q': got an input that model 'm' does not"),
        (PLAIN, [zeros("a", "FP32", (2, 3))] * 2, TensorNameMismatch, "input 'a': got the same input twice"),
        (PLAIN, [zeros("b", "INT8", (1,))], TensorNameMismatch, "input 'a': got no such input, expected FP32[2, 3]"),
        (PLAIN, [], TensorNameMismatch, "input 'a': got no such input"),
        (OPTIONAL_ROWS, [], InvalidRequest, "inputs: got no inputs, expected at least one input"),
        (PLAIN, [zeros("a", "INT32", (2, 3))], TensorDatatypeMismatch, "input 'a': got datatype INT32, expected FP32"),
        (PLAIN, [zeros("a", "FP32", (6,))], TensorShapeMismatch, "input 'a': got shape [6], expected [2, 3]"),
        (PLAIN, [zeros("a", "FP32", (3, 2))], TensorShapeMismatch, "input 'a': got shape [3, 2], expected [2, 3]"),
        (
            PLAIN,
            [zeros("a", "FP32", (2, 3)), Tensor("b", "INT8", (-1,), b"")],
            TensorShapeMismatch,
            "input 'b': got shape [-1], expected [-1], where -1 is any size",
        ),
        (ROWS, [zeros("a", "FP32", (3,))], TensorShapeMismatch, "input 'a': got shape [3], expected [-1, 3], where"),
        (ROWS, [zeros("a", "FP32", (2, 4))], TensorShapeMismatch, "input 'a': got shape [2, 4], expected [-1, 3]"),
        (ROWS, [zeros("a", "FP32", (0, 3))], TensorShapeMismatch, "input 'a': got shape [0, 3], 0 rows, expected at"),
        (
            ROWS,
            [zeros("a", "FP32", (2, 3)), zeros("b", "BYTES", (3, 1))],
            TensorShapeMismatch,
            "input 'b': got shape [3, 1], 3 rows, expected 2 rows as in input 'a' of shape [2, 3]",
        ),
        (
            PLAIN,
            [Tensor("a", "FP32", (2, 3), bytes(20))],
            TensorShapeMismatch,
            "input 'a': got 20 bytes of data, expected 24 for FP32[2, 3]",
        ),
        (
            ROWS,
            [zeros("a", "FP32", (1, 3)), Tensor("b", "BYTES", (1, 1), b"\5\0\0\0abc")],
            TensorShapeMismatch,
            "tensor 'b': got 7 bytes that are not 1 length-prefixed elements",
        ),
    ],
)
def test_a_request_that_does_not_fit(spec: ModelSpec, inputs: list[Tensor], error: type, text: str) -> None:
    """What does not fit the model is refused, with the input, what it is and what the model wants."""
    with pytest.raises(error) as caught:
        check(spec, *inputs)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("kind", ["is_decoupled", "is_sequence"])
def test_rows_beyond_the_batch_size_where_they_cannot_be_split(kind: str) -> None:
    """A model whose rows cannot be spread over requests takes `max_batch_size` rows and no more."""
    spec = model(TensorSpec("a", "FP32", (-1, 3)), max_batch_size=4, **{kind: True})
    assert check(spec, zeros("a", "FP32", (4, 3))) == 4
    with pytest.raises(RequestTooLarge, match="rows for model 'm': 5 rows, the limit is 4 rows"):
        check(spec, zeros("a", "FP32", (5, 3)))


def test_requested_outputs() -> None:
    """Outputs that the model has may be asked for in any order, once each."""
    good = zeros("a", "FP32", (2, 3))
    assert check(PLAIN, good, outputs=("z", "y")) == 1
    with pytest.raises(
        TensorNameMismatch, match=r"output 'q': got an output that model 'm' does not have.*one of y, z"
    ):
        check(PLAIN, good, outputs=("q",))
    with pytest.raises(TensorNameMismatch, match="output 'y': got the same output twice"):
        check(PLAIN, good, outputs=("y", "y"))


def test_classes_of_texts_are_refused() -> None:
    """Asked for them, Triton 2.51 divides by zero, and its process ends."""
    spec = ModelSpec("m", "", ("1",), "", PLAIN.inputs, {"s": TensorSpec("s", "BYTES", (-1,))}, 0)
    good = zeros("a", "FP32", (2, 3))
    request = InferRequest("m", [good], outputs=[RequestedOutput("s", {"classification": 1})])
    with pytest.raises(InvalidRequest, match="classification of BYTES"):
        check_request(request, spec, LimitSettings())


def test_limits() -> None:
    """Numbers of inputs and dimensions have limits, whatever the model."""
    limits = LimitSettings(max_inputs=1, max_rank=1)
    with pytest.raises(RequestTooLarge, match="inputs: 2 tensors, the limit is 1 tensors"):
        check(PLAIN, *[zeros("b", "INT8", (1,))] * 2, limits=limits)
    with pytest.raises(RequestTooLarge, match="rank of input 'a': 2 dimensions, the limit is 1 dimensions"):
        check(PLAIN, zeros("a", "FP32", (2, 3)), limits=limits)


def test_huge_shapes_are_refused_without_arithmetic_overflow() -> None:
    """A shape of astronomic size is a mismatch like any other."""
    spec = model(TensorSpec("a", "FP32", (-1, -1)))
    with pytest.raises(TensorShapeMismatch):
        check(spec, Tensor("a", "FP32", (2**62, 2**62), b"1234"))


def test_input_tensors_above_the_limit_of_size() -> None:
    """Size and limit are named; what is just at the limit passes."""
    tensor = zeros("a", "FP32", (4, 3))
    assert check(ROWS, tensor, limits=LimitSettings(max_request_bytes=48)) == 4
    with pytest.raises(RequestTooLarge) as raised:
        check(ROWS, tensor, limits=LimitSettings(max_request_bytes=47))
    assert str(raised.value) == "input tensors: 48 bytes, the limit is 47 bytes"
