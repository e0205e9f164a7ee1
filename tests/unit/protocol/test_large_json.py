"""JSON that is read in pieces: the same requests and the same errors as where it is parsed whole."""

from __future__ import annotations

import gc
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.fuzz_codecs import SPEC, Seed, mutate, seeds
from benchmarks.large_json import HOSTILE, LARGE_CONSTANT_BYTES, MAX_FACTOR
from serve_app.errors import InvalidRequest, RequestCancelled, RequestTooLarge, ServeAppError, TensorNameMismatch
from serve_app.protocol import json_scan, large_json
from serve_app.protocol.binary import decode_infer_request
from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.flat_json import decode_generate_request
from serve_app.protocol.messages import InferRequest
from serve_app.settings import LimitSettings
from tests.contract.table import CODEC_CASES

LIMITS = LimitSettings(max_inputs=4, max_rank=5)
KIB = 1024
MIB = 1024 * KIB

Decode = Callable[[Any, "int | None"], InferRequest]


@contextmanager
def in_pieces(window_bytes: int, cut_bytes: int) -> Iterator[None]:
    """Every JSON is large, and read in tiny windows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "_LARGE_ABOVE_BYTES", 0)
        patch.setattr(json_scan, "WINDOW_BYTES", window_bytes)
        patch.setattr(json_scan, "CUT_BYTES", cut_bytes)
        yield


def infer(body: bytes | memoryview, header_length: int | None = None) -> InferRequest:
    return decode_infer_request(
        body, model_name="m", model_version="", header_length=header_length, limits=LIMITS
    ).request


def generate(body: bytes, header_length: int | None = None) -> InferRequest:
    return decode_generate_request(body, SPEC)


def outcome(decode: Decode, body: bytes | memoryview, header_length: int | None) -> Any:
    """What a request says, or what is wrong with it; where it is no JSON, the words differ."""
    try:
        request = decode(body, header_length)
    except InvalidRequest as error:
        is_no_json = error.field == "body" and error.expected.startswith("a JSON object")
        return type(error), "no JSON" if is_no_json else str(error)
    except ServeAppError as error:
        return type(error), str(error)
    inputs = [(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in request.inputs]
    return inputs, request.id, request.outputs, repr(request.parameters)


def check_same(
    decode: Decode, body: bytes, header_length: int | None = None, *, window_bytes: int, cut_bytes: int
) -> Any:
    """Decode both ways and compare."""
    whole = outcome(decode, body, header_length)
    with in_pieces(window_bytes, cut_bytes):
        assert outcome(decode, body, header_length) == whole
    return whole


WINDOWS = st.sampled_from([16, 17, 19, 32, 100])
CUTS = st.sampled_from([0, 5, 64])


@pytest.mark.parametrize("window_bytes", [16, 23, 64 * KIB])
@pytest.mark.parametrize("cut_bytes", [0, 64])
def test_all_cases_have_the_same_outcome(window_bytes: int, cut_bytes: int) -> None:
    """Every body of the table of cases."""
    for case in CODEC_CASES:
        check_same(infer, case.body, case.header_length, window_bytes=window_bytes, cut_bytes=cut_bytes)


FLAT = [
    json.dumps({"INT64": [1, 2, 3], "BYTES": ["a", 'é"\\ 😀', ""], "FP32": 1.5, "id": "x"}).encode(),
    json.dumps({"BYTES": "x" * 40 + "é😀\n" * 9, "p": "q" * 50, "parameters": {"FP64": [1, 2]}}).encode(),
    json.dumps({"BYTES": "é😀" * 20, "z": [1], "FP16": [1.5, 2]}, ensure_ascii=False).encode(),
]


def test_broken_bodies_have_the_same_outcome() -> None:
    """2,000 changes to right bodies, of `infer` and `generate`."""
    rng = random.Random(7)
    right = [seed for seed in seeds() if seed.kind in ("json", "binary")]
    right += [Seed("json", case.body, case.header_length) for case in CODEC_CASES]
    for _ in range(2000):
        decode, seed = (generate, Seed("json", rng.choice(FLAT))) if rng.random() < 0.3 else (infer, rng.choice(right))
        body, header_length = mutate(seed, rng)
        check_same(decode, body, header_length, window_bytes=rng.choice((16, 19, 100)), cut_bytes=rng.choice((0, 64)))


TEXTS = st.text(st.sampled_from('ab",:[]{}\\/é\n€😀\x00data'), max_size=30)
SCALARS = st.one_of(
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64 - 1, -(2**63), 10**25, 1.5, 1e39, 1e300, True, False, None]),
    st.integers(-300, 300),
    TEXTS,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "", "data"]), inner, max_size=2),
    max_leaves=8,
)
RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "BOOL": st.booleans(),
    "BYTES": TEXTS,
    "FP32": st.integers(-9, 9) | st.floats(-9, 9, width=16),
    "FP64": st.floats(allow_nan=False, allow_infinity=False),
}


@st.composite
def arrays(draw: st.DrawFn, datatype: str, shape: list[int]) -> Any:
    """Data that fits, flat or nested, and often is changed in one place."""
    element = RIGHT.get(datatype, st.integers(0, 100))

    def nested(axis: int) -> Any:
        if axis == len(shape):
            return draw(element)
        return [nested(axis + 1) for _ in range(shape[axis])]

    data = nested(0)
    if draw(st.booleans()):
        for _ in shape[1:]:
            data = [value for part in data for value in part]
    for _ in range(draw(st.integers(0, 2))):
        place = data
        while type(place) is list and place and type(place[0]) is list and draw(st.integers(0, 3)):
            place = place[draw(st.integers(0, len(place) - 1))]
        if type(place) is list:
            index = draw(st.integers(0, len(place)))
            place[index : index + draw(st.integers(0, 1))] = draw(st.lists(VALUES, max_size=1))
    return data


@st.composite
def entries(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """The members of a tensor, in any order, one of them perhaps twice or missing."""
    datatype = draw(st.sampled_from(["BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP32", "FP64", "BYTES", "FP16"]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    members: list[tuple[str, Any]] = [
        ("name", draw(st.sampled_from(["x", "data", "n" * 70, "", 1]))),
        ("datatype", datatype),
        ("shape", draw(st.sampled_from([shape, shape, shape, [*shape, 1], [2**40], "x", [1] * 40]))),
        ("data", draw(arrays(datatype, shape) | VALUES if draw(st.booleans()) else arrays(datatype, shape))),
    ]
    if draw(st.booleans()):
        key = draw(st.sampled_from(["data", "parameters", "junk", "shape", "name"]))
        members.insert(draw(st.integers(0, 4)), (key, draw(VALUES)))
    if not draw(st.integers(0, 9)):
        del members[draw(st.integers(0, len(members) - 1))]
    return draw(st.permutations(members)) if draw(st.booleans()) else members


SPACES = st.sampled_from(["", "", "", " ", "\n\t", " " * 40])


def written(draw: Callable[..., Any], value: Any) -> str:
    """JSON, with space anywhere and letters of any key or string escaped; a list of pairs is an object."""
    space = draw(SPACES)
    if type(value) is list and value and type(value[0]) is tuple:
        pairs = [f"{_string(draw, key)}{space}:{written(draw, member)}" for key, member in value]
        return f"{space}{{{','.join(pairs)}}}{space}"
    if type(value) is list:
        return f"{space}[{','.join(written(draw, part) for part in value)}{space}]{space}"
    if type(value) is str:
        return _string(draw, value)
    return f"{space}{json.dumps(value)}{space}"


def _string(draw: Callable[..., Any], text: str) -> str:
    is_ascii, is_escaped = draw(st.booleans()), not draw(st.integers(0, 5))
    if is_escaped and text.isascii():
        return '"' + "".join(f"\\u{ord(char):04X}" for char in text) + '"'
    return json.dumps(text, ensure_ascii=is_ascii)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Bodies that are JSON, but for some that are cut off or followed by more."""
    inputs: Any = draw(st.lists(entries(), min_size=1, max_size=3))
    members: list[tuple[str, Any]] = [("inputs", inputs)]
    if draw(st.booleans()):
        members.insert(
            draw(st.integers(0, 1)),
            (draw(st.sampled_from(["inputs", "outputs", "id", "parameters", "other"])), draw(VALUES)),
        )
    text = written(draw, members).encode()
    if not draw(st.integers(0, 9)):
        at = draw(st.integers(0, len(text)))
        broken = draw(st.sampled_from([b"", b",", b"]", b'"', b"NaN", b"\xff", b"\\", b"[" * 1100, b":", b"1"]))
        text = text[:at] + broken + text[at + draw(st.integers(0, 1)) * len(text) :]
    return text


