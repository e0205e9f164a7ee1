"""Bodies of V2 inference requests to the models of `echo_models`, right and wrong ones.

One table for the unit tests, which compare with answers recorded from a real Triton, and for the integration tests,
which ask one.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One HTTP inference request.

    Attributes:
        name: Its key in the recorded answers.
        model: Which echo model.
        body: JSON and binary data.
        header_length: What goes into `Inference-Header-Content-Length`, if anything.
        difference: Why we answer otherwise than Triton; empty where we do not.
    """

    name: str
    model: str
    body: bytes
    header_length: int | None = None
    difference: str = ""


def tensor(
    datatype: str, shape: Any, data: Any = None, *, name: str | None = None, **parameters: Any
) -> dict[str, Any]:
    """An entry of `inputs`, named as the echo models name it."""
    entry: dict[str, Any] = {"name": name or datatype.replace("BYTES", "STRING"), "datatype": datatype, "shape": shape}
    if data is not None:
        entry["data"] = data
    if parameters:
        entry["parameters"] = parameters
    return entry


CASES: list[Case] = []


def _add(
    name: str,
    model: str,
    inputs: Any,
    *,
    tail: bytes = b"",
    length: int | None = None,
    difference: str = "",
    **members: Any,
) -> None:
    text = inputs if isinstance(inputs, bytes) else json.dumps({"inputs": inputs, **members}).encode()
    if length is None and tail:
        length = len(text)
    assert name not in {case.name for case in CASES}
    CASES.append(Case(name, model, text + tail, length, difference))


def _one(name: str, datatype: str, shape: Any, data: Any, *, model: str = "echo1", **rest: Any) -> None:
    _add(name, model, [tensor(datatype, shape, data)], **rest)


_WRAPS = "Triton stores the low bits without a word"
_FLATTENS = "Triton ignores how data is nested"
_WORDS = "words that are not JSON are refused on the way in"

# --- values, by datatype
_one("fp32", "FP32", [8], [1, 2.5, 0.1, 1e-45, 3.4028235e38, 16777217, -0.0, 1e-7])
_one("fp32 too large", "FP32", [1], [1e39], difference="Triton turns it into Infinity")
_one("fp64", "FP64", [5], [0.1, 1e300, 5e-324, 1, 2**70])
_one("int for float", "FP32", [2], [3, 2**63])
_one("bool for float", "FP32", [1], [True])
_one("string for float", "FP32", [1], ["1"])
_one("null for float", "FP32", [1], [None])
_one("float for int", "INT32", [1], [3.5])
_one("whole float for int", "INT32", [1], [3.0])
_one("bool for int", "INT32", [1], [True])
_one("bool", "BOOL", [2], [True, False])
_one("int for bool", "BOOL", [2], [1, 0])
for _bits in (8, 16, 32, 64):
    _one(f"int{_bits}", f"INT{_bits}", [3], [-(2 ** (_bits - 1)), 0, 2 ** (_bits - 1) - 1])
    _one(f"uint{_bits}", f"UINT{_bits}", [2], [0, 2**_bits - 1])
    _one(f"negative uint{_bits}", f"UINT{_bits}", [1], [-1])
    _one(f"too large uint{_bits}", f"UINT{_bits}", [1], [2**_bits], difference=_WRAPS if _bits < 64 else "")
    _one(f"too large int{_bits}", f"INT{_bits}", [1], [2 ** (_bits - 1)], difference=_WRAPS if _bits < 64 else "")
_one("bytes", "BYTES", [5], ["a", "", "\u00e9\0x", "\U0001f600", 'q"\\'])
_one("number for bytes", "BYTES", [1], [1])
_one("null for bytes", "BYTES", [1], [None])
_one("fp16 as json", "FP16", [1], [1.0])
_one("bf16 as json", "BF16", [1], [1.0])
_add("nan word", "echo1", b'{"inputs":[{"name":"FP32","datatype":"FP32","shape":[1],"data":[NaN]}]}', difference=_WORDS)
_add(
    "infinity word",
    "echo1",
    b'{"inputs":[{"name":"FP32","datatype":"FP32","shape":[1],"data":[-Infinity]}]}',
    difference=_WORDS,
)
_add("lone surrogate", "echo1", b'{"inputs":[{"name":"STRING","datatype":"BYTES","shape":[1],"data":["\\ud800"]}]}')

