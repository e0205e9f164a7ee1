"""Ray Serve's default proxies instead of HAProxy: slower, the same answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc as grpc_library
import numpy as np
import pytest
import requests
import tritonclient.grpc as triton_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support import sample_inputs
from tests.support.stack import ROOT, Stack, name_of
from tests.support.ways_in import WayIn, grpc, http_binary, http_json

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