@settings(max_examples=250, deadline=None)
@given(bodies(), WINDOWS, CUTS)
@example(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[1,2],"d\\u0061ta":[3,4]}]}', 16, 0)
@example(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[1,2,]}]}', 16, 0)
@example(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[,1,2]}]}', 16, 0)
@example(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[[,1],[2]]}]}', 16, 0)
@example(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[1,{,"a":1}]}]}', 16, 0)
@example(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[1,2}]}', 16, 0)
@example(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[1,2]]}', 16, 0)
@example(b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[],"data":"\\ud83d\\ude00\\ud83d\\ude00\\ud83d"}]}', 16, 0)
@example(b'{"inputs":[' + b"[" * 1023 + b"]" * 1023 + b"]}", 64, 0)
@example(b'{"inputs":[{"data":' + b"[" * 1021 + b"]" * 1021 + b"}]}", 64, 0)
@example(b'{"inputs":[{"data":' + b"[" * 1022 + b"]" * 1022 + b"}]}", 64, 0)
@example(b" [1,2,3]" + b" " * 100, 16, 0)
@example(b"]" * 40, 16, 0)
def test_any_body_has_the_same_outcome(body: bytes, window_bytes: int, cut_bytes: int) -> None:
    """Tensors, errors and the places that these name, for data that is right, ragged, too long or of wrong types."""
    check_same(infer, body, window_bytes=window_bytes, cut_bytes=cut_bytes)