# --- shapes
_one("nested", "FP32", [2, 2], [[1, 2], [3, 4]], model="echo2")
_one("flat", "FP32", [2, 2], [1, 2, 3, 4], model="echo2")
_one("ragged", "FP32", [2, 2], [[1, 2, 3], [4]], model="echo2", difference=_FLATTENS)
_one("nested otherwise", "FP32", [2, 3], [[1, 2], [3, 4], [5, 6]], model="echo2", difference=_FLATTENS)
_one("nested too deep", "FP32", [2], [[1, 2]], difference=_FLATTENS)
_one("no rows", "FP32", [0, 3], [], model="echo2")
_one("empty rows", "FP32", [3, 0], [[], [], []], model="echo2")
_one("empty rows flat", "FP32", [3, 0], [], model="echo2")
_one("empty bytes", "BYTES", [0], [])
_one("too few", "FP32", [3], [1, 2])
_one("too many", "FP32", [3], [1, 2, 3, 4])
_one("bare value", "FP32", [1], 3)
_one("rank 0", "FP32", [], [3])
_one("rank 2", "FP32", [1, 1], [1])
_one("negative dimension", "FP32", [-1], [1])
_one("float dimension", "FP32", [1.0], [1])
_one("string dimension", "FP32", ["1"], [1])
_one("other dimensions", "FP32", [3, 2], [1, 2, 3, 4, 5, 6], model="fixed")
_one("fixed", "FP32", [2, 3], [1, 2, 3, 4, 5, 6], model="fixed")
_one("rows", "FP32", [4, 1], [1, 2, 3, 4], model="rows")
_one("zero rows", "FP32", [0, 2], [], model="rows")
_one("rows of nothing", "FP32", [2, 0], [], model="rows")
_one("rank without rows", "FP32", [2], [1, 2], model="rows")
_add("unequal rows", "rows", [tensor("FP32", [4, 1], [1, 2, 3, 4]), tensor("INT32", [2, 1], [1, 2])])
_one("too many rows", "FP32", [5, 1], [1, 2, 3, 4, 5], model="rows", difference="we split what Triton refuses")

# --- names and members
_add("no inputs", "echo1", b"{}")
_add("inputs empty", "echo1", [])
_add("inputs empty with rows", "rows", [])
_add("inputs is an object", "echo1", {})
_add("missing input", "fixed", [])
_add("body is an array", "echo1", b"[]")
_add("body is cut", "echo1", b"{")
_add("body with more behind", "echo1", b'{"inputs":[]}x')
_add("input without shape", "echo1", [{"name": "FP32", "datatype": "FP32", "data": [1]}])
_add("input without data", "echo1", [{"name": "FP32", "datatype": "FP32", "shape": [1]}])
_add("input without name", "echo1", [{"datatype": "FP32", "shape": [1], "data": [1]}])
_add("unknown datatype", "echo1", [tensor("FP31", [1], [1], name="FP32")])
_add("lower-case datatype", "echo1", [tensor("fp32", [1], [1], name="FP32")])
_add("other datatype", "echo1", [tensor("INT32", [1], [1], name="FP32")])
_add("input twice", "echo1", [tensor("FP32", [1], [1])] * 2)
_add("unknown input", "echo1", [tensor("FP32", [1], [1], name="X")])
_add("several inputs", "echo1", [tensor("FP32", [1], [1]), tensor("BYTES", [2], ["x", "y"]), tensor("INT8", [1], [-3])])
_one("unknown output", "FP32", [1], [1], outputs=[{"name": "X"}])
_one("output twice", "FP32", [1], [1], outputs=[{"name": "FP32"}] * 2, difference="Triton drops the second one")
_one("outputs empty", "FP32", [1], [1], outputs=[])
_one("id", "FP32", [1], [1], id="abc \u00e9")
_one("empty id", "FP32", [1], [1], id="")
_one("number as id", "FP32", [1], [1], id=5)
_one("unknown member", "FP32", [1], [1], foo={"a": [1]})

# --- parameters
_one("parameters", "FP32", [1], [1], parameters={"i": 1, "b": True, "s": "x", "d": 1.5, "n": -(2**63)})
_one("known parameters", "FP32", [1], [1], parameters={"priority": 1, "timeout": 10**7, "sequence_id": 5})
_one("reserved parameter", "FP32", [1], [1], parameters={"triton_x": 1})
_one("array as parameter", "FP32", [1], [1], parameters={"x": [1]})
_one("null as parameter", "FP32", [1], [1], parameters={"x": None})
_one("string as priority", "FP32", [1], [1], parameters={"priority": "x"})
_one("parameters is an array", "FP32", [1], [1], parameters=[])
_add(
    "shared memory",
    "echo1",
    [tensor("FP32", [1], shared_memory_region="r", shared_memory_byte_size=4)],
)

# --- binary data
_ONE = struct.pack("<f", 1)
_BIN4 = [tensor("FP32", [1], binary_data_size=4)]


