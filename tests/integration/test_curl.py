"""The curl lines of Triton's documentation, as they stand there but for names, values and the address."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import Stack

pytestmark = pytest.mark.integration

IDENTITY = '{"inputs":[{"name":"INPUT0","shape":[1,3],"datatype":"FP32","data":[1.5,2.0,3.0]}]}'
HEADER = (
    b'{"inputs":[{"name":"INPUT0","shape":[1,3],"datatype":"FP32","parameters":{"binary_data_size":12}}],'
    b'"outputs":[{"name":"OUTPUT0","parameters":{"binary_data":true}}]}'
)
JSON_BACK = HEADER.partition(b',"outputs"')[0] + b"}"
VALUES = struct.pack("<3f", 1.5, 2.0, 3.0)
OUTPUT = {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 3], "data": [1.5, 2.0, 3.0]}
ANSWER = {"model_name": "identity", "model_version": "1", "outputs": [OUTPUT]}
LARGE = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 300_000], "datatype": "FP32", "data": [0.5] * 300_000}]})

IsRight = Callable[[Any], bool]


def has(*keys: str) -> IsRight:
    return lambda document: all(key in document for key in keys)


# Page of the documentation: the line, and what its answer is: a document, or what has to be true of it.
LINES: dict[str, tuple[str, Any]] = {
    "quickstart": ("curl -v localhost:8000/v2/health/ready", {"ready": True}),
    "live": ("curl localhost:8000/v2/health/live", {"live": True}),
    "server metadata": ("curl localhost:8000/v2", has("name", "version", "extensions")),
    "model ready": ("curl localhost:8000/v2/models/identity/versions/1/ready", has("ready")),
    "model metadata": ("curl localhost:8000/v2/models/identity", has("platform", "inputs")),
    "model configuration": ("curl localhost:8000/v2/models/identity/config", has("max_batch_size", "input")),
    "infer": (f"curl -X POST localhost:8000/v2/models/identity/infer -d '{IDENTITY}'", ANSWER),
    "infer, a version": (
        "curl -X POST localhost:8000/v2/models/identity/versions/1/infer "
        f"--header 'Content-Type: application/json' -d '{IDENTITY}'",
        ANSWER,
    ),
    "infer, a request id": (
        "curl -X POST localhost:8000/v2/models/identity/infer "
        f"""-d '{IDENTITY.replace("{", '{"id":"42",', 1)}'""",
        {**ANSWER, "id": "42"},
    ),
    "infer from a file above 1 MB": (
        "curl -s -X POST localhost:8000/v2/models/identity/infer --data-binary @large.json",
        lambda answer: answer["outputs"][0]["shape"] == [1, 300_000],
    ),
    "infer, chunked": (
        "curl -s -H 'Transfer-Encoding: chunked' localhost:8000/v2/models/identity/infer -d @identity.json",
        ANSWER,
    ),
    "infer, packed": (
        "gzip -kf identity.json && curl -s --compressed -H 'Content-Encoding: gzip' "
        "--data-binary @identity.json.gz localhost:8000/v2/models/identity/infer",
        ANSWER,
    ),
    "infer, a packed answer": (
        "curl -s --compressed -H 'Accept-Encoding: gzip' -d @large.json localhost:8000/v2/models/identity/infer",
        lambda answer: len(answer["outputs"][0]["data"]) == 300_000,
    ),
    "generate": (
        'curl -X POST localhost:8000/v2/models/repeat/generate -d \'{"id":"42","COUNT":1,'
        '"parameters":{"stream":false,"temperature":0}}\'',
        lambda answer: answer["id"] == "42" and answer["INDEX"] == 0,
    ),
    "repository index": (
        "curl -X POST localhost:8000/v2/repository/index",
        lambda answer: {"name": "identity", "version": "1", "state": "READY"} in answer,
    ),
    "repository index, ready ones": (
        "curl -X POST localhost:8000/v2/repository/index -d '{\"ready\":true}'",
        lambda answer: {entry["state"] for entry in answer} == {"READY"},
    ),
    "load": ("curl -X POST localhost:8000/v2/repository/models/picky/load", None),
    "load with parameters": (
        "curl -X POST localhost:8000/v2/repository/models/picky/load -d '{\"parameters\":{}}'",
        None,
    ),
    "unload": (
        "curl -X POST localhost:8000/v2/repository/models/picky/unload && "
        "curl -X POST localhost:8000/v2/repository/models/picky/load",
        None,
    ),
    "statistics": ("curl localhost:8000/v2/models/identity/stats", has("model_stats")),
    "statistics of all": (
        "curl localhost:8000/v2/models/stats",
        lambda answer: "identity" in {entry["name"] for entry in answer["model_stats"]},
    ),
    "trace settings": ("curl localhost:8000/v2/trace/setting", has("trace_level", "trace_rate")),
    "trace settings, changed": (
        'curl -s -X POST localhost:8000/v2/trace/setting -d \'{"trace_rate":"1000","trace_level":["OFF"]}\'',
        lambda answer: (answer["trace_rate"], answer["trace_level"]) == ("1000", ["OFF"]),
    ),
    "trace settings of a model": ("curl localhost:8000/v2/models/identity/trace/setting", has("trace_level")),
    "logging": ("curl localhost:8000/v2/logging", has("log_info", "log_verbose_level")),
    "logging, changed": (
        "curl -s -d '{\"log_verbose_level\":0}' -X POST localhost:8000/v2/logging",
        lambda answer: answer["log_verbose_level"] == 0,
    ),
}


def sh(folder: Path, text: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["sh", "-ec", text], cwd=folder, capture_output=True, timeout=60, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files that the lines name."""
    (tmp_path / "identity.json").write_text(IDENTITY)
    (tmp_path / "large.json").write_text(LARGE)
    (tmp_path / "request.bin").write_bytes(HEADER + VALUES)
    (tmp_path / "json_back.bin").write_bytes(JSON_BACK + VALUES)
    (tmp_path / "values.bin").write_bytes(VALUES)
    return tmp_path


@pytest.mark.parametrize("page", LINES)
def test_a_line_works(stack: Stack, folder: Path, page: str) -> None:
    """curl ends well (`--fail`: an error status is a failure) and prints what it should."""
    line, expected = LINES[page]
    done = sh(folder, line.replace("curl ", "curl --fail-with-body ").replace("localhost:8000", stack.http))
    assert done.returncode == 0, done
    if expected is None:
        assert done.stdout == b""
        return
    answer = json.loads(done.stdout)
    assert expected(answer) if callable(expected) else answer == expected


def binary(stack: Stack, folder: Path, file: str, header_length: int) -> tuple[dict[str, str], bytes]:
    """The line of the page on binary tensor data; gives the answer's headers, names in lower case, and its body."""
    done = sh(
        folder,
        f"curl --fail-with-body -s -D headers.txt -X POST http://{stack.http}/v2/models/identity/infer "
        f"--header 'Content-Type: application/octet-stream' --data-binary @{file} "
        f"--header 'Inference-Header-Content-Length: {header_length}'",
    )
    assert done.returncode == 0, done
    lines = (folder / "headers.txt").read_text().splitlines()
    return {name.lower(): value for name, value in (line.split(": ", 1) for line in lines if ": " in line)}, done.stdout


def test_binary_tensor_data_there_and_back(stack: Stack, folder: Path) -> None:
    """The answer's own header says where its JSON ends."""
    headers, body = binary(stack, folder, "request.bin", len(HEADER))
    length = int(headers["inference-header-content-length"])
    assert headers["content-type"] == "application/octet-stream"
    assert json.loads(body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 12}
    assert body[length:] == VALUES


def test_binary_tensor_data_there_and_json_back(stack: Stack, folder: Path) -> None:
    """Binary data comes back only where it is asked for."""
    headers, body = binary(stack, folder, "json_back.bin", len(JSON_BACK))
    assert "inference-header-content-length" not in headers
    assert json.loads(body) == ANSWER


def test_a_raw_binary_request(stack: Stack, folder: Path) -> None:
    """A header length of 0: the body is the model's single input."""
    headers, body = binary(stack, folder, "values.bin", 0)
    length = int(headers["inference-header-content-length"])
    assert json.loads(body[:length])["outputs"][0]["shape"] == [1, 3]
    assert body[length:] == VALUES


def test_generate_stream_prints_events(stack: Stack, folder: Path) -> None:
    """One for each response, as they come."""
    line = f"curl -N -s -X POST {stack.http}/v2/models/repeat/generate_stream -d '{{\"COUNT\":3}}'"
    events = sh(folder, line).stdout.decode().removesuffix("\n\n").split("\n\n")
    assert [json.loads(event.removeprefix("data: "))["INDEX"] for event in events] == [0, 1, 2]


def test_an_error_is_one_line_of_json(stack: Stack, folder: Path) -> None:
    """With `-w`, as the page on logging has it."""
    done = sh(folder, f"curl -s -w '\\n%{{http_code}}\\n' -X POST {stack.http}/v2/models/nothing/infer -d '{IDENTITY}'")
    body, status = done.stdout.decode().splitlines()
    assert (json.loads(body), status) == ({"error": "unknown model 'nothing'"}, "404")
