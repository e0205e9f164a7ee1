"""Values of every datatype, and values that are none of it."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np

from tests.contract.case import Theme, tensor
from tests.contract.differences import BEYOND_FP32, MALFORMED, RAGGED, WORDS, WRAPS

T = Theme()

T.one("fp32", "FP32", [8], [1, 2.5, 0.1, 1e-45, 3.4028235e38, 16777217, -0.0, 1e-7])
T.one("fp32 too large", "FP32", [1], [1e39], difference=BEYOND_FP32)
T.one("fp64", "FP64", [5], [0.1, 1e300, 5e-324, 1, 2**70])
T.one("int for float", "FP32", [2], [3, 2**63])
T.one("bool for float", "FP32", [1], [True], difference=MALFORMED)
T.one("string for float", "FP32", [1], ["1"], difference=MALFORMED)
T.one("null for float", "FP32", [1], [None], difference=MALFORMED)
T.one("float for int", "INT32", [1], [3.5], difference=MALFORMED)
T.one("whole float for int", "INT32", [1], [3.0], difference=MALFORMED)
T.one("bool for int", "INT32", [1], [True], difference=MALFORMED)
T.one("bool", "BOOL", [2], [True, False])
T.one("int for bool", "BOOL", [2], [1, 0], difference=MALFORMED)
for _bits in (8, 16, 32, 64):
    T.one(f"int{_bits}", f"INT{_bits}", [3], [-(2 ** (_bits - 1)), 0, 2 ** (_bits - 1) - 1])
    T.one(f"uint{_bits}", f"UINT{_bits}", [2], [0, 2**_bits - 1])
    T.one(f"negative uint{_bits}", f"UINT{_bits}", [1], [-1], difference=MALFORMED)
    T.one(f"too large uint{_bits}", f"UINT{_bits}", [1], [2**_bits], difference=WRAPS if _bits < 64 else MALFORMED)
    T.one(
        f"too large int{_bits}", f"INT{_bits}", [1], [2 ** (_bits - 1)], difference=WRAPS if _bits < 64 else MALFORMED
    )
T.one("bytes", "BYTES", [5], ["a", "", "\u00e9\0x", "\U0001f600", 'q"\\'])
T.one("number for bytes", "BYTES", [1], [1], difference=MALFORMED)
T.one("null for bytes", "BYTES", [1], [None], difference=MALFORMED)
T.one("fp16 as json", "FP16", [1], [1.0])
T.one("bf16 as json", "BF16", [1], [1.0])
T.add("nan word", "echo1", b'{"inputs":[{"name":"FP32","datatype":"FP32","shape":[1],"data":[NaN]}]}', difference=WORDS)
T.add(
    "infinity word",
    "echo1",
    b'{"inputs":[{"name":"FP32","datatype":"FP32","shape":[1],"data":[-Infinity]}]}',
    difference=WORDS,
)
T.add(
    "lone surrogate",
    "echo1",
    b'{"inputs":[{"name":"STRING","datatype":"BYTES","shape":[1],"data":["\\ud800"]}]}',
    difference=MALFORMED,
)


# --- the limits of each datatype, in one batching model of the server's own tests


def _pattern(name: str, datatype: str, data: bytes, count: int) -> None:
    output = {"name": f"OUT_{name}"}
    inputs = [tensor(datatype, [1, count], name=f"IN_{name}", binary_data_size=len(data))]
    T.add(f"bits of {name.lower()}", "echo", inputs, tail=data, outputs=[output])


_pattern("BOOL", "BOOL", b"\1\0\1", 3)
for _size in (8, 16, 32, 64):
    _low, _high = -(2 ** (_size - 1)), 2 ** (_size - 1) - 1
    _pattern(f"INT{_size}", f"INT{_size}", np.array([_low, 0, _high], f"<i{_size // 8}").tobytes(), 3)
    _pattern(f"UINT{_size}", f"UINT{_size}", np.array([0, 1, 2**_size - 1], f"<u{_size // 8}").tobytes(), 3)
_pattern("FP32", "FP32", np.array([0.1, -2.5, 3.4e38], "<f4").tobytes(), 3)
_pattern("FP64", "FP64", np.array([0.1, -2.5, 1.7e308], "<f8").tobytes(), 3)
_pattern("STRING", "BYTES", b"\2\0\0\0\xc3\xa9\0\0\0\0\3\0\0\0a\0b", 3)
for _name, _dtype in (("FP16", np.float16), ("BF16", ml_dtypes.bfloat16)):
    _data = np.array([0.1, -2.5, 6e4], _dtype).tobytes()
    _entry = {"name": f"OUT_{_name}", "parameters": {"binary_data": True}}
    _tensor = tensor(_name, [1, 3], name=f"IN_{_name}", binary_data_size=len(_data))
    T.add(f"bits of {_name.lower()}", "echo", [_tensor], tail=_data, outputs=[_entry])

# --- bytes elements
_LONG = "x" * 70_000
T.one("long bytes", "BYTES", [2], [_LONG, "y"])
T.one("many bytes", "BYTES", [500], [f"{_number}" for _number in range(500)])
T.one("bytes in rows", "BYTES", [2, 2], ["a", "", "\u4e2d", "b\n\t"], model="echo2")
T.one("list for bytes", "BYTES", [1], [["a"]], difference=RAGGED)
T.one("object for bytes", "BYTES", [1], [{"b64": "YQ=="}], difference=MALFORMED)
T.one("bool for bytes", "BYTES", [1], [True], difference=MALFORMED)
T.one("string for bool", "BOOL", [1], ["true"], difference=MALFORMED)
T.one("null for bool", "BOOL", [1], [None], difference=MALFORMED)
T.one("string for int", "INT64", [1], ["1"], difference=MALFORMED)
T.one("big exponent for int", "INT64", [1], [1e3], difference=MALFORMED)
T.one("many values", "FP32", [2000], [_number / 4 for _number in range(2000)])
_TAIL = struct.pack("<3d", 1.5, -0.0, 2**53 + 1)
T.add("binary fp64, three", "echo1", [tensor("FP64", [3], binary_data_size=24)], tail=_TAIL)
