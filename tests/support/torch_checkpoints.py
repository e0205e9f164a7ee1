"""Writes checkpoints in PyTorch's format from before 1.6, without PyTorch: sound ones, and ones to be refused."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from serve_app.samples.torch_checkpoint import MAGIC_NUMBER, PROTOCOL_VERSION

_STORAGE_NAMES = {"f": "FloatStorage", "i": "LongStorage"}


class _Storage:
    def __init__(self, key: str, array: npt.NDArray[Any]) -> None:
        self.key, self.array = key, array


class _Tensor:
    """Pickled as PyTorch pickles a tensor."""

    def __init__(self, storage: _Storage, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
        self.storage, self.shape, self.strides, self.offset = storage, shape, strides, offset

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = sys.modules["torch._utils"]._rebuild_tensor_v2
        return rebuild, (self.storage, self.offset, self.shape, self.strides, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        storage_type = getattr(sys.modules["torch"], _STORAGE_NAMES[obj.array.dtype.kind])
        return "storage", storage_type, obj.key, "cpu", obj.array.size, None


def write_checkpoint(tensors: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """A checkpoint of float32 and int64 arrays; an array that is not contiguous keeps its strides."""
    state = OrderedDict()
    for index, (name, array) in enumerate(tensors.items()):
        order = sorted(range(array.ndim), key=lambda axis, array=array: -array.strides[axis])  # type: ignore[misc]
        storage = _Storage(str(index), np.ascontiguousarray(array.transpose(order)).reshape(-1))
        strides = tuple(stride // array.itemsize for stride in array.strides)
        state[name] = _Tensor(storage, array.shape, strides, 0)
    return write_state(state, [tensor.storage for tensor in state.values()])


def write_view(array: npt.NDArray[Any], *, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> bytes:
    """A checkpoint of one tensor `view`, which claims this part of a flat array."""
    storage = _Storage("0", array)
    return write_state({"view": _Tensor(storage, shape, strides, offset)}, [storage])


def write_state(state: Any, storages: list[_Storage] | None = None) -> bytes:
    """A checkpoint with whatever object in the place of its state dictionary."""
    torch, torch_utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in _STORAGE_NAMES.values():
        setattr(torch, name, type(name, (), {"__module__": "torch", "__qualname__": name}))

    def _rebuild_tensor_v2() -> None: ...

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    torch_utils._rebuild_tensor_v2 = _rebuild_tensor_v2  # type: ignore[attr-defined]
    file = io.BytesIO()
    with mock.patch.dict(sys.modules, {"torch": torch, "torch._utils": torch_utils}):
        keys = [storage.key for storage in storages or []]
        for part in (MAGIC_NUMBER, PROTOCOL_VERSION, {"little_endian": True}, state, keys):
            _Pickler(file, protocol=2).dump(part)
    for storage in storages or []:
        file.write(storage.array.size.to_bytes(8, "little") + storage.array.tobytes())
    return file.getvalue()
