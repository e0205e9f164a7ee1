"""Rows go in and come out again: merge, split and join for every datatype and shape."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.batching.merge import join_responses, merge
from serve_app.batching.split import RowSlicer, bytes_view, check_rows, split_request, split_response
from serve_app.errors import BackendFailed, TensorDatatypeMismatch, TensorShapeMismatch
from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.messages import InferRequest, InferResponse
from serve_app.protocol.tensor import Tensor, pack_bytes


@st.composite
def tensors(draw: st.DrawFn, *, name: str, datatype: str, rows: int, inner: tuple[int, ...]) -> Tensor:
    count = rows * int(np.prod(inner, dtype=int))
    size = DATATYPES[datatype].size_bytes
    if size is None:
        data = pack_bytes(draw(st.lists(st.binary(max_size=5), min_size=count, max_size=count)), name=name)
    else:
        data = draw(st.binary(min_size=count * size, max_size=count * size))
    return Tensor(name, datatype, (rows, *inner), draw(st.sampled_from([bytes, bytearray, memoryview]))(data))


@st.composite
def mergeable(draw: st.DrawFn) -> list[InferRequest]:
    columns = [
        (f"t{index}", draw(st.sampled_from(sorted(DATATYPES))), tuple(draw(st.lists(st.integers(0, 3), max_size=2))))
        for index in range(draw(st.integers(1, 3)))
    ]
    requests = []
    for rows in draw(st.lists(st.integers(0, 5), min_size=1, max_size=6)):
        inputs = [draw(tensors(name=name, datatype=kind, rows=rows, inner=inner)) for name, kind, inner in columns]
        requests.append(InferRequest("m", draw(st.permutations(inputs))))
    return requests


def content(tensors: list[Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {tensor.name: (tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in tensors}


def echoed(request: InferRequest) -> InferResponse:
    return InferResponse("m", request.inputs, "3", parameters={"p": 1})


@settings(max_examples=150, deadline=None)
@given(mergeable())
def test_splitting_a_merged_batch_gives_every_request_back(requests: list[InferRequest]) -> None:
    """`split(merge(x)) == x` for all datatypes, shapes, rows (none too) and orders of inputs."""
    merged = merge(requests)
    rows = [request.inputs[0].shape[0] for request in requests]
    parts = split_response(echoed(merged), rows)
    assert [content(part.outputs) for part in parts] == [content(request.inputs) for request in requests]
    assert {part.model_version for part in parts} == {"3"}


@settings(max_examples=100, deadline=None)
@given(mergeable(), st.integers(1, 7))
def test_joining_the_parts_of_a_split_request_gives_it_back(requests: list[InferRequest], max_rows: int) -> None:
    """`join(split(x)) == x`, each part has 1 to `max_rows` rows, and no more parts are made than needed."""
    whole = merge(requests)
    parts = split_request(whole, max_rows)
    num_rows = whole.inputs[0].shape[0]
    assert len(parts) == max(-(-num_rows // max_rows), 1)
    assert all(part.inputs[0].shape[0] <= max_rows for part in parts)
    assert content(join_responses([echoed(part) for part in parts]).outputs) == content(whole.inputs)


@settings(max_examples=50, deadline=None)
@given(mergeable())
def test_the_bytes_of_rows_add_up(requests: list[InferRequest]) -> None:
    """Bytes counted row by row are the bytes of the whole request."""
    whole = merge(requests)
    slicer = RowSlicer(whole)
    assert sum(slicer.bytes_between(a, b) for a, b in pairwise(range(slicer.num_rows + 1))) == whole.size_bytes


def test_one_request_is_passed_on_as_it_is() -> None:
    """A batch of one copies nothing and changes nothing."""
    request = InferRequest("m", [Tensor.from_numpy("a", np.ones((2, 2), np.float32))], id="one")
    assert merge([request]) is request


def test_a_merged_request_tells_whose_it_is() -> None:
    """The id that Triton logs leads to a caller, and says that there are others."""
    requests = [InferRequest("m", [Tensor.from_numpy("a", np.ones((1, 2)))], id=name) for name in ("one", "two", "")]
    assert merge(requests).id == "one+2"
    assert merge(requests[::-1]).id == ""


def test_parts_share_no_mutable_parameters() -> None:
    """One caller that changes its answer's parameters changes nobody else's."""
    request = InferRequest("m", [Tensor.from_numpy("a", np.ones((2, 2)))])
    one, other = split_response(echoed(request), [1, 1])
    one.parameters["p"] = 2
    assert other.parameters == {"p": 1}


def answer(tensor: Tensor) -> InferResponse:
    return InferResponse("m", [Tensor.from_numpy("ok", np.zeros(3)), tensor])


@pytest.mark.parametrize(
    "lie",
    [
        Tensor.from_numpy("scores", np.zeros((2, 4), np.float32)),
        Tensor.from_numpy("scores", np.zeros((4, 4), np.float32)),
        Tensor.from_numpy("scores", np.float32(1)),
        Tensor("scores", "FP32", (3, 4), b"\0" * 44),
        Tensor("scores", "FP32", (3, 4), b"\0" * 52),
        Tensor("scores", "FP32", (3, 0), b"\0" * 4),
        Tensor("scores", "BYTES", (3,), pack_bytes(["a", "b"], name="scores")),
        Tensor("scores", "BYTES", (3,), pack_bytes(["a", "b", "c"], name="scores") + b"\0"),
        Tensor("scores", "COMPLEX", (3,), b""),
    ],
    ids=["few rows", "many rows", "scalar", "short", "long", "not empty", "few strings", "rest", "datatype"],
)
def test_an_output_that_is_not_one_row_per_row_is_named(lie: Tensor) -> None:
    """A model that answers other rows than it was sent is found out, instead of giving callers others' rows."""
    with pytest.raises(BackendFailed, match="scores"):
        split_response(answer(lie), [1, 2])
    with pytest.raises(BackendFailed, match="scores"):
        check_rows(answer(lie), 3)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": np.zeros((1, 2))}, {"a": np.zeros((1, 3))}, "'a'.*cannot be joined"),
        ({"a": np.zeros((1, 2))}, {"a": np.zeros((1, 2), np.int8)}, "'a'.*cannot be joined"),
        ({"a": np.zeros((1, 2))}, {"b": np.zeros((1, 2))}, "different outputs"),
        ({"a": np.zeros((1, 2))}, {"a": np.zeros((1, 2)), "b": np.zeros((1, 2))}, "different outputs"),
    ],
    ids=["shape", "datatype", "name", "number"],
)
def test_parts_that_do_not_match_are_not_joined(
    first: dict[str, npt.NDArray[Any]], second: dict[str, npt.NDArray[Any]], message: str
) -> None:
    """A model whose output shape depends on the batch gives a clear error for a split request."""
    parts = [
        InferResponse("m", [Tensor.from_numpy(name, array) for name, array in arrays.items()])
        for arrays in (first, second)
    ]
    with pytest.raises(BackendFailed, match=message):
        join_responses(parts)


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (Tensor("a", "FP32", (), b"\0" * 4), TensorShapeMismatch),
        (Tensor("a", "FP32", (2,), b"\0" * 7), TensorShapeMismatch),
        (Tensor("a", "NOPE", (2,), b""), TensorDatatypeMismatch),
        (Tensor("a", "BYTES", (2,), b"\1\0\0\0a"), TensorShapeMismatch),
    ],
)
def test_a_request_that_cannot_be_cut_says_why(tensor: Tensor, error: type[Exception]) -> None:
    """Tensors without rows, or whose data does not fill them, are refused by name."""
    with pytest.raises(error, match="'a'"):
        split_request(InferRequest("m", [tensor]), 1)


def test_inputs_with_different_rows_cannot_be_cut() -> None:
    """Rows are rows of the whole request."""
    inputs = [Tensor.from_numpy("a", np.zeros(2)), Tensor.from_numpy("b", np.zeros(3))]
    with pytest.raises(TensorShapeMismatch, match="'b'"):
        RowSlicer(InferRequest("m", inputs))


def test_parts_need_a_row() -> None:
    """A bound of no rows is a mistake, not an endless loop."""
    with pytest.raises(ValueError, match="max_rows"):
        split_request(InferRequest("m", [Tensor.from_numpy("a", np.zeros(2))]), 0)


@pytest.mark.parametrize("array", [np.arange(6, dtype="<i4").reshape(2, 3), np.zeros((0, 3), "<i4"), np.zeros((2, 0))])
def test_any_buffer_is_seen_as_bytes(array: npt.NDArray[Any]) -> None:
    """Views of other items and shapes are cut by bytes as well, empty ones too."""
    view = memoryview(array)  # type: ignore[arg-type]  # numpy's stubs lack __buffer__
    assert bytes(bytes_view(view)) == array.tobytes()