@settings(max_examples=150, deadline=None)
@given(st.data(), WINDOWS, CUTS)
def test_any_flat_body_has_the_same_outcome(data: st.DataObject, window_bytes: int, cut_bytes: int) -> None:
    """The same for `generate`: values and flat arrays by name."""
    names = st.sampled_from([*DATATYPES, "id", "parameters", "own"])
    members = []
    for name in data.draw(st.lists(names, min_size=1, max_size=4)):
        right = st.lists(RIGHT.get(name, st.integers(0, 100)), max_size=12)
        members.append((name, data.draw(right | VALUES)))
    body = written(data.draw, members).encode()
    check_same(generate, body, window_bytes=window_bytes, cut_bytes=cut_bytes)


def body_of(datatype: str, shape: list[int], data: bytes, *, name: str = "x") -> bytes:
    head = orjson.dumps({"name": name, "datatype": datatype, "shape": shape})
    return b'{"inputs":[' + head[:-1] + b',"data":' + data + b"}]}"


@pytest.mark.parametrize("is_nested", [False, True])
def test_large_arrays_arrive_bit_by_bit(is_nested: bool) -> None:
    """In pieces of the real size."""
    values = np.random.default_rng(0).standard_normal((50_000, 2)).astype(np.float32)
    data = orjson.dumps(values if is_nested else values.reshape(-1), option=orjson.OPT_SERIALIZE_NUMPY)
    body = body_of("FP32", [50_000, 2], data)
    assert large_json.is_large(len(body))
    [tensor] = infer(body).inputs
    assert bytes(tensor.data) == values.tobytes()


def test_large_strings_arrive_bit_by_bit() -> None:
    """One that is longer than many pieces, with escapes all over, between short ones."""
    texts = ["", 'é😀"\\\n' * 50_000, "b"]
    body = body_of("BYTES", [3], json.dumps(texts).encode())
    [tensor] = infer(body).inputs
    assert [element.decode() for element in tensor.to_numpy().tolist()] == texts
    [tensor] = generate(json.dumps({"BYTES": texts[1], "own": 1}).encode()).inputs
    assert tensor.to_numpy().tolist() == [[texts[1].encode()]]


def peak_bytes(decode: Callable[[], object]) -> int:
    """Bytes that are allocated at most until it is refused."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(ServeAppError):
            decode()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["arrays", "numbers, INT64", "empty strings", "three tensors", "members", "shape"])
def test_a_refusal_costs_at_most_twice_the_body(kind: str) -> None:
    """Beside a constant; parsed whole, the worst of these takes 36 times its size."""
    body = HOSTILE[kind](2 * MIB)
    assert peak_bytes(lambda: infer(body)) < MAX_FACTOR * len(body) + LARGE_CONSTANT_BYTES


def test_a_tensor_that_is_larger_than_its_text_is_made_only_for_a_model_that_takes_it() -> None:
    """Four times its text, it is compared with the model first."""
    count = 2 * MIB
    body = body_of("INT64", [1, count], b"[" + b"1," * (count - 1) + b"1]", name="nothing")

    def decode() -> object:
        return decode_infer_request(
            body, model_name="m", model_version="", header_length=None, limits=LIMITS, spec=SPEC
        )

    assert peak_bytes(decode) < LARGE_CONSTANT_BYTES < len(body) * 4
    with pytest.raises(TensorNameMismatch, match="an input that model 'fuzzed' does not have"):
        decode()


@pytest.mark.parametrize("last", [b"1", b"null", b"NaN"])
def test_nothing_is_kept_of_a_body(last: bytes) -> None:
    """Not even until Python looks for cycles: its buffer is free at once, after a refusal too."""
    body = bytearray(body_of("INT64", [200_001], b"[" + b"1," * 200_000 + last + b"]"))
    gc.disable()
    try:
        with memoryview(body) as view:
            outcome(infer, view, None)
        body.append(0)  # a BufferError if anything still looks at it
    finally:
        gc.enable()


def test_what_is_beside_the_data_has_a_limit_of_its_own() -> None:
    """The error names size and limit; it is found before all has been read."""
    body = b'{"parameters":{"own":"' + b"x" * MIB + b'"},"inputs":[]}'
    with pytest.raises(RequestTooLarge, match=r"^JSON beside the data .* the limit is 262144 bytes$"):
        infer(body)
    with pytest.raises(RequestTooLarge, match=r"^JSON beside the data .* the limit is 262144 bytes$"):
        generate(body)


def test_the_caller_can_end_the_work() -> None:
    """What it raises between two pieces comes out."""
    calls = 0

    def on_piece() -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RequestCancelled("decoding")

    body = body_of("INT64", [200_001], b"[" + b"1," * 200_000 + b"1]")
    with pytest.raises(RequestCancelled):
        decode_infer_request(
            body, model_name="m", model_version="", header_length=None, limits=LIMITS, on_piece=on_piece
        )
    assert calls == 5