def _binary(datatype: str, shape: list[int], data: bytes) -> None:
    inputs = [tensor(datatype, shape, binary_data_size=len(data))]
    outputs = [{"name": inputs[0]["name"], "parameters": {"binary_data": True}}]
    _add(f"binary {datatype.lower()}", "echo1", inputs, tail=data, outputs=outputs)


_binary("BOOL", [2], b"\0\1")
_binary("FP16", [2], b"\x01\x7e\0\x3c")
_binary("BF16", [2], b"\x81\x7f\0\x80")
_binary("FP32", [2], struct.pack("<II", 0x7FC00001, 0xFF800000))
_binary("FP64", [1], struct.pack("<Q", 0x7FF8000000000123))
_binary("UINT64", [1], b"\xff" * 8)
_binary("BYTES", [3], b"\x02\0\0\0\xff\xfe\0\0\0\0\x03\0\0\0a\0b")
_add("binary in, json out", "echo1", _BIN4, tail=_ONE)
_add("binary by default", "echo1", _BIN4, tail=_ONE, parameters={"binary_data_output": True})
_one("json in, binary out", "FP32", [1], [1], parameters={"binary_data_output": True})
_one(
    "default binary, listed json", "FP32", [1], [1], parameters={"binary_data_output": True}, outputs=[{"name": "FP32"}]
)
_add(
    "mixed",
    "echo1",
    [
        tensor("FP32", [1], binary_data_size=4),
        tensor("INT8", [2], [1, -1]),
        tensor("BYTES", [1], binary_data_size=5),
        tensor("INT16", [2], [5, 6]),
    ],
    tail=_ONE + b"\1\0\0\0z",
    outputs=[
        {"name": "STRING", "parameters": {"binary_data": False}},
        {"name": "INT16", "parameters": {"binary_data": True}},
        {"name": "FP32", "parameters": {"binary_data": True}},
        {"name": "INT8"},
    ],
)
_add(
    "nan out",
    "echo1",
    [tensor("FP32", [4], binary_data_size=16)],
    tail=struct.pack("<4I", 0x7FC00000, 0x7F800000, 0xFF800000, 0x3F800000),
)
_add("bool byte 7", "echo1", [tensor("BOOL", [1], binary_data_size=1)], tail=b"\7")
_add("fp16 out as json", "echo1", [tensor("FP16", [1], binary_data_size=2)], tail=b"\0\0")
_add(
    "not utf-8 as json",
    "echo1",
    [tensor("BYTES", [1], binary_data_size=6)],
    tail=b"\2\0\0\0\xff\xfe",
    difference="Triton writes bytes that make the whole answer no JSON",
)
_add("size negative", "echo1", [tensor("FP32", [1], binary_data_size=-4)], tail=_ONE)
_add("size as string", "echo1", [tensor("FP32", [1], binary_data_size="4")], tail=_ONE)
_add("size as float", "echo1", [tensor("FP32", [1], binary_data_size=4.0)], tail=_ONE)
_add("size beyond the body", "echo1", [tensor("FP32", [1], binary_data_size=8)], tail=_ONE)
_add("size beside the shape", "echo1", [tensor("FP32", [1], binary_data_size=8)], tail=_ONE * 2)
_add("bytes left over", "echo1", _BIN4, tail=_ONE * 2)
_add("size and data", "echo1", [tensor("FP32", [1], [7], binary_data_size=4)], tail=_ONE)
_add("size without header", "echo1", _BIN4)
_add("header beyond the body", "echo1", [tensor("FP32", [1], [1])], length=9999)
_add(
    "string as binary_data",
    "echo1",
    [tensor("FP32", [1], [1])],
    outputs=[{"name": "FP32", "parameters": {"binary_data": "x"}}],
)
_add("bytes element too long", "echo1", [tensor("BYTES", [1], binary_data_size=6)], tail=b"\x09\0\0\0\xff\xfe")
_add("bytes elements too few", "echo1", [tensor("BYTES", [2], binary_data_size=6)], tail=b"\2\0\0\0ab")

# --- raw binary requests
_add("raw rows", "raw_rows", b"", tail=struct.pack("<3f", 1, 2, 3), length=0)
_add("raw rows two", "raw_rows", b"", tail=struct.pack("<6f", 1, 2, 3, 4, 5, 6), length=0)
_add("raw dynamic", "raw_dynamic", b"", tail=struct.pack("<6h", 1, 2, 3, 4, 5, 6), length=0)
_add("raw dynamic odd", "raw_dynamic", b"", tail=struct.pack("<5h", 1, 2, 3, 4, 5), length=0)
_add("raw bytes", "raw_bytes", b"", tail=b"hello", length=0)
_add("raw several inputs", "echo1", b"", tail=_ONE, length=0)
