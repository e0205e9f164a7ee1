"""Throws broken requests at the decoders: `python -m benchmarks.fuzz_codecs --inputs 200000 --seed 1`.

Whatever comes in, a decoder answers with a request or with one of our errors, keeps nothing afterwards, and has not
allocated more than twice the input's size when it refuses, beside a constant. `benchmarks.large_json` asks the same of
large JSON, where the constant does not hide it.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import orjson
import psutil
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from serve_app.errors import ServeAppError
from serve_app.ingress.body import pack, unpack
from serve_app.protocol import binary, grpc_codec
from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.messages import InferRequest, ModelSpec, TensorSpec
from serve_app.protocol.tensor import Tensor
from serve_app.protocol.validation import check_request
from serve_app.settings import LimitSettings

MAX_BYTES = 4096
LIMITS = LimitSettings(max_request_bytes=MAX_BYTES, max_json_bytes=MAX_BYTES)
# What an error, its text and the frames on the way cost, whatever the size of the input.
CONSTANT_BYTES = 64 * 1024
MAX_FACTOR = 2.0

_TOKENS = (
    *(b"null true false 0 -1 1.5 1e999 -0 [] {} [[]] [1] NaN Infinity 18446744073709551616".split()),
    *(b'"" "INPUT0" "FP32" "BYTES" "BF16" "\\u0000" "\\ud800" "data" "shape" "parameters" "inputs" "outputs"'.split()),
    *(b'"binary_data_size" "binary_data_output" "classification" "shared_memory_region" "sequence_id"'.split()),
    *(b'{"a":1} ,"shape":[99999999999,99999999999] , : [ ] { } \xff \x00'.split()),
)

Decoder = Callable[[bytes, int | None], InferRequest]


def spec_of() -> ModelSpec:
    """A model with an input of every datatype, all optional."""
    tensors = {name: TensorSpec(name, name, (-1, -1), is_optional=True) for name in DATATYPES}
    return ModelSpec("fuzzed", "1", ("1",), "python", tensors, tensors, 8)


SPEC = spec_of()
RAW_SPEC = ModelSpec("raw", "1", ("1",), "python", {"X": TensorSpec("X", "FP32", (-1, -1))}, {}, 8)


def _decode_http(body: bytes, header_length: int | None) -> InferRequest:
    spec = RAW_SPEC if header_length == 0 else SPEC
    decoded = binary.decode_infer_request(
        body, model_name="fuzzed", model_version="", header_length=header_length, limits=LIMITS, spec=spec
    )
    check_request(decoded.request, spec, LIMITS)
    return decoded.request


def _decode_grpc(body: bytes, header_length: int | None) -> InferRequest:
    try:
        message = service_pb2.ModelInferRequest.FromString(body)
    except DecodeError:  # gRPC answers such messages itself
        return InferRequest("", [])
    request = grpc_codec.decode_infer_request(message)
    check_request(request, SPEC, LIMITS)
    return request


def _decode_packed(body: bytes, header_length: int | None) -> InferRequest:
    return _decode_http(bytes(unpack(body, encoding="gzip", max_bytes=MAX_BYTES)), None)


@dataclass(frozen=True)
class Seed:
    """A request that is right, to be broken.

    Attributes:
        kind: `json`, `binary`, `raw`, `grpc` or `gzip`.
        body: Its bytes.
        header_length: Of the JSON in it.
    """

    kind: str
    body: bytes
    header_length: int | None = None


DECODERS: dict[str, Decoder] = {
    "json": _decode_http,
    "binary": _decode_http,
    "raw": _decode_http,
    "grpc": _decode_grpc,
    "gzip": _decode_packed,
}


def seeds() -> list[Seed]:
    """One of each form for each datatype."""
    found = []
    for name, datatype in DATATYPES.items():
        values = np.ones((2, 3), datatype.numpy_dtype) if name != "BYTES" else np.full((2, 3), b"ab", np.object_)
        tensor = Tensor.from_numpy(name, values)
        head = {"name": name, "datatype": name, "shape": [2, 3]}
        if datatype.has_json:
            data = [["ab"] * 3] * 2 if name == "BYTES" else values.tolist()
            document = {"id": "1", "inputs": [head | {"data": data}], "outputs": [{"name": name}]}
            found.append(Seed("json", orjson.dumps(document)))
            found.append(Seed("gzip", pack(orjson.dumps(document), encoding="gzip")))
        sized = head | {"parameters": {"binary_data_size": tensor.size_bytes}}
        text = orjson.dumps({"inputs": [sized], "parameters": {"binary_data_output": True, "priority": 1}})
        found.append(Seed("binary", text + bytes(tensor.data), len(text)))
        message = grpc_codec.encode_infer_request(InferRequest("fuzzed", [tensor], parameters={"own": "x"}))
        found.append(Seed("grpc", message.SerializeToString()))
    typed = service_pb2.ModelInferRequest(model_name="fuzzed")
    entry = typed.inputs.add(name="INT32", datatype="INT32", shape=[1, 2])
    entry.contents.int_contents.extend([1, 2])
    found.append(Seed("grpc", typed.SerializeToString()))
    found.append(Seed("raw", np.ones((1, 4), np.float32).tobytes(), 0))
    found.append(Seed("json", b'{"inputs":' + b"[" * 200 + b"]" * 200 + b"}"))
    return found


def mutate(seed: Seed, rng: random.Random) -> tuple[bytes, int | None]:
    """One to four changes to a seed's bytes, and now and then another header length."""
    body = bytearray(seed.body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body) + 1)
        choice = rng.randrange(6)
        if choice == 0 and at < len(body):
            body[at] ^= 1 << rng.randrange(8)
        elif choice == 1:
            del body[at : at + rng.randint(1, 12)]
        elif choice == 2:
            body[at:at] = rng.choice(_TOKENS)
        elif choice == 3:
            token = rng.choice(_TOKENS)
            body[at : at + len(token)] = token
        elif choice == 4:
            body[at:at] = body[at : at + rng.randint(1, 40)] * rng.randint(1, 12)
        else:
            body[at:at] = rng.randbytes(rng.randint(1, 8))
    length = seed.header_length
    if rng.random() < 0.2:
        length = rng.choice([None, 0, 1, len(body), len(body) + 1, (length or 0) + rng.randint(-3, 3), 2**62])
    return bytes(body), length


