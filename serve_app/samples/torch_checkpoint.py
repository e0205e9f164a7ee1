"""Reads the tensors of a PyTorch checkpoint without PyTorch, and without running anything that is in it.

A `.pth` file is a pickle, which may name any function to call. Here only the few names that make up a dictionary of
tensors are known; every other one is refused. The format is the one `torch.save` wrote before PyTorch 1.6: five
pickles (magic number, protocol version, machine, state dictionary, storage keys), then each storage's element
count and bytes in the order of the keys.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from serve_app.errors import PreflightFailed

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001

_ELEMENT_COUNT_BYTES = 8
_STORAGE_DTYPES = {"FloatStorage": np.dtype("<f4"), "LongStorage": np.dtype("<i8")}


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: np.dtype[Any]
    num_elements: int


@dataclass(frozen=True)
class _TensorRecord:
    """A tensor whose elements come later in the file."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object
) -> _TensorRecord:
    if len(shape) != len(strides) or min((offset, *shape, *strides)) < 0:
        raise _refused(f"a tensor has shape {shape}, strides {strides} and offset {offset}")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if last >= storage.num_elements:
        raise _refused(f"a tensor of shape {shape} reaches element {last} of {storage.num_elements}")
    return _TensorRecord(storage, offset, shape, strides)


class _TensorUnpickler(pickle.Unpickler):
    """Knows the names of a dictionary of CPU tensors, and no others."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if module_name == "torch" and global_name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[global_name]
        raise _refused(f"it names {module_name}.{global_name}, which is no part of a tensor")

    def persistent_load(self, pid: Any, /) -> _Storage:
        kind, dtype, key, _, num_elements, view = pid
        if kind != "storage" or not isinstance(dtype, np.dtype) or view is not None or num_elements < 0:
            raise _refused(f"it refers to a {kind!r} where a whole tensor storage was expected")
        return _Storage(key, dtype, num_elements)


def read_checkpoint(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """The state dictionary of a checkpoint.

    Args:
        data: The whole `.pth` file in the format before PyTorch 1.6.

    Returns:
        Arrays by parameter name; read-only views of `data`, not always contiguous (weights that came from
        TensorFlow keep its order of axes in memory).

    Raises:
        PreflightFailed: It is not such a file, is cut short, or holds anything but a dictionary of tensors.
    """
    file = io.BytesIO(data)
    try:
        if (_load(file), _load(file)) != (MAGIC_NUMBER, PROTOCOL_VERSION):
            raise _refused("it does not start with PyTorch's magic number")
        _load(file)  # byte order and integer sizes of the machine that wrote it
        state = _load(file)
        storages = _read_storages(file, data, keys=_load(file), state=state)
        return {name: _tensor(record, storages) for name, record in state.items()}
    except PreflightFailed:
        raise
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise _refused(f"reading it failed with {type(error).__name__}") from error


def _load(file: BinaryIO) -> Any:
    return _TensorUnpickler(file).load()


def _read_storages(file: BinaryIO, data: bytes, *, keys: list[str], state: object) -> dict[str, npt.NDArray[Any]]:
    """Every storage's elements, in the order in which the file has them."""
    if not isinstance(state, dict) or not all(isinstance(record, _TensorRecord) for record in state.values()):
        raise _refused("it holds something other than a dictionary of tensors")
    known: Mapping[str, _Storage] = {record.storage.key: record.storage for record in state.values()}
    storages = {}
    position = file.tell()
    for key in keys:
        storage = known[key]
        written = int.from_bytes(data[position : position + _ELEMENT_COUNT_BYTES], "little")
        if written != storage.num_elements:
            raise _refused(f"storage {key} has {written} elements where {storage.num_elements} were announced")
        position += _ELEMENT_COUNT_BYTES
        storages[key] = np.frombuffer(data, storage.dtype, storage.num_elements, position)
        position += storages[key].nbytes
    return storages


def _tensor(record: _TensorRecord, storages: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    elements = storages[record.storage.key]
    size_bytes = elements.itemsize
    tensor: npt.NDArray[Any] = np.ndarray(
        record.shape,
        elements.dtype,
        buffer=elements.data,
        offset=record.offset * size_bytes,
        strides=[stride * size_bytes for stride in record.strides],
    )
    return tensor


def _refused(reason: str) -> PreflightFailed:
    return PreflightFailed(
        f"The PyTorch checkpoint was refused: {reason}.",
        "use the package named in serve_app/samples/catalog.py, unchanged.",
    )
