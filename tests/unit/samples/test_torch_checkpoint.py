"""Checkpoints are read exactly, and nothing but tensors comes out of one."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from serve_app.errors import PreflightFailed
from serve_app.samples.torch_checkpoint import read_checkpoint
from tests.support.torch_checkpoints import write_checkpoint, write_state, write_view

shapes = hnp.array_shapes(min_dims=0, max_dims=4, max_side=4)
arrays = st.one_of(hnp.arrays(np.float32, shapes), hnp.arrays(np.int64, shapes))


@given(st.dictionaries(st.text(max_size=20), arrays, max_size=5))
def test_reads_back_what_was_written(tensors: dict[str, npt.NDArray[Any]]) -> None:
    """Names, dtypes, shapes and every bit survive, scalars and empty dictionaries included."""
    read = read_checkpoint(write_checkpoint(tensors))
    assert list(read) == list(tensors)
    for name, array in tensors.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        assert read[name].tobytes() == array.tobytes()


def test_keeps_the_order_of_axes_that_the_file_has() -> None:
    """A tensor whose axes were permuted without moving its elements is read in its logical order."""
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    np.testing.assert_array_equal(read_checkpoint(write_checkpoint({"weight": array}))["weight"], array)


def test_reads_a_part_of_a_storage() -> None:
    """Offset and strides count elements."""
    data = write_view(np.arange(10, dtype=np.int64), shape=(3,), strides=(2,), offset=3)
    assert read_checkpoint(data)["view"].tolist() == [3, 5, 7]


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [((11,), (1,), 0), ((3,), (4,), 2), ((2, 2), (1,), 0), ((2,), (-1,), 5), ((2,), (1,), -1), ((-1,), (1,), 0)],
)
def test_refuses_a_view_that_leaves_its_storage(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
    """No byte outside the tensor's own storage is ever read."""
    data = write_view(np.arange(10, dtype=np.float32), shape=shape, strides=strides, offset=offset)
    with pytest.raises(PreflightFailed, match="refused"):
        read_checkpoint(data)


class _Command:
    """What an attacker would put into a checkpoint."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._file),)


def test_runs_nothing_that_is_in_the_file(tmp_path: Path) -> None:
    """A checkpoint that names a function is refused by that name, and the function is not called."""
    data = write_state(OrderedDict(weight=_Command(tmp_path / "made")))
    with pytest.raises(PreflightFailed, match=r"names posix\.mkdir, which is no part of a tensor"):
        read_checkpoint(data)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("state", [[1, 2], {"weight": 3}, "text"])
def test_refuses_anything_but_a_dictionary_of_tensors(state: object) -> None:
    """Harmless objects are refused as well."""
    with pytest.raises(PreflightFailed, match="something other than a dictionary of tensors"):
        read_checkpoint(write_state(state))


@given(st.data())
def test_refuses_a_file_cut_short(data: st.DataObject) -> None:
    """However much is missing at the end, the error is the typed one."""
    whole = write_checkpoint({"weight": np.ones((3, 2), np.float32), "steps": np.array(7, np.int64)})
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(PreflightFailed, match="refused"):
        read_checkpoint(whole[:length])
