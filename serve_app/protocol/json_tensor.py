"""The `data` array of a V2 JSON tensor to and from the tensor's bytes, with every value checked."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson

from serve_app.errors import InvalidRequest, TensorDatatypeMismatch, TensorShapeMismatch
from serve_app.protocol.datatypes import DATATYPES, Datatype
from serve_app.protocol.parameters import json_type
from serve_app.protocol.tensor import Tensor, pack_bytes, unpack_bytes

_INTEGER, _NUMBER = frozenset((int,)), frozenset((int, float))

JSON_FORMS: dict[str, tuple[frozenset[type], str, str]] = {
    "BOOL": (frozenset((bool,)), "true or false", "?"),
    "UINT8": (_INTEGER, "an integer", "B"),
    "UINT16": (_INTEGER, "an integer", "H"),
    "UINT32": (_INTEGER, "an integer", "I"),
    "UINT64": (_INTEGER, "an integer", "Q"),
    "INT8": (_INTEGER, "an integer", "b"),
    "INT16": (_INTEGER, "an integer", "h"),
    "INT32": (_INTEGER, "an integer", "i"),
    "INT64": (_INTEGER, "an integer", "q"),
    "FP32": (_NUMBER, "a number", "f"),
    "FP64": (_NUMBER, "a number", "d"),
    "BYTES": (frozenset((str,)), "a string", ""),
}
"""What JSON values a datatype takes, what that is called, and the `struct` code that writes them.

