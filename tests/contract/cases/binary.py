"""Binary tensor data in requests and answers, and raw binary requests."""

from __future__ import annotations

import struct

from tests.contract.case import Theme, tensor
from tests.contract.differences import MALFORMED, NOT_UTF8, OUTPUT_ORDER

T = Theme()

_ONE = struct.pack("<f", 1)
_BIN4 = [tensor("FP32", [1], binary_data_size=4)]


def _binary(datatype: str, shape: list[int], data: bytes) -> None:
    inputs = [tensor(datatype, shape, binary_data_size=len(data))]
    outputs = [{"name": inputs[0]["name"], "parameters": {"binary_data": True}}]
    T.add(f"binary {datatype.lower()}", "echo1", inputs, tail=data, outputs=outputs)


_binary("BOOL", [2], b"\0\1")
_binary("FP16", [2], b"\x01\x7e\0\x3c")
_binary("BF16", [2], b"\x81\x7f\0\x80")
_binary("FP32", [2], struct.pack("<II", 0x7FC00001, 0xFF800000))
_binary("FP64", [1], struct.pack("<Q", 0x7FF8000000000123))
_binary("UINT64", [1], b"\xff" * 8)
_binary("BYTES", [3], b"\x02\0\0\0\xff\xfe\0\0\0\0\x03\0\0\0a\0b")
T.add("binary in, json out", "echo1", _BIN4, tail=_ONE)
T.add("binary by default", "echo1", _BIN4, tail=_ONE, parameters={"binary_data_output": True})
T.one("json in, binary out", "FP32", [1], [1], parameters={"binary_data_output": True})
T.one(
    "default binary, listed json", "FP32", [1], [1], parameters={"binary_data_output": True}, outputs=[{"name": "FP32"}]
)
T.add(
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
    difference=OUTPUT_ORDER,
    ours="ok",
)
T.add(
    "nan out",
    "echo1",
    [tensor("FP32", [4], binary_data_size=16)],
    tail=struct.pack("<4I", 0x7FC00000, 0x7F800000, 0xFF800000, 0x3F800000),
)
T.add("bool byte 7", "echo1", [tensor("BOOL", [1], binary_data_size=1)], tail=b"\7")
T.add("fp16 out as json", "echo1", [tensor("FP16", [1], binary_data_size=2)], tail=b"\0\0")
T.add(
    "not utf-8 as json",
    "echo1",
    [tensor("BYTES", [1], binary_data_size=6)],
    tail=b"\2\0\0\0\xff\xfe",
    difference=NOT_UTF8,
)
T.add("size negative", "echo1", [tensor("FP32", [1], binary_data_size=-4)], tail=_ONE, difference=MALFORMED)
T.add("size as string", "echo1", [tensor("FP32", [1], binary_data_size="4")], tail=_ONE, difference=MALFORMED)
T.add("size as float", "echo1", [tensor("FP32", [1], binary_data_size=4.0)], tail=_ONE, difference=MALFORMED)
T.add("size beyond the body", "echo1", [tensor("FP32", [1], binary_data_size=8)], tail=_ONE)
T.add("size beside the shape", "echo1", [tensor("FP32", [1], binary_data_size=8)], tail=_ONE * 2)
T.add("bytes left over", "echo1", _BIN4, tail=_ONE * 2)
T.add("size and data", "echo1", [tensor("FP32", [1], [7], binary_data_size=4)], tail=_ONE)
T.add("size without header", "echo1", _BIN4)
T.add("header beyond the body", "echo1", [tensor("FP32", [1], [1])], length=9999)
T.add(
    "string as binary_data",
    "echo1",
    [tensor("FP32", [1], [1])],
    outputs=[{"name": "FP32", "parameters": {"binary_data": "x"}}],
    difference=MALFORMED,
)
T.add("bytes element too long", "echo1", [tensor("BYTES", [1], binary_data_size=6)], tail=b"\x09\0\0\0\xff\xfe")
T.add("bytes elements too few", "echo1", [tensor("BYTES", [2], binary_data_size=6)], tail=b"\2\0\0\0ab")

# --- raw binary requests

T.add("raw rows", "raw_rows", b"", tail=struct.pack("<3f", 1, 2, 3), length=0, is_wire=True)
T.add("raw rows two", "raw_rows", b"", tail=struct.pack("<6f", 1, 2, 3, 4, 5, 6), length=0, is_wire=True)
T.add("raw dynamic", "raw_dynamic", b"", tail=struct.pack("<6h", 1, 2, 3, 4, 5, 6), length=0, is_wire=True)
T.add("raw dynamic odd", "raw_dynamic", b"", tail=struct.pack("<5h", 1, 2, 3, 4, 5), length=0, is_wire=True)
T.add("raw bytes", "raw_bytes", b"", tail=b"hello", length=0, is_wire=True)
T.add("raw several inputs", "echo1", b"", tail=_ONE, length=0, is_wire=True)
T.add("raw too short", "raw_rows", b"", tail=struct.pack("<2f", 1, 2), length=0, is_wire=True)
T.add("raw empty", "raw_rows", b"", length=0, is_wire=True)
T.add("raw bytes of nothing", "raw_bytes", b"", length=0, is_wire=True)
T.add("raw json", "raw_rows", b"", tail=b'{"inputs":[]}', length=0, is_wire=True)
T.add("negative header length", "echo1", [tensor("INT8", [1], [1])], length=-1, is_wire=True)
T.add(
    "header length of the whole body",
    "echo1",
    b'{"inputs":[{"name":"INT8","datatype":"INT8","shape":[1],"data":[1]}]}',
    length=69,
)
T.add("header length in the json", "echo1", [tensor("INT8", [1], [1])], length=20, is_wire=True, difference=MALFORMED)
T.add("binary of nothing", "echo1", [tensor("FP32", [0], binary_data_size=0)], length=103)
T.add("bytes of nothing", "echo1", [tensor("BYTES", [0], binary_data_size=0)], length=106)
T.add(
    "binary size beyond 64 bits",
    "echo1",
    [tensor("FP32", [1], binary_data_size=2**64)],
    tail=_ONE,
    difference=MALFORMED,
)
T.add("binary for fixed", "fixed", [tensor("FP32", [2, 3], binary_data_size=24)], tail=_ONE * 6)
T.add("binary rows", "rows", [tensor("FP32", [3, 1], binary_data_size=12)], tail=_ONE * 3)
T.add("binary size of another datatype", "echo1", [tensor("FP64", [1], binary_data_size=4)], tail=_ONE)
