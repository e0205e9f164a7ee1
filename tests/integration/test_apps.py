"""Applications of their own beside the shared one, as docs/apps.md shows them: by prefix, by metadata, by handle."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support import sample_inputs
from tests.support.stack import ROOT, Stack
from tests.support.ways_in import client_inputs

pytestmark = pytest.mark.integration

PAGE = (ROOT / "docs" / "apps.md").read_text()
BLOCKS = re.findall(r"<!-- run: (\w+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
PROGRAMS = [block for block in BLOCKS if block[0] != "applications"]
MODELS = ("digits", "efficientnet", "identity")
TIMEOUT_S = 20.0


class AppsStack(Stack):
    """The product with the applications of the page."""

    def _first_document(self) -> dict[str, Any]:
        document = super()._first_document()
        repository = document["applications"][0]["args"]["model_repository"]
        document.update(yaml.safe_load(dict(BLOCKS)["applications"]))
        document["applications"][0]["args"]["model_repository"] = repository
        for model in MODELS:
            shutil.copytree(ROOT / "model_repository" / model, Path(repository) / model)
        return document


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppsStack]:
    """Four applications at once, in an instance of their own."""
    if not sample_inputs.are_samples_built():
        pytest.skip(sample_inputs.NOT_BUILT)
    run_dir = Path(f"/tmp/sp-{os.getpid()}")
    stack = AppsStack(tmp_path_factory.mktemp("apps"), run_dir=run_dir)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
        shutil.rmtree(run_dir, ignore_errors=True)


# Route prefix, name of the application, its models.
APPS = [("", "models", set(MODELS)), ("/vision", "vision", {"efficientnet"})]


def names(entries: Any) -> set[str]:
    return {entry["name"] for entry in entries}


@pytest.mark.parametrize(("kind", "text"), PROGRAMS, ids=[kind for kind, _ in PROGRAMS])
def test_the_page_is_true(apps: AppsStack, kind: str, text: str) -> None:
    """What it shows runs, and prints what the comments say."""
    text = text.replace("127.0.0.1:8000", apps.http).replace("127.0.0.1:9000", apps.grpc)
    if kind != "curl":
        text = f"exec {sys.executable} - <<'PYTHON'\n{text}PYTHON\n"
    if kind == "driver":
        text = f". {apps.driver_env} && {text}"
    done = subprocess.run(["sh", "-ec", text], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    if kind == "curl":
        assert re.findall(r'"name":"(\w+)","versions"', done.stdout) == ["efficientnet", "digits"]
    else:
        assert done.stdout.split("\n")[:-1] == re.findall(r"print\(.*#\s*(.+)", text)


@pytest.mark.parametrize(("prefix", "app", "models"), APPS, ids=[app for _, app, _ in APPS])
def test_each_shows_its_own_models(apps: AppsStack, prefix: str, app: str, models: set[str]) -> None:
    """Index, statistics and readiness by unchanged clients; every other model is unknown."""
    headers = {"application": app}
    with (
        triton_http.InferenceServerClient(apps.http + prefix) as http,
        triton_grpc.InferenceServerClient(apps.grpc) as rpc,
    ):
        assert names(http.get_model_repository_index()) == models
        assert names(http.get_inference_statistics()["model_stats"]) == models
        assert http.is_server_ready()
        asked = {"headers": headers, "as_json": True}
        assert names(rpc.get_model_repository_index(**asked)["models"]) == models
        assert names(rpc.get_inference_statistics(**asked)["model_stats"]) == models
        assert rpc.is_server_ready(headers=headers)
        for model in MODELS:
            assert http.is_model_ready(model) == rpc.is_model_ready(model, headers=headers) == (model in models)


def test_a_model_of_another_application_is_unknown(apps: AppsStack) -> None:
    """In every call that names one, loading included."""
    with triton_http.InferenceServerClient(f"{apps.http}/vision") as client:
        inputs = client_inputs(triton_http, {"pixels": np.zeros((1, 64), np.float32)})
        calls: tuple[Callable[[], Any], ...] = (
            lambda: client.infer("digits", inputs),
            lambda: client.get_model_metadata("digits"),
            lambda: client.get_inference_statistics("digits"),
            lambda: client.load_model("digits"),
            lambda: client.unload_model("digits"),
        )
        for call in calls:
            with pytest.raises(InferenceServerException, match="unknown model 'digits'"):
                call()


def test_the_models_own_path_is_its_own_applications(apps: AppsStack) -> None:
    """Its V2 calls are there and its own alone; below that path nothing else is."""
    base = f"http://{apps.http}/v2/models/digits"
    pixels, labels = sample_inputs.digits()
    document = {
        "inputs": [
            {"name": "pixels", "datatype": "FP32", "shape": [5, 64], "data": pixels[:5].ravel().tolist()},
        ]
    }
    for path in ("/infer", "/versions/1/infer"):
        answer = requests.post(base + path, json=document, timeout=TIMEOUT_S)
        outputs = {output["name"]: output["data"] for output in answer.json()["outputs"]}
        assert outputs["label"] == labels[:5].tolist()
    for path in ("", "/config", "/ready", "/stats"):
        answer = requests.get(base + path, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
    for path in ("/nonsense", "/v2/health/ready"):
        answer = requests.get(base + path, timeout=TIMEOUT_S)
        assert (answer.status_code, list(answer.json())) == (404, ["error"])
    assert requests.get(f"http://{apps.http}/v2/models/digits2", timeout=TIMEOUT_S).json() == {
        "error": "unknown model 'digits2'"
    }


async def test_the_asynchronous_clients_too(apps: AppsStack) -> None:
    """A prefix in the address of one, metadata for the other; a picture is seen by both."""
    picture = {"input": sample_inputs.image_tensor("coffee.png")[None]}
    async with triton_http_aio.InferenceServerClient(f"{apps.http}/vision") as client:
        answer = await client.infer("efficientnet", client_inputs(triton_http_aio, picture))
        assert int(answer.as_numpy("logits").argmax()) == sample_inputs.ESPRESSO
    async with triton_grpc_aio.InferenceServerClient(apps.grpc) as client:
        answer = await client.infer(
            "efficientnet", client_inputs(triton_grpc_aio, picture), headers={"application": "vision"}
        )
        assert int(answer.as_numpy("logits").argmax()) == sample_inputs.ESPRESSO


@pytest.mark.parametrize(
    ("headers", "text"),
    [({}, "Application metadata not set"), ({"application": "nothing"}, "Application 'nothing' not found")],
    ids=["none", "unknown"],
)
def test_whoever_chooses_no_application_is_told(apps: AppsStack, headers: dict[str, str], text: str) -> None:
    """NOT_FOUND in one line, in calls, streams and health checks, and no hang."""
    values = client_inputs(triton_grpc, {"INPUT0": np.zeros((1, 4), np.float32)})
    with triton_grpc.InferenceServerClient(apps.grpc) as client:
        calls: tuple[Callable[[], Any], ...] = (
            lambda: client.is_server_live(headers=headers, client_timeout=TIMEOUT_S),
            lambda: client.infer("identity", values, headers=headers, client_timeout=TIMEOUT_S),
        )
        for call in calls:
            with pytest.raises(InferenceServerException, match=text) as raised:
                call()
            assert raised.value.status() == "StatusCode.NOT_FOUND"
            assert "Traceback" not in raised.value.message()
        errors: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: errors.put(error), headers=headers, stream_timeout=TIMEOUT_S)
        assert text in str(errors.get(timeout=TIMEOUT_S))
        client.stop_stream()
    with grpc.insecure_channel(apps.grpc) as channel, pytest.raises(grpc.RpcError, match=text) as failed:
        health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), metadata=tuple(headers.items()), timeout=TIMEOUT_S
        )
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_stream_goes_to_the_application_that_was_chosen(apps: AppsStack) -> None:
    """The metadata of a stream counts for all of its requests."""
    values = np.array([[1.5, 2.5]], np.float32)
    results: list[Any] = []
    with triton_grpc.InferenceServerClient(apps.grpc) as client:
        client.start_stream(lambda result, error: results.append((result, error)), headers={"application": "models"})
        for _ in range(3):
            client.async_stream_infer("identity", client_inputs(triton_grpc, {"INPUT0": values}))
        client.stop_stream()
    assert [error for _, error in results] == [None] * 3
    for result, _ in results:
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), values)