As in Triton, integers are fine in floating-point tensors, and 1.0 is not an integer.
"""


def pack_json(data: Any, *, datatype: Datatype, shape: tuple[int, ...], field: str) -> bytes:
    """The bytes of a tensor whose `data` came as decoded JSON.

    `data` is flat in row-major order, or nested exactly as `shape`; a scalar (`shape == ()`) may also be a bare value.

    Args:
        data: What `orjson.loads` made of it.
        datatype: The tensor's datatype.
        shape: The tensor's shape, with non-negative dimensions.
        field: Path of `data` for error texts, for example `inputs[0].data`.

    Raises:
        TensorDatatypeMismatch: A value does not fit the datatype, or the datatype travels only as binary data.
        TensorShapeMismatch: Another number of elements, ragged rows, or nesting that contradicts the shape.
        InvalidRequest: `data` is no array.
    """
    check_has_json(datatype, field)
    values = _flatten(data, shape, field)
    expected = math.prod(shape)
    if len(values) != expected:
        raise count_error(len(values), shape, field)
    _, _, code = JSON_FORMS[datatype.name]
    places = (expected,) if values is data else shape  # what an index of `values` stands for in `data`
    _check_types(values, datatype, places, field)
    if not code:
        return pack_bytes(values, name=field)
    return pack_numbers(values, datatype=datatype, field=field, places=places)


def pack_numbers(
    values: Sequence[Any], *, datatype: Datatype, field: str, places: tuple[int, ...] | None = None
) -> bytes:
    """The little-endian bytes of `values`, which have the right Python types already.

    Args:
        values: The elements in row-major order.
        datatype: Any but FP16, BF16 and BYTES.
        field: Path of the array they are from, for error texts.
        places: Shape of that array where it is nested.

    Raises:
        TensorDatatypeMismatch: A value is out of the datatype's range (a finite one that FP32 cannot hold included).
    """
    code = JSON_FORMS[datatype.name][2]
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError):
        for index, value in enumerate(values):
            try:
                struct.pack(f"<{code}", value)
            except (struct.error, OverflowError):
                path = f"{field}{element_path(index, (len(values),) if places is None else places)}"
                raise range_error(datatype, path) from None
        raise  # pragma: no cover  # one of them failed above


def _check_types(values: list[Any], datatype: Datatype, places: tuple[int, ...], field: str) -> None:
    kinds, what, _ = JSON_FORMS[datatype.name]
    if set(map(type, values)) <= kinds:
        return
    index = next(i for i, value in enumerate(values) if type(value) not in kinds)
    raise value_error(values[index], what, datatype, f"{field}{element_path(index, places)}")


def _flatten(data: Any, shape: tuple[int, ...], field: str) -> list[Any]:
    """The elements in row-major order; nesting is checked level by level, never by recursion."""
    if type(data) is not list:
        if not shape and type(data) is not dict:
            return [data]
        raise InvalidRequest(field, json_type(data), "an array")
    if not data or type(data[0]) is not list:
        return data
    if not shape or len(data) != shape[0]:
        raise outer_nesting_error(len(data), shape, field)
    level: list[Any] = data
    for axis in range(1, len(shape)):
        if set(map(type, level)) != {list} or set(map(len, level)) != {shape[axis]}:
            raise _nesting_error(level, shape, axis, field)
        level = list(chain.from_iterable(level))
        if not level:
            break
    return level


def _nesting_error(level: list[Any], shape: tuple[int, ...], axis: int, field: str) -> TensorShapeMismatch:
    """The error for the first part of `level`, the elements at depth `axis`, that is no array of the right length."""
    index = next(i for i, part in enumerate(level) if type(part) is not list or len(part) != shape[axis])
    part = level[index]
    return nesting_error(index, part, len(part) if type(part) is list else None, shape, axis, field)


def check_has_json(datatype: Datatype, field: str) -> None:
    """Check that a datatype travels as JSON.

    Raises:
        TensorDatatypeMismatch: It does not.
    """
    if not datatype.has_json:
        raise TensorDatatypeMismatch(
            field, f"{datatype.name} as JSON", "binary data (parameters.binary_data_size): it does not travel as JSON"
        )


def count_error(num_elements: int, shape: tuple[int, ...], field: str) -> TensorShapeMismatch:
    """The error for a number of elements that does not fill `shape`."""
    return TensorShapeMismatch(field, f"{num_elements} elements", f"{math.prod(shape)} for shape {list(shape)}")


def value_error(got: Any, what: str, datatype: Datatype, path: str) -> InvalidRequest:
    """The error for a value of another type than `what`."""
    error = TensorShapeMismatch if type(got) is list else TensorDatatypeMismatch
    return error(path, json_type(got), f"{what} for datatype {datatype.name}")


def range_error(datatype: Datatype, path: str) -> TensorDatatypeMismatch:
    """The error for a number that the datatype cannot hold."""
    return TensorDatatypeMismatch(path, "a number out of range", f"one that fits {datatype.name}")


def outer_nesting_error(length: int, shape: tuple[int, ...], field: str) -> TensorShapeMismatch:
    """The error for an array of another number of arrays than the first dimension says."""
    return TensorShapeMismatch(
        field, f"an array of {length} arrays", f"nesting as in shape {list(shape)}, or one flat array"
    )


def nesting_error(
    index: int, part: Any, length: int | None, shape: tuple[int, ...], axis: int, field: str
) -> TensorShapeMismatch:
    """The error for the `index`-th element at depth `axis`: no array (`length` is `None`), or one too long or short."""
    return TensorShapeMismatch(
        f"{field}{element_path(index, shape[:axis])}",
        json_type(part) if length is None else f"an array of {length} elements",
        f"an array of {shape[axis]} elements, as in shape {list(shape)}",
    )


def element_path(index: int, shape: tuple[int, ...]) -> str:
    """`[i][j]...` of the element at a row-major index."""
    parts: list[str] = []
    for size in reversed(shape):
        index, position = divmod(index, size)
        parts.append(f"[{position}]")
    return "".join(reversed(parts))


def json_values(tensor: Tensor, *, field: str) -> Any:
    """Something that `orjson.dumps(..., option=OPT_SERIALIZE_NUMPY)` writes as the tensor's flat `data`.

    FP32 values are written with the fewest digits that read back as the same float32. NaN and infinities are not
    JSON: orjson writes `null` for them; see `non_finite_fragment`.

    Raises:
        InvalidRequest: The datatype does not travel as JSON, or a `BYTES` element is not UTF-8.
        TensorShapeMismatch: The data does not fill the shape.
    """
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None or not datatype.has_json:
        raise InvalidRequest(field, f"{tensor.datatype} as JSON", "binary data: ask for it with binary_data")
    if datatype.size_bytes is None:
        return _strings(tensor, field)
    expected = tensor.num_elements * datatype.size_bytes
    if tensor.size_bytes != expected:
        raise TensorShapeMismatch(
            field, f"{tensor.size_bytes} bytes of data", f"{expected} for shape {list(tensor.shape)}"
        )
    if not expected:
        return []
    if datatype.name == "BOOL":  # any byte but zero is true, as in Triton
        return np.frombuffer(tensor.data, dtype=np.uint8) != 0
    return np.frombuffer(tensor.data, dtype=datatype.numpy_dtype)


def _strings(tensor: Tensor, field: str) -> list[str]:
    elements = unpack_bytes(tensor.data, name=tensor.name, num_elements=tensor.num_elements)
    try:
        return [element.decode("utf-8") for element in elements]
    except UnicodeDecodeError:
        index = next(i for i, element in enumerate(elements) if not _is_utf8(element))
        raise InvalidRequest(
            f"{field}[{index}]", "bytes that are not UTF-8", "binary data: ask for it with binary_data"
        ) from None


def _is_utf8(element: bytes) -> bool:
    try:
        element.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def non_finite_fragment(values: Any) -> orjson.Fragment | None:
    """The JSON text of a floating-point array that holds NaN or infinities, `None` when it holds none.

    They are written as `NaN`, `Infinity` and `-Infinity`, which strict JSON parsers refuse, because Triton does so
    and its clients read them.
    """
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
        return None
    rest = values[~np.isfinite(values)]
    if not rest.size:
        return None
    parts = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY).split(b"null")
    words = [b"NaN" if math.isnan(x) else b"Infinity" if x > 0 else b"-Infinity" for x in rest.tolist()]
    text = bytearray(parts[0])
    for word, part in zip(words, parts[1:], strict=True):
        text += word
        text += part
    return orjson.Fragment(bytes(text))
