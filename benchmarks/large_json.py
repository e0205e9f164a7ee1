"""What large JSON costs, wrong and right: `python -m benchmarks.large_json --mib 16`.

Peaks are those of the process's memory (the kernel counts them), so what orjson and numpy allocate is in them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson

from serve_app.errors import ServeAppError
from serve_app.protocol.binary import decode_infer_request
from serve_app.settings import LimitSettings

MIB = 1024 * 1024
# What a window costs while it is read and a piece while it is judged: 64 KiB as up to 48 times their size in objects,
# and the offsets of as many brackets.
LARGE_CONSTANT_BYTES = 8 * MIB
MAX_FACTOR = 2.0


def _tensor(datatype: str, shape: list[int], data: bytes) -> bytes:
    head = orjson.dumps({"name": "x", "datatype": datatype, "shape": shape})
    return head[:-1] + b',"data":' + data + b"}"


def _inputs(*tensors: bytes) -> bytes:
    return b'{"inputs":[' + b",".join(tensors) + b"]}"


def _repeated(part: bytes, size: int, *, datatype: str = "FP32", last: bytes = b"null") -> bytes:
    """One tensor of the same part over and over, with another one at the end."""
    count = size // (len(part) + 1)
    return _inputs(_tensor(datatype, [count + 1], b"[" + (part + b",") * count + last + b"]"))


def _dense(size: int) -> bytes:
    """Three tensors that are four times their text, the last of them wrong at its end."""
    count = size // 6
    right = _tensor("INT64", [count], b"[" + b"1," * (count - 1) + b"1]")
    return _inputs(right, right, _tensor("INT64", [count], b"[" + b"1," * (count - 1) + b"null]"))


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "arrays": lambda size: _repeated(b"[]", size),
    "objects": lambda size: _repeated(b"{}", size),
    "numbers": lambda size: _repeated(b"1", size),
    "numbers, INT64": lambda size: _repeated(b"1", size, datatype="INT64"),
    "numbers, FP64": lambda size: _repeated(b"1.5", size, datatype="FP64"),
    "empty strings": lambda size: _repeated(b'""', size, datatype="BYTES"),
    "rows": lambda size: _inputs(
        _tensor("FP32", [size // 6 + 1, 2], b"[" + b"[1,1]," * (size // 6) + b"[1]]"),
    ),
    "three tensors": _dense,
    "too many": lambda size: _inputs(_tensor("INT64", [5], b"[" + b"1," * (size // 2) + b"1]")),
    "too few": lambda size: _inputs(_tensor("INT64", [2**40], b"[" + b"1," * (size // 2) + b"1]")),
    "NaN": lambda size: _repeated(b"1", size, datatype="INT64", last=b"NaN"),
    "cut off": lambda size: _repeated(b"1", size, datatype="INT64")[:-5],
    "levels": lambda size: _inputs(_tensor("FP32", [1], b"[" * size)),
    "levels, again and again": lambda size: _repeated(b"[" * 500 + b"]" * 500, size),
    "inputs": lambda size: b'{"inputs":[' + b"[]," * (size // 3) + b"1]}",
    "members": lambda size: b'{"inputs":[' + b'{"a":1},' * (size // 8) + b"1]}",
    "parameter": lambda size: b'{"parameters":{"a":[' + b"[]," * (size // 3) + b'1]},"inputs":[]}',
    "unknown member": lambda size: b'{"inputs":[{"a":[' + b"[]," * (size // 3) + b"1]}]}",
    "shape": lambda size: b'{"inputs":[{"name":"x","datatype":"FP32","shape":[' + b"1," * (size // 2) + b"1]}]}",
    "name": lambda size: b'{"inputs":[{"name":"' + b"x" * size + b'"}]}',
    "top": lambda size: b"[" + b"[]," * (size // 3) + b"1]",
    "commas": lambda size: _inputs(_tensor("FP32", [1], b"[" + b"," * size + b"1]")),
    "quotes": lambda size: _inputs(_tensor("BYTES", [1], b"[" + b'"' * size + b"]")),
    "digits": lambda size: _inputs(_tensor("FP32", [1], b"[" + b"1" * size + b"]")),
    "spaces": lambda size: _inputs(_tensor("FP32", [1], b"[" + b" " * size + b"x]")),
    "no UTF-8": lambda size: _inputs(_tensor("BYTES", [1], b'["' + "é".encode() * (size // 2) + b'\xff"]')),
}


def _floats(size: int, *, columns: int) -> bytes:
    values = np.random.default_rng(0).random((max(1, size // 11 // columns), columns), dtype=np.float32)
    data = values if columns > 1 else values.reshape(-1)
    text = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)
    return _inputs(_tensor("FP32", [*data.shape], text))


RIGHT: dict[str, Callable[[int], bytes]] = {
    "FP32": lambda size: _floats(size, columns=1),
    "FP32, rows of 4": lambda size: _floats(size, columns=4),
    "INT64": lambda size: _repeated(b"1", size, datatype="INT64", last=b"1"),
    "strings": lambda size: _repeated(b'"a few words"', size, datatype="BYTES", last=b'""'),
    "one string": lambda size: _inputs(_tensor("BYTES", [1], b'["' + b"a" * size + b'"]')),
}


def _memory(key: str) -> int:
    """`VmRSS` or `VmHWM` of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def decode(body: bytes) -> str:
    """Decode a body; the class of the error, or `accepted`."""
    try:
        decode_infer_request(body, model_name="m", model_version="", header_length=None, limits=LimitSettings())
    except ServeAppError as error:
        return type(error).__name__
    return "accepted"


def measure(body: bytes) -> tuple[str, int, float]:
    """What came of a body, the bytes by which the process grew at most, and the seconds of CPU it took."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # starts VmHWM anew
    before, started = _memory("VmRSS"), time.process_time()
    verdict = decode(body)
    return verdict, _memory("VmHWM") - before, time.process_time() - started


def main() -> None:
    """Measure all, print, and fail where a refusal has cost more than is promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=16, help="size of the bodies")
    size = int(parser.parse_args().mib * MIB)
    decode(_floats(2 * MIB, columns=4))  # what is loaded once is not counted
    failed = []
    for group, is_hostile in ((HOSTILE, True), (RIGHT, False)):
        for name, make in group.items():
            body = make(size)
            verdict, grown, seconds = measure(body)
            factor = grown / len(body)
            print(f"{name:26}{len(body) / MIB:8.2f} MiB  peak {factor:6.2f}x  {seconds * 1e3:8.0f} ms  {verdict}")
            if is_hostile and (verdict == "accepted" or grown > MAX_FACTOR * len(body) + LARGE_CONSTANT_BYTES):
                failed.append(name)
    if failed:
        raise SystemExit(f"beyond {MAX_FACTOR} times their size: {', '.join(failed)}")


if __name__ == "__main__":
    main()
