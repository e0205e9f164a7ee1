"""One tensor: dtype, shape and a view of its bytes, in the V2 binary form that Triton reads and writes."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from serve_app.errors import TensorDatatypeMismatch, TensorShapeMismatch
from serve_app.protocol.datatypes import DATATYPES, datatype_of

Buffer = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Region:
    """Where a tensor's data is in shared memory.

    Attributes:
        name: A registered region.
        size_bytes: Bytes there.
        offset: Where they begin in the region.
    """

    name: str
    size_bytes: int
    offset: int = 0


@dataclass(slots=True, eq=False)
class Tensor:
    """A named tensor.

    Attributes:
        name: The model's name for it.
        datatype: A key of `DATATYPES`.
        shape: Dimensions, the batch dimension first where the model has one; `()` is a scalar.
        data: Row-major little-endian elements; for `BYTES` each element is a 4-byte little-endian length and
            its bytes. Borrowed, never copied or changed by this package; whoever made the tensor keeps the
            buffer alive and unchanged while it is in use. Empty where `region` is set.
        region: Where Triton reads or writes the data instead; `None` for a tensor that carries its own.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer
    region: Region | None = None

    @property
    def num_elements(self) -> int:
        """Product of the dimensions; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Length of `data` in bytes."""
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)

    @classmethod
    def from_numpy(cls, name: str, array: npt.ArrayLike) -> Tensor:
        """A tensor over `array`.

        Contiguous little-endian arrays are borrowed without a copy. `object` and `bytes_` arrays become
        `BYTES`; `str` elements are encoded as UTF-8.

        Raises:
            TensorDatatypeMismatch: numpy's dtype has no V2 datatype (complex, datetime, ...).
        """
        array = np.asarray(array)
        datatype = datatype_of(array.dtype)
        if datatype is None:
            raise TensorDatatypeMismatch(
                f"inputs[{name!r}]", f"numpy dtype {array.dtype}", f"one of {', '.join(DATATYPES)}"
            )
        if datatype.name == "BYTES":
            return cls(name, "BYTES", array.shape, pack_bytes(array.reshape(-1).tolist(), name=name))
        shape = array.shape  # before `ascontiguousarray`, which makes a scalar one-dimensional
        array = np.ascontiguousarray(array, dtype=datatype.numpy_dtype.newbyteorder("<"))
        if array.size == 0:
            return cls(name, datatype.name, shape, b"")
        # bfloat16 has no buffer protocol, a view as bytes always has one.
        view = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # numpy's stubs lack __buffer__
        return cls(name, datatype.name, shape, view)

    def to_numpy(self) -> npt.NDArray[Any]:
        """The tensor as an array.

        Fixed-size datatypes give a read-only view of `data`; `BYTES` gives an `object` array of `bytes`.

        Raises:
            TensorDatatypeMismatch: `datatype` is not a V2 datatype.
            TensorShapeMismatch: `data` does not fill `shape`.
        """
        datatype = DATATYPES.get(self.datatype)
        if datatype is None:
            raise TensorDatatypeMismatch(
                f"tensor {self.name!r}", f"datatype {self.datatype!r}", f"one of {', '.join(DATATYPES)}"
            )
        if datatype.size_bytes is None:
            elements = unpack_bytes(self.data, name=self.name, num_elements=self.num_elements)
            objects = np.empty(len(elements), dtype=np.object_)
            objects[:] = elements
            return objects.reshape(self.shape)
        expected = self.num_elements * datatype.size_bytes
        if self.size_bytes != expected:
            raise TensorShapeMismatch(
                f"tensor {self.name!r}",
                f"{self.size_bytes} bytes of data",
                f"{expected} bytes for shape {list(self.shape)} of {self.datatype}",
            )
        array = np.frombuffer(self.data, dtype=datatype.numpy_dtype).reshape(self.shape)
        array.flags.writeable = False
        return array

    def __repr__(self) -> str:
        where = "" if self.region is None else f" in {self.region!r}"
        return f"<Tensor {self.name!r} {self.datatype}{list(self.shape)} {self.size_bytes} bytes{where}>"


def pack_bytes(elements: Iterable[Any], *, name: str) -> bytes:
    """Encode elements of a `BYTES` tensor: a 4-byte little-endian length before each.

    Raises:
        TensorDatatypeMismatch: An element is neither `bytes` nor `str`.
    """
    parts: list[bytes] = []
    for index, element in enumerate(elements):
        if isinstance(element, str):
            element = element.encode("utf-8", "surrogatepass")
        elif not isinstance(element, bytes):
            raise TensorDatatypeMismatch(
                f"tensor {name!r} element {index}", type(element).__name__, "bytes or str for a BYTES tensor"
            )
        parts.append(struct.pack("<I", len(element)))
        parts.append(element)
    return b"".join(parts)


def check_bytes(data: Buffer, *, name: str, num_elements: int) -> None:
    """Check that `data` is `num_elements` elements of a `BYTES` tensor; keeps nothing of them.

    Raises:
        TensorShapeMismatch: As for `bytes_offsets`.
    """
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if num_elements * 4 > size:
        raise _too_short(size, name, num_elements)
    offset, length_at = 0, _LENGTH.unpack_from
    try:
        for _ in range(num_elements):
            offset += 4 + length_at(data, offset)[0]
    except struct.error:  # an element begins behind the end
        offset = -1
    if offset != size:
        raise _not_elements(size, name, num_elements)


def bytes_offsets(data: Buffer, *, name: str, num_elements: int) -> list[int]:
    """Where each element of a `BYTES` tensor starts, and where the last one ends.

    Returns:
        `num_elements + 1` offsets into `data`; element i, its length included, is `data[o[i]:o[i + 1]]`.

    Raises:
        TensorShapeMismatch: `data` holds another number of elements, or ends inside one.
    """
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if num_elements * 4 > size:
        raise _too_short(size, name, num_elements)
    offsets = [0]
    offset = 0
    for _ in range(num_elements):
        end = offset + 4
        if end > size:
            break
        end += int.from_bytes(data[offset:end], "little")
        if end > size:
            break
        offsets.append(end)
        offset = end
    if len(offsets) != num_elements + 1 or offset != size:
        raise _not_elements(size, name, num_elements)
    return offsets


def _too_short(size: int, name: str, num_elements: int) -> TensorShapeMismatch:
    return TensorShapeMismatch(
        f"tensor {name!r}", f"{size} bytes of data", f"at least {num_elements * 4} for {num_elements} elements"
    )


def _not_elements(size: int, name: str, num_elements: int) -> TensorShapeMismatch:
    return TensorShapeMismatch(
        f"tensor {name!r}",
        f"{size} bytes that are not {num_elements} length-prefixed elements",
        f"{num_elements} elements, each a 4-byte little-endian length and its bytes",
    )


def unpack_bytes(data: Buffer, *, name: str, num_elements: int) -> list[bytes]:
    """Decode the elements of a `BYTES` tensor; the inverse of `pack_bytes`.

    Raises:
        TensorShapeMismatch: As for `bytes_offsets`.
    """
    offsets = bytes_offsets(data, name=name, num_elements=num_elements)
    return [bytes(data[start + 4 : end]) for start, end in pairwise(offsets)]
