"""What exists over HTTP alone: headers, compression, transfer, methods, paths, and `generate`."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

from tests.contract.case import Theme, tensor
from tests.contract.differences import (
    CUT_BODY,
    ENCODING_CASE,
    ESCAPES,
    GENERATE_MANY,
    GENERATE_NUMBERS,
    GENERATE_PACKED,
    GENERATE_SEQUENCE,
    HEADER_LENGTH,
    MALFORMED,
)

T = Theme()
BODY = json.dumps({"inputs": [tensor("INT8", [1], [1])]}).encode()
LARGE = json.dumps({"inputs": [tensor("INT8", [3000], [1] * 3000)]}).encode()
INFER = "/v2/models/echo1/infer"


def _post(name: str, body: bytes, headers: dict[str, str], **rest: Any) -> None:
    T.add(name, "echo1", body, headers=headers, is_wire=True, **rest)


# --- Content-Type
for _kind in ("application/json", "application/octet-stream", "text/plain", "application/x-www-form-urlencoded", "x"):
    _post(f"Content-Type {_kind}", BODY, {"Content-Type": _kind})
_post("multipart Content-Type", BODY, {"Content-Type": "multipart/form-data; boundary=x"})
_post("charset", BODY, {"Content-Type": "application/json; charset=latin-1"})
_post("Accept of something else", BODY, {"Accept": "text/html"})

# --- compression
_post("gzip", gzip.compress(BODY), {"Content-Encoding": "gzip"})
_post("deflate", zlib.compress(BODY), {"Content-Encoding": "deflate"})
_post("Content-Encoding identity", BODY, {"Content-Encoding": "identity"})
_post("gzip in capitals", gzip.compress(BODY), {"Content-Encoding": "GZIP"}, difference=ENCODING_CASE, ours="ok")
_post("br", BODY, {"Content-Encoding": "br"})
_post("gzip that is none", BODY, {"Content-Encoding": "gzip"})
_post("gzip that is cut", gzip.compress(BODY)[:-9], {"Content-Encoding": "gzip"}, difference=CUT_BODY)
_post("gzip of nothing", gzip.compress(b""), {"Content-Encoding": "gzip"})
_BINARY = json.dumps({"inputs": [tensor("FP32", [1], binary_data_size=4)]}).encode()
_post(
    "gzip of binary data", gzip.compress(_BINARY + b"\0\0\x80\x3f"), {"Content-Encoding": "gzip"}, length=len(_BINARY)
)
_post("answer in gzip", LARGE, {"Accept-Encoding": "gzip"})
_post("answer in deflate", LARGE, {"Accept-Encoding": "deflate"})
_post("answer in what there is", LARGE, {"Accept-Encoding": "br, gzip"})
_post("answer in br", LARGE, {"Accept-Encoding": "br"})
_post("answer not in gzip", LARGE, {"Accept-Encoding": "gzip;q=0"})

# --- transfer and header length
_post("chunked", LARGE, {"Transfer-Encoding": "chunked"})
_post("Expect", BODY, {"Expect": "100-continue"})
T.add(
    "header length is a word",
    "raw_bytes",
    BODY,
    headers={"Inference-Header-Content-Length": "x"},
    difference=HEADER_LENGTH,
)
_post("header length is a fraction", BODY, {"Inference-Header-Content-Length": "1.5"}, difference=HEADER_LENGTH)
_post("header length is empty", BODY, {"Inference-Header-Content-Length": ""})
_post("header length beyond 64 bits", BODY, {"Inference-Header-Content-Length": f"{2**64}"})
_post("header length with a sign", BODY, {"Inference-Header-Content-Length": f"+{len(BODY)}"}, difference=HEADER_LENGTH)
_post("request id header", BODY, {"x-request-id": "abc"})

# --- methods and paths
T.call("GET infer", http=("GET", INFER, b""), ours="no such method")
T.call("PUT infer", http=("PUT", INFER, BODY), ours="no such method")
T.call("DELETE infer", http=("DELETE", INFER, b""), ours="no such method")
T.call("POST metadata", http=("POST", "/v2/models/echo1", b"{}"), ours="no such method")
T.call("POST health", http=("POST", "/v2/health/live", b""), ours="no such method")
T.call("GET index", http=("GET", "/v2/repository/index", b""), ours="no such method")
for _path in ("/", "/v2/", "/v1/models/echo1:predict", "/v2/models", "/v2/models/echo1/predict", f"{INFER}/", "/v3"):
    T.call(f"path {_path}", http=("GET", _path, b""), ours="not found")
T.call("path with a query", http=("POST", f"{INFER}?x=1", BODY))
T.call("version of no model", http=("GET", "/v2/models/versions/1", b""), ours="not found")
T.call("escaped model name", http=("GET", "/v2/models/echo%31", b""), difference=ESCAPES, ours="ok")
T.call("two slashes", http=("GET", "/v2//models/echo1", b""), ours="not found")

# --- generate


def _generate(name: str, model: str, document: object, **rest: Any) -> None:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    T.call(f"generate {name}", http=("POST", f"/v2/models/{model}/generate", body), **rest)


_generate("of a batching model", "identity", {"INPUT0": [1.5, 2]})
_generate("one value", "fixed", {"FP32": [1, 2, 3, 4, 5, 6]})
_generate("of bytes", "raw_bytes", {"STRING": "hello"})
_generate("with an id", "raw_bytes", {"STRING": "hello", "id": "7"})
_generate("with other members", "raw_bytes", {"STRING": "hello", "temperature": 0.5, "stream": False})
_generate("with parameters", "raw_bytes", {"STRING": "hello", "parameters": {"temperature": 0.5}})
_generate("wrong number of values", "fixed", {"FP32": [1, 2, 3]})
_generate("wrong type", "fixed", {"FP32": ["a"] * 6}, difference=MALFORMED)
_generate("missing input", "fixed", {})
_generate("no JSON", "fixed", b"{", difference=MALFORMED)
_generate("an array", "fixed", [1], difference=MALFORMED)
_generate("of an unknown model", "nothing", {"x": 1}, ours="not found")
_generate("of a decoupled model", "repeat", {"COUNT": 1}, look=lambda answer: answer["INDEX"])
_generate("of no response", "repeat", {"COUNT": 0}, difference=GENERATE_MANY)
_generate("of several responses", "repeat", {"COUNT": 3}, difference=GENERATE_MANY)
_generate(
    "of a sequence",
    "accumulate",
    {"VALUE": 5, "sequence_id": 990099, "sequence_start": True, "sequence_end": True},
    difference=GENERATE_SEQUENCE,
    ours="ok",
)
_generate("with a bad priority", "raw_bytes", {"STRING": "hello", "priority": "x"}, difference=GENERATE_NUMBERS)
_generate("with a bad timeout", "raw_bytes", {"STRING": "hello", "timeout": -1}, difference=GENERATE_NUMBERS)
_generate(
    "packed",
    "raw_bytes",
    gzip.compress(b'{"STRING":"hello"}'),
    headers={"Content-Encoding": "gzip"},
    difference=GENERATE_PACKED,
    ours="ok",
)
T.call("GET generate", http=("GET", "/v2/models/fixed/generate", b""), ours="no such method")
