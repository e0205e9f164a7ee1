"""Ray Serve's default proxies instead of HAProxy: slower, the same answers, streams and errors included."""

from __future__ import annotations

import gzip
import json
import os
import queue
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc as grpc_library
import numpy as np
import pytest
import requests
import tritonclient.grpc as triton_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support import sample_inputs
from tests.support.stack import ROOT, Stack, name_of
from tests.support.waiting import wait_until_sync
from tests.support.ways_in import WayIn, client_inputs, grpc, http_binary, http_json

pytestmark = pytest.mark.integration

# The session's own connection is to another cluster, so the handle is tried in a process of its own.
HANDLE_SCRIPT = """
import numpy as np, ray
from ray import serve
from serve_app.client import ModelClient

ray.init(namespace="serve", log_to_driver=False)
values = np.arange(16 * 1024 * 1024, dtype=np.float32).reshape(1, -1)
answer = serve.get_app_handle("models").infer.remote("identity", {"INPUT0": values}).result(timeout_s=60)
assert np.array_equal(answer["OUTPUT0"], values)
with ModelClient(timeout_s=60) as client:
    assert np.array_equal(client.infer("identity", {"INPUT0": values})["OUTPUT0"], values)
    try:
        client.infer("nothing", {})
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A second instance beside the session's, in default proxy mode."""
    run_dir = Path(f"/tmp/sd-{os.getpid()}")
    stack = Stack(tmp_path_factory.mktemp("proxied"), run_dir=run_dir, environ={"RAY_SERVE_ENABLE_HA_PROXY": "0"})
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
        shutil.rmtree(run_dir, ignore_errors=True)


def test_no_haproxy_runs(proxied: Stack) -> None:
    """The mode is the one that was asked for."""
    assert not [process for process in proxied.processes() if "haproxy" in name_of(process).lower()]


@pytest.mark.parametrize("way", [http_json, http_binary, grpc], ids=lambda way: way.__name__)
def test_the_same_answers(proxied: Stack, way: WayIn) -> None:
    """Digits are read."""
    pixels, labels = sample_inputs.digits()
    answer = way(proxied, "digits", {"pixels": pixels[:5]})
    assert answer["label"].ravel().tolist() == labels[:5].tolist()


@pytest.mark.parametrize("way", [http_binary, grpc], ids=lambda way: way.__name__)
def test_large_tensors_pass(proxied: Stack, way: WayIn) -> None:
    """64 MB there and back."""
    values = np.arange(16 * 1024 * 1024, dtype=np.float32).reshape(1, -1)
    np.testing.assert_array_equal(way(proxied, "identity", {"INPUT0": values})["OUTPUT0"], values)


def test_the_handle_works(proxied: Stack) -> None:
    """64 MB by handle and by client, and our own errors."""
    command = f". {proxied.driver_env} && exec {sys.executable} -c '{HANDLE_SCRIPT}'"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ModelNotFound"]


def test_the_same_errors(proxied: Stack) -> None:
    """404 and NOT_FOUND with one line, 504 for a missed deadline."""
    answer = requests.post(f"http://{proxied.http}/v2/models/nothing/infer", json={"inputs": []}, timeout=20)
    assert (answer.status_code, answer.json()) == (404, {"error": "unknown model 'nothing'"})
    with triton_grpc.InferenceServerClient(proxied.grpc) as client, pytest.raises(Exception, match="nothing") as raised:
        client.get_model_metadata("nothing")
    assert raised.value.status() == "StatusCode.NOT_FOUND"  # type: ignore[attr-defined]  # InferenceServerException
    assert "Traceback" not in raised.value.message()  # type: ignore[attr-defined]
    slow = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [3000]}]}
    url, headers = f"http://{proxied.http}/v2/models/slow/infer", {"x-request-timeout-seconds": "0.3"}
    answer = requests.post(url, json=slow, headers=headers, timeout=20)
    assert answer.status_code == 504
    assert "deadline" in answer.json()["error"]


