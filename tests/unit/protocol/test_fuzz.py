"""Broken requests: a bounded run of `benchmarks.fuzz_codecs`, and what refusing large ones costs."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import orjson
import pytest

from benchmarks.fuzz_codecs import CONSTANT_BYTES, MAX_FACTOR, fuzz, refusal_cost
from serve_app.errors import RequestTooLarge, TensorShapeMismatch
from serve_app.ingress.body import pack, unpack
from serve_app.protocol.tensor import bytes_offsets, check_bytes
from serve_app.settings import LimitSettings

MIB = 1024 * 1024
MANY = 64 * 1024
LIMITS = LimitSettings(max_request_bytes=64 * MIB, max_json_bytes=64 * MIB)


def test_whatever_comes_in_only_our_errors_go_out() -> None:
    """For 2,000 broken requests of every form; nothing of them is kept, and no refusal costs more than twice them."""
    report = fuzz(2000, seed=7)
    assert report.foreign == []
    assert report.outcomes.total() == 2000
    assert report.outcomes["accepted"] < 1000  # most of them are broken indeed
    assert max(report.factors.values()) <= MAX_FACTOR
    assert report.kept_bytes < 256 * 1024


def _binary(data: bytes, name: str, datatype: str, shape: list[int]) -> tuple[bytes, int]:
    parameters = {"binary_data_size": len(data)}
    text = orjson.dumps({"inputs": [{"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}]})
    return text + data, len(text)


@pytest.mark.parametrize(
    ("data", "name", "datatype", "shape"),
    [
        (bytes(4 * MANY), "nothing", "FP32", [1, MANY]),
        (bytes(4 * MANY), "FP32", "FP32", [1, MANY + 1]),
        (bytes(4 * MANY - 4) + b"\1\0\0\0", "BYTES", "BYTES", [1, MANY]),
        (b"\1\0\0\0a" * MANY, "BYTES", "BYTES", [1, MANY - 1]),
        (b"\xff\xff\xff\xff" * MANY, "BYTES", "BYTES", [1, MANY]),
    ],
    ids=["name", "size", "last element", "number of elements", "lengths"],
)
def test_a_large_binary_tensor_is_refused_for_nothing(data: bytes, name: str, datatype: str, shape: list[int]) -> None:
    """What it costs does not grow with the tensor."""
    body, header_length = _binary(data, name, datatype, shape)
    assert refusal_cost(body, header_length, limits=LIMITS) < CONSTANT_BYTES


def test_a_body_above_the_limit_is_refused_for_nothing() -> None:
    """It is not parsed."""
    body = b'{"inputs":[' + b"1," * MIB + b"1]}"
    assert refusal_cost(body, limits=LimitSettings(max_request_bytes=MIB)) < CONSTANT_BYTES
    assert refusal_cost(body, limits=LimitSettings(max_json_bytes=MIB)) < CONSTANT_BYTES


@pytest.mark.parametrize("part", ["1", "1.5", "[]", "{}", "[1]", '"ab"'])
def test_refused_json_costs_a_bounded_multiple(part: str) -> None:
    """Parsing small JSON makes Python objects of every value before any is judged; large JSON is read in pieces."""
    body = f'{{"inputs":[{{"name":"FP32","datatype":"FP32","shape":[1,5],"data":[{part}{f",{part}" * 50_000}]}}]}}'
    assert refusal_cost(body.encode(), limits=LIMITS) < 40 * len(body)


def test_a_packed_bomb_is_refused_within_twice_the_limit() -> None:
    """64 MB of zeros in 64 KB: unpacking stops behind the limit."""
    bomb = pack(bytes(64 * MIB), encoding="gzip")
    tracemalloc.start()
    try:
        with pytest.raises(RequestTooLarge):
            unpack(bomb, encoding="gzip", max_bytes=MIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * (MIB + len(bomb)) + CONSTANT_BYTES


@pytest.mark.parametrize(
    ("data", "num_elements"),
    [
        (b"", 0),
        (b"\1\0\0\0a", 1),
        (b"\0\0\0\0" * 3, 3),
        (b"\0\0\0\0" * 3, 2),
        (b"\0\0\0\0" * 3, 4),
        (b"\2\0\0\0a", 1),
        (b"\1\0\0\0ab", 1),
        (b"\xff\xff\xff\xff" * 2, 2),
        (struct.pack("<I", 3) + b"\0\0\0" + b"\0\0\0\0\0", 2),
        (b"\0\0\0", 0),
    ],
)
def test_checking_bytes_agrees_with_reading_them(data: bytes, num_elements: int) -> None:
    """The check that keeps nothing refuses what the one that returns offsets refuses, in the same words."""

    def verdict(check: Any) -> str:
        try:
            check(data, name="x", num_elements=num_elements)
        except TensorShapeMismatch as error:
            return str(error)
        return "fine"

    assert verdict(check_bytes) == verdict(bytes_offsets)