@dataclass
class Report:
    """What a run has seen.

    Attributes:
        outcomes: Inputs by name of the error that they got, or `accepted`.
        foreign: Inputs that made a decoder raise something that is not ours, with the error.
        factors: Largest allocation before a refusal over the input's size, beyond the constant, by kind.
        kept_bytes: Python memory that is there after the second half and was not before it.
        rss_growth_bytes: The process's growth in the second half.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    foreign: list[tuple[str, bytes, str]] = field(default_factory=list)
    factors: dict[str, float] = field(default_factory=dict)
    kept_bytes: int = 0
    rss_growth_bytes: int = 0


@contextmanager
def _traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def fuzz(num_inputs: int, *, seed: int) -> Report:
    """Run `num_inputs` broken requests through the decoders."""
    rng, start, report = random.Random(seed), seeds(), Report()
    process = psutil.Process()
    with _traced():
        kept = rss = 0
        for index in range(num_inputs):
            if index == num_inputs // 2:
                gc.collect()
                kept, rss = tracemalloc.get_traced_memory()[0], process.memory_info().rss
            _one(rng.choice(start), rng, report)
        gc.collect()
        report.kept_bytes = tracemalloc.get_traced_memory()[0] - kept
        report.rss_growth_bytes = process.memory_info().rss - rss
    return report


def _one(seed: Seed, rng: random.Random, report: Report) -> None:
    body, header_length = mutate(seed, rng)
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        DECODERS[seed.kind](body, header_length)
    except ServeAppError as error:
        name = type(error).__name__
        allocated = tracemalloc.get_traced_memory()[1] - before
        factor = max(0, allocated - CONSTANT_BYTES) / max(1, len(body))
        report.factors[seed.kind] = max(report.factors.get(seed.kind, 0.0), factor)
        str(error)
    except Exception as error:  # noqa: BLE001  # what it must not raise
        name = "foreign"
        if len(report.foreign) < 20:
            report.foreign.append((seed.kind, body, repr(error)))
    else:
        name = "accepted"
    report.outcomes[name] += 1


def refusal_cost(body: bytes, header_length: int | None = None, *, limits: LimitSettings) -> int:
    """Bytes that decoding `body` has allocated at most when it is refused.

    Raises:
        AssertionError: It was not refused.
    """
    with _traced():
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        try:
            decoded = binary.decode_infer_request(
                body, model_name="m", model_version="", header_length=header_length, limits=limits, spec=SPEC
            )
            check_request(decoded.request, SPEC, limits)
        except ServeAppError:
            return tracemalloc.get_traced_memory()[1] - before
    raise AssertionError("accepted")


def main() -> None:
    """Fuzz, print, and fail where a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    started = time.perf_counter()
    report = fuzz(chosen.inputs, seed=chosen.seed)
    print(
        f"{chosen.inputs} inputs, seed {chosen.seed}: {time.perf_counter() - started:.0f} s; zlib {zlib.ZLIB_VERSION}"
    )
    for name, count in report.outcomes.most_common():
        print(f"{count:8} {name}")
    print("allocated before a refusal / input size:", {kind: round(f, 2) for kind, f in report.factors.items()})
    print(
        f"kept in the second half: {report.kept_bytes} B of Python's; the process grew by {report.rss_growth_bytes} B"
    )
    for kind, body, error in report.foreign:
        print(f"FOREIGN {kind} {error} {body!r}")
    if report.foreign:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
