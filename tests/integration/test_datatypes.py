"""Unchanged Triton clients carry every V2 datatype there and back bit for bit; for other ways in see the contract."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.stack import Stack
from tests.support.ways_in import WayIn, grpc, http_binary

pytestmark = pytest.mark.integration

VALUES: dict[str, npt.NDArray[Any]] = {
    "BOOL": np.array([[True, False, True]]),
    "UINT8": np.array([[0, 1, 255]], np.uint8),
    "UINT16": np.array([[0, 1, 65535]], np.uint16),
    "UINT32": np.array([[0, 1, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 1, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 0, 127]], np.int8),
    "INT16": np.array([[-(2**15), 0, 2**15 - 1]], np.int16),
    "INT32": np.array([[-(2**31), 0, 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 0, 2**63 - 1]], np.int64),
    "FP16": np.array([[0.1, -2.5, 65504.0]], np.float16),
    "BF16": np.array([[0.1, -2.5, 3e38]], ml_dtypes.bfloat16),
    "FP32": np.array([[0.1, -2.5, 3.4e38]], np.float32),
    "FP64": np.array([[0.1, -2.5, 1.7e308]], np.float64),
    "STRING": np.array([["é", "", "a\0b"]], np.object_),
}


@pytest.mark.parametrize("way", [http_binary, grpc], ids=["http", "grpc"])
@pytest.mark.parametrize("name", VALUES)
def test_a_datatype_comes_back_as_it_went(stack: Stack, way: WayIn, name: str) -> None:
    """The limits of the type, and values that have no exact form in a narrower one."""
    values = VALUES[name]
    answer = way(stack, "echo", {f"IN_{name}": values}, outputs=[f"OUT_{name}"])[f"OUT_{name}"]
    if name == "STRING":
        expected = [text.encode() for text in values.ravel()]
        assert [item.encode() if isinstance(item, str) else item for item in answer.ravel()] == expected
    else:
        assert answer.dtype == values.dtype
        np.testing.assert_array_equal(answer.view(np.uint8), values.view(np.uint8))