def test_health_passes_the_proxy(proxied: Stack) -> None:
    """Its messages are pickled on their way here: one answer, and a stream of them."""
    asked = health_pb2.HealthCheckRequest()
    with grpc_library.insecure_channel(proxied.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(asked, timeout=20).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(asked, timeout=20)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


# --- the two modes beside each other: what one answers, the other answers ---------------------------------

VALUES = np.array([[1.5, 2.5]], np.float32)
BINARY_HEADER = json.dumps(
    {
        "id": "7",
        "parameters": {"binary_data_output": True},
        "inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}],
    }
).encode()
LARGE = {"inputs": [{"name": "INPUT0", "shape": [1, 4000], "datatype": "FP32", "data": [0.5] * 4000}]}
SLOW = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [3000]}]}
COUNT = {"inputs": [{"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [1]}]}
OCTETS = {"Inference-Header-Content-Length": str(len(BINARY_HEADER))}

# Name: path, body, headers, and the status that both give.
HTTP_CALLS: dict[str, tuple[str, object, dict[str, str], int]] = {
    "JSON": ("identity/infer", LARGE, {}, 200),
    "binary": ("identity/infer", BINARY_HEADER + VALUES.tobytes(), OCTETS, 200),
    "binary, packed": (
        "identity/infer",
        gzip.compress(BINARY_HEADER + VALUES.tobytes()),
        {**OCTETS, "Content-Encoding": "gzip"},
        200,
    ),
    "JSON, packed both ways": (
        "identity/infer",
        gzip.compress(json.dumps(LARGE).encode()),
        {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"},
        200,
    ),
    "no JSON": ("identity/infer", b"{", {}, 400),
    "a wrong name": ("identity/infer", COUNT, {}, 400),
    "an unknown version": ("identity/versions/9/infer", LARGE, {}, 404),
    "an unknown path": ("identity/nonsense", {}, {}, 404),
    "a budget that ran out": ("slow/infer", SLOW, {"x-request-timeout-seconds": "0.2"}, 504),
    "an unknown encoding": ("identity/infer", b"x", {"Content-Encoding": "br"}, 501),
    "a decoupled model": ("repeat/infer", COUNT, {}, 501),
    "generate": ("repeat/generate", {"COUNT": 1, "id": "7"}, {}, 200),
    "generate, several responses": ("repeat/generate", {"COUNT": 2}, {}, 400),
    "events": ("repeat/generate_stream", {"COUNT": 20}, {}, 200),
    "events, none": ("repeat/generate_stream", {"COUNT": 0}, {}, 200),
    "events, an error among them": ("repeat/generate_stream", {"COUNT": 666}, {}, 200),
    "events, an error before them": ("repeat/generate_stream", {"COUNT": "x"}, {}, 400),
    "events of a batching model": ("identity/generate_stream", {"INPUT0": [1, 2]}, {}, 200),
}
KEPT_HEADERS = ("content-type", "content-encoding", "inference-header-content-length")


def http_answer(stack: Stack, call: str) -> tuple[int, dict[str, str], str]:
    """Status, the headers that are the protocol's, and the body; without what no two calls have in common."""
    path, body, headers, _ = HTTP_CALLS[call]
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = requests.post(f"http://{stack.http}/v2/models/{path}", data=data, headers=headers, timeout=30)
    text = re.sub(r'"CANCELLED":\d+|(?<=deadline of )[\d.]+', "", answer.content.decode("latin-1"))
    kept = {name.lower(): value for name, value in answer.headers.items() if name.lower() in KEPT_HEADERS}
    return answer.status_code, kept, text


@pytest.mark.parametrize("call", HTTP_CALLS)
def test_http_answers_are_the_same_in_both_modes(stack: Stack, proxied: Stack, call: str) -> None:
    """Status, headers and every byte."""
    answer = http_answer(proxied, call)
    assert answer == http_answer(stack, call)
    assert answer[0] == HTTP_CALLS[call][3]


def stream_answers(stack: Stack, headers: dict[str, str] | None = None) -> list[object]:
    """What a stream of three requests gives: one is decoupled, one unknown, one refused."""
    got: queue.Queue[tuple[Any, Any]] = queue.Queue()
    counts = {"COUNT": np.array([3], np.int32)}
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        client.start_stream(lambda result, error: got.put((result, error)), headers=headers)
        client.async_stream_infer(
            "repeat", client_inputs(triton_grpc, counts), request_id="a", enable_empty_final_response=True
        )
        first = [got.get(timeout=30) for _ in range(4)]
        client.async_stream_infer("nothing", client_inputs(triton_grpc, counts), request_id="b")
        client.async_stream_infer("identity", client_inputs(triton_grpc, {"INPUT0": VALUES}), request_id="c")
        # With `triton_grpc_error` the first error is the end of the stream.
        rest = [got.get(timeout=30) for _ in range(1 if headers else 2)]
        client.stop_stream()
    return [_seen(*answer) for answer in first] + sorted((_seen(*answer) for answer in rest), key=str)


def _seen(result: Any, error: Any) -> object:
    if error is not None:
        return str(error.status()), error.message()
    response = result.get_response()
    values = {output.name: result.as_numpy(output.name).ravel().tolist() for output in response.outputs}
    values.pop("CANCELLED", None)
    return response.id, values, response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("headers", [None, {"triton_grpc_error": "true"}], ids=["texts", "statuses"])
def test_streams_are_the_same_in_both_modes(stack: Stack, proxied: Stack, headers: dict[str, str] | None) -> None:
    """Responses, their order, the empty last one, and errors in their places."""
    answers = stream_answers(proxied, headers)
    assert answers == stream_answers(stack, headers)
    assert answers[:4] == [
        ("a", {"INDEX": [0]}, False),
        ("a", {"INDEX": [1]}, False),
        ("a", {"INDEX": [2]}, False),
        ("a", {}, True),
    ]
    assert "nothing" in str(answers[4:])
    assert "Traceback" not in str(answers)


def grpc_errors(stack: Stack) -> list[tuple[str, str]]:
    """Status and text of calls that are refused."""
    refused = []
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        for model, inputs, options in (
            ("nothing", {"INPUT0": VALUES}, {}),
            ("identity", {"OTHER": VALUES}, {}),
            ("identity", {"INPUT0": VALUES.astype(np.int32)}, {}),
            ("repeat", {"COUNT": np.array([1], np.int32)}, {}),
            ("identity", {"INPUT0": VALUES}, {"model_version": "x"}),
            ("accumulate", {"VALUE": np.array([[1]], np.int32)}, {"sequence_id": 987654}),
        ):
            with pytest.raises(InferenceServerException) as raised:
                client.infer(model, client_inputs(triton_grpc, inputs), client_timeout=30, **options)
            refused.append((str(raised.value.status()), raised.value.message()))
    return refused


def test_grpc_errors_are_the_same_in_both_modes(stack: Stack, proxied: Stack) -> None:
    """Statuses and texts of one line, with nothing of Ray's in them."""
    errors = grpc_errors(proxied)
    assert errors == grpc_errors(stack)
    assert not [text for _, text in errors if "\n" in text or "ray" in text.lower()]


def num_cancelled(stack: Stack) -> int:
    answer = requests.post(f"http://{stack.http}/v2/models/repeat/generate", json={"COUNT": 1}, timeout=30)
    return int(answer.json()["CANCELLED"])


def test_events_pass_the_proxy_one_by_one(proxied: Stack) -> None:
    """The first of very many is here at once; a client that leaves stops the model's work."""
    before = num_cancelled(proxied)
    url, body = f"http://{proxied.http}/v2/models/repeat/generate_stream", {"COUNT": 100_000, "DELAY_MS": 20}
    with requests.post(url, json=body, stream=True, timeout=30) as answer:
        assert next(answer.iter_lines()).startswith(b"data: ")
    wait_until_sync(lambda: num_cancelled(proxied) > before, timeout_s=30, what="a cancelled request")


def test_responses_of_a_stream_pass_the_proxy_one_by_one(proxied: Stack) -> None:
    """The same over gRPC."""
    before = num_cancelled(proxied)
    got: queue.Queue[Any] = queue.Queue()
    counts = {"COUNT": np.array([100_000], np.int32), "DELAY_MS": np.array([20], np.int32)}
    with triton_grpc.InferenceServerClient(proxied.grpc) as client:
        client.start_stream(lambda result, error: got.put(error or int(result.as_numpy("INDEX")[0])))
        client.async_stream_infer("repeat", client_inputs(triton_grpc, counts))
        assert [got.get(timeout=30) for _ in range(3)] == [0, 1, 2]
        client.stop_stream(cancel_requests=True)
    wait_until_sync(lambda: num_cancelled(proxied) > before, timeout_s=30, what="a cancelled request")
