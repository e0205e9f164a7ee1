"""The contract of each datatype, and of tensors over arrays and bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor, triton_to_np_dtype

from serve_app.errors import TensorDatatypeMismatch, TensorShapeMismatch
from serve_app.protocol.datatypes import DATATYPES, Datatype, datatype_of
from serve_app.protocol.tensor import Tensor, bytes_offsets, pack_bytes, unpack_bytes


@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=lambda row: row.name)
def test_a_datatype_is_what_tritons_client_says(datatype: Datatype) -> None:
    """Name, config name and numpy dtype are those of tritonclient and of Triton's model configuration."""
    assert model_config_pb2.DataType.Value(datatype.config_name) > 0
    assert triton_to_np_dtype(datatype.name) == datatype.numpy_dtype
    assert np_to_triton_dtype(datatype.numpy_dtype) == datatype.name
    assert datatype_of(datatype.numpy_dtype) is datatype
    if datatype.size_bytes is not None:
        assert datatype.size_bytes == datatype.numpy_dtype.itemsize


def test_every_config_datatype_is_known() -> None:
    """No datatype of the model configuration is missing but TYPE_INVALID."""
    assert {row.config_name for row in DATATYPES.values()} == set(model_config_pb2.DataType.keys()) - {"TYPE_INVALID"}


@pytest.mark.parametrize("dtype", ["complex64", "datetime64[s]", "V4"])
def test_dtypes_that_v2_does_not_have(dtype: str) -> None:
    """Arrays of a dtype without a V2 datatype are refused by name."""
    assert datatype_of(np.dtype(dtype)) is None
    with pytest.raises(TensorDatatypeMismatch, match="inputs\\['x'\\]: got numpy dtype"):
        Tensor.from_numpy("x", np.zeros(1, dtype))


def test_contiguous_arrays_are_borrowed() -> None:
    """A contiguous array's bytes are not copied, on the way in or out."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = Tensor.from_numpy("x", array)
    assert np.shares_memory(tensor.to_numpy(), array)
    assert not tensor.to_numpy().flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(12, dtype=np.int16).reshape(3, 4).T[::2],
        np.float64(3.5),
        np.zeros((3, 0, 2), np.uint8),
        np.arange(3).astype(ml_dtypes.bfloat16),
    ],
)
def test_any_layout_becomes_row_major_little_endian(array: Any) -> None:
    """Byte order, strides, scalars and empty arrays make no difference to what is read back."""
    tensor = Tensor.from_numpy("x", array)
    assert tensor.shape == np.shape(array)
    assert np.array_equal(tensor.to_numpy(), array)


@pytest.mark.parametrize(
    "array", [np.array([["a", "\u00e9"]]), np.array([[b"a", b"\xc3\xa9"]]), np.array([["a", b"\xc3\xa9"]], object)]
)
def test_text_arrays_are_bytes(array: Any) -> None:
    """`str`, `bytes` and object arrays are BYTES tensors, text as UTF-8."""
    tensor = Tensor.from_numpy("x", array)
    assert tensor.datatype == "BYTES"
    assert tensor.to_numpy().tolist() == [[b"a", b"\xc3\xa9"]]


def test_objects_that_are_no_bytes() -> None:
    """An object array with anything but text or bytes is refused by its element."""
    with pytest.raises(TensorDatatypeMismatch, match="tensor 'x' element 1: got int"):
        Tensor.from_numpy("x", np.array(["a", 1], object))


@given(st.lists(st.binary(max_size=9), max_size=6))
def test_bytes_are_packed_as_tritons_client_packs_them(elements: list[bytes]) -> None:
    """Packed elements are tritonclient's bytes, come back whole, and their offsets cut them apart."""
    packed = pack_bytes(elements, name="x")
    expected = serialize_byte_tensor(np.array([*elements, None], object)[:-1])
    assert packed == (expected.item() if expected.size else b"")
    assert unpack_bytes(packed, name="x", num_elements=len(elements)) == elements
    offsets = bytes_offsets(memoryview(packed), name="x", num_elements=len(elements))
    assert [packed[a:b] for a, b in pairwise(offsets)] == [pack_bytes([element], name="x") for element in elements]


@given(st.binary(max_size=24), st.integers(0, 5))
def test_packed_bytes_are_never_misread(data: bytes, num_elements: int) -> None:
    """Bytes that are not exactly so many elements are refused; the others are what packing gives."""
    try:
        elements = unpack_bytes(data, name="x", num_elements=num_elements)
    except TensorShapeMismatch:
        return
    assert len(elements) == num_elements
    assert pack_bytes(elements, name="x") == data


def test_data_that_does_not_fill_the_shape() -> None:
    """Reading a tensor as an array checks its size and its datatype."""
    with pytest.raises(TensorShapeMismatch, match="tensor 'x': got 3 bytes of data, expected 4 bytes"):
        Tensor("x", "FP32", (1,), b"123").to_numpy()
    with pytest.raises(TensorDatatypeMismatch, match="tensor 'x': got datatype 'FP31'"):
        Tensor("x", "FP31", (1,), b"1234").to_numpy()


def test_repr() -> None:
    """A tensor's repr says all but its data."""
    assert repr(Tensor("x", "FP16", (2, 1), b"1234")) == "<Tensor 'x' FP16[2, 1] 4 bytes>"
