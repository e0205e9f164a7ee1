"""The V2 datatypes and what each is in numpy and in Triton's model configuration."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class Datatype:
    """One row of the table.

    Attributes:
        name: V2 name, for example `FP32`.
        config_name: Name in `config.pbtxt`, for example `TYPE_FP32`.
        size_bytes: Bytes of one element on the wire (little endian); `None` for `BYTES`, whose elements are
            a 4-byte little-endian length and that many bytes.
        numpy_dtype: The matching numpy dtype; `object` for `BYTES`.
        has_json: Whether V2 JSON can carry it; FP16 and BF16 travel only as binary.
    """

    name: str
    config_name: str
    size_bytes: int | None
    numpy_dtype: np.dtype[np.generic]
    has_json: bool = True


def _row(name: str, numpy_type: object, *, config_name: str | None = None, has_json: bool = True) -> Datatype:
    dtype: np.dtype[np.generic] = np.dtype(numpy_type)  # type: ignore[call-overload]  # any dtype-like
    size = None if name == "BYTES" else dtype.itemsize
    return Datatype(name, config_name or f"TYPE_{name}", size, dtype, has_json)


# Open Inference Protocol, section "Tensor Data Types", and BF16, which Triton adds.
DATATYPES: dict[str, Datatype] = {
    row.name: row
    for row in (
        _row("BOOL", np.bool_),
        _row("UINT8", np.uint8),
        _row("UINT16", np.uint16),
        _row("UINT32", np.uint32),
        _row("UINT64", np.uint64),
        _row("INT8", np.int8),
        _row("INT16", np.int16),
        _row("INT32", np.int32),
        _row("INT64", np.int64),
        _row("FP16", np.float16, has_json=False),
        _row("BF16", ml_dtypes.bfloat16, has_json=False),
        _row("FP32", np.float32),
        _row("FP64", np.float64),
        _row("BYTES", np.object_, config_name="TYPE_STRING"),
    )
}

_BY_NUMPY: dict[np.dtype[np.generic], Datatype] = {
    row.numpy_dtype: row for row in DATATYPES.values() if row.name != "BYTES"
}


def datatype_of(dtype: np.dtype[np.generic]) -> Datatype | None:
    """The V2 datatype of a numpy dtype (any byte order), or `None` when there is none.

    `object`, `bytes_` and `str_` arrays are `BYTES`.
    """
    if dtype.kind in "OSU":
        return DATATYPES["BYTES"]
    return _BY_NUMPY.get(dtype.newbyteorder("="))
