"""Unchanged tritonclient calls that concern the whole fleet: statistics, settings, loading and unloading, labels."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.utils import InferenceServerException

from serve_app.endpoint import secret_metadata
from tests.support import sample_inputs
from tests.support.stack import Stack
from tests.support.triton_server import IDENTITY_PY
from tests.support.waiting import wait_until_sync

pytestmark = pytest.mark.integration

UPLOADED_CONFIG: dict[str, Any] = {
    "backend": "python",
    "max_batch_size": 4,
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
}
UPLOADED_FILES = {"file:1/model.py": IDENTITY_PY.encode()}


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, stack: Stack) -> Iterator[Any]:
    """The two synchronous clients; both have the same methods."""
    if request.param == "http":
        chosen = triton_http.InferenceServerClient(stack.http, network_timeout=120, connection_timeout=120)
    else:
        chosen = triton_grpc.InferenceServerClient(stack.grpc)
    with chosen:
        yield chosen


def as_json(client: Any) -> dict[str, bool]:
    """The argument that makes the gRPC client answer as the HTTP one does."""
    return {"as_json": True} if isinstance(client, triton_grpc.InferenceServerClient) else {}


def addresses(stack: Stack) -> list[str]:
    return [endpoint.endpoint.address for endpoint in stack.model_server_statistics()["router"].endpoints]


def is_replaced(now: list[str], before: set[str]) -> bool:
    """Whether there are as many servers as before, with another among them: of one look, as they change."""
    return len(now) == len(before) and set(now) != before


def ready_on(stack: Stack, model: str) -> list[bool]:
    """Whether each server of the fleet has the model loaded, asked without us."""
    answers = []
    for address in addresses(stack):
        with triton_grpc.InferenceServerClient(address) as direct:
            answers.append(direct.is_model_ready(model))
    return answers


def infer(stack: Stack, model: str, *, rows: int = 1) -> requests.Response:
    tensor = {"name": "INPUT0", "shape": [rows, 2], "datatype": "FP32", "data": [1.0] * (2 * rows)}
    return requests.post(f"http://{stack.http}/v2/models/{model}/infer", json={"inputs": [tensor]}, timeout=30)


def test_the_server_says_what_it_can(client: Any) -> None:
    """Metadata in Triton's words, without the extensions that are refused."""
    metadata = client.get_server_metadata(**as_json(client))
    assert {"statistics", "trace", "logging", "classification"} <= set(metadata["extensions"])
    assert not [name for name in metadata["extensions"] if "shared_memory" in name]


def test_statistics_count_every_request_of_the_fleet(stack: Stack, client: Any) -> None:
    """Of one model and of all, as perf_analyzer reads them before and after a measurement."""

    def count() -> int:
        (model,) = client.get_inference_statistics("identity", **as_json(client))["model_stats"]
        return int(model.get("inference_count", 0))

    before = count()
    for _ in range(6):
        assert infer(stack, "identity").status_code == 200
    wait_until_sync(lambda: count() == before + 6, timeout_s=10)
    names = [model["name"] for model in client.get_inference_statistics(**as_json(client))["model_stats"]]
    assert {"identity", "digits"} <= set(names)
    with pytest.raises(InferenceServerException, match="nobody"):
        client.get_inference_statistics("nobody")


def test_settings_reach_every_server(stack: Stack, client: Any) -> None:
    """Trace and log settings are changed on all, and put back."""
    try:
        client.update_trace_settings(settings={"trace_rate": "500"})
        client.update_log_settings({"log_verbose_level": 0, "log_format": "ISO8601"})
        for server in stack.model_server_statistics()["router"].endpoints:
            headers = dict(secret_metadata(server.endpoint.secret, "TraceSetting") or ())
            with triton_grpc.InferenceServerClient(server.endpoint.address) as direct:
                assert list(direct.get_trace_settings(headers=headers).settings["trace_rate"].value) == ["500"]
                assert direct.get_log_settings(headers=headers).settings["log_format"].string_param == "ISO8601"
        assert "500" in json.dumps(client.get_trace_settings("identity", **as_json(client)))
        assert "ISO8601" in json.dumps(client.get_log_settings(**as_json(client)))
    finally:
        client.update_trace_settings(settings={"trace_rate": None})
        client.update_log_settings({"log_format": "default"})
    with pytest.raises(InferenceServerException, match="trace_rate"):
        client.update_trace_settings(settings={"trace_rate": "often"})


def test_shared_memory_is_refused_with_a_reason(client: Any) -> None:
    """By status, register and unregister."""
    for call in (
        client.get_system_shared_memory_status,
        client.get_cuda_shared_memory_status,
        client.unregister_system_shared_memory,
        lambda: client.register_system_shared_memory("r", "/key", 64),
    ):
        with pytest.raises(InferenceServerException, match="send tensors in the request"):
            call()


def labels_of(answer: Any) -> list[str]:
    """The best label of each row, out of `value:index:label`."""
    values = answer.as_numpy("probabilities")[:, 0]
    return [(value.decode() if isinstance(value, bytes) else value).split(":")[2] for value in values]


@pytest.mark.parametrize("option", [{}, {"binary_data": False}])
def test_labels_instead_of_numbers(client: Any, option: dict[str, bool]) -> None:
    """`classification: 2` gives the two best labels of each row, as text over every way in."""
    pixels, _ = sample_inputs.digits()
    is_http = isinstance(client, triton_http.InferenceServerClient)
    library = triton_http if is_http else triton_grpc
    tensor = library.InferInput("pixels", [4, 64], "FP32")
    tensor.set_data_from_numpy(pixels[:4])
    output = library.InferRequestedOutput("probabilities", class_count=2, **(option if is_http else {}))
    answer = client.infer("digits", [tensor], outputs=[output])
    assert answer.as_numpy("probabilities").shape == (4, 2)
    assert labels_of(answer) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("library", [triton_http_aio, triton_grpc_aio], ids=["http", "grpc"])
async def test_labels_of_requests_that_shared_a_batch(stack: Stack, library: Any) -> None:
    """Each caller gets the labels of its own rows, whatever they were batched with."""
    stack.configure({"default": {"batching": {"max_batches_in_flight": 1}}})
    pixels, _ = sample_inputs.digits()
    before = stack.triton_statistics("digits")
    async with library.InferenceServerClient(stack.http if library is triton_http_aio else stack.grpc) as client:

        async def ask(row: int) -> list[str]:
            tensor = library.InferInput("pixels", [2, 64], "FP32")
            tensor.set_data_from_numpy(pixels[row : row + 2])
            output = library.InferRequestedOutput("probabilities", class_count=1)
            return labels_of(await client.infer("digits", [tensor], outputs=[output]))

        answers = await asyncio.gather(*(ask(number % 8) for number in range(64)))
    assert answers == [[str(number % 8), str(number % 8 + 1)] for number in range(64)]
    assert stack.sent_since(before, "digits", num_rows=128).num_requests < 64


async def test_the_asynchronous_clients(stack: Stack) -> None:
    """The same calls by `tritonclient.http.aio` and `tritonclient.grpc.aio`."""
    async with triton_http_aio.InferenceServerClient(stack.http) as client:
        assert (await client.get_inference_statistics("identity"))["model_stats"][0]["name"] == "identity"
        assert (await client.get_trace_settings())["trace_level"] == ["OFF"]
        assert (await client.get_log_settings())["log_info"] is True
        await client.load_model("identity")
    async with triton_grpc_aio.InferenceServerClient(stack.grpc) as client:
        assert (await client.get_inference_statistics("identity")).model_stats[0].name == "identity"
        assert list((await client.get_trace_settings()).settings["trace_level"].value) == ["OFF"]
        assert (await client.get_log_settings()).settings["log_info"].bool_param
        await client.load_model("identity")


def test_what_cannot_be_loaded_is_refused_in_tritons_words(client: Any) -> None:
    """A model that is not there, and a configuration that is none; the model goes on."""
    with pytest.raises(InferenceServerException, match="failed to load 'nobody'"):
        client.load_model("nobody")
    with pytest.raises(InferenceServerException, match="nobody"):
        client.load_model("identity", config='{"backend": "nobody"}')
    client.unload_model("nobody")
    assert client.is_model_ready("identity")


def test_loads_and_unloads_reach_all_servers_and_those_that_come_later(stack: Stack) -> None:
    """A second server, and one that was killed, are asked for nothing before they have what the others have."""
    http = triton_http.InferenceServerClient(stack.http, network_timeout=120, connection_timeout=120)
    grpc = triton_grpc.InferenceServerClient(stack.grpc)
    with http, grpc:
        try:
            http.unload_model("identity")
            assert infer(stack, "identity").status_code == 503
            grpc.load_model("uploaded", config=json.dumps(UPLOADED_CONFIG), files=UPLOADED_FILES)
            assert infer(stack, "uploaded", rows=9).status_code == 200
            stack.scale_fleet(2)
            assert ready_on(stack, "uploaded") == [True, True]
            assert ready_on(stack, "identity") == [False, False]

            http.load_model(
                "uploaded", config=json.dumps({**UPLOADED_CONFIG, "max_batch_size": 2}), files=UPLOADED_FILES
            )
            assert http.get_model_config("uploaded")["max_batch_size"] == 2
            assert {infer(stack, "uploaded", rows=5).status_code for _ in range(10)} == {200}

            before = set(addresses(stack))
            stack.tritonservers()[0].send_signal(signal.SIGKILL)
            wait_until_sync(lambda: is_replaced(addresses(stack), before), timeout_s=60)
            assert ready_on(stack, "uploaded") == [True, True]
            assert ready_on(stack, "identity") == [False, False]

            grpc.load_model("identity")
            assert ready_on(stack, "identity") == [True, True]
            assert infer(stack, "identity").status_code == 200
        finally:
            grpc.load_model("identity")
            http.unload_model("uploaded")
            stack.scale_fleet(1)
    assert infer(stack, "uploaded").status_code in (404, 503)


def test_a_curl_line_uploads_a_file(stack: Stack) -> None:
    """Base64 in JSON, as Triton's documentation has it."""
    url = f"http://{stack.http}/v2/repository/models/by_curl"
    files = {name: base64.b64encode(data).decode() for name, data in UPLOADED_FILES.items()}
    parameters = {"config": json.dumps(UPLOADED_CONFIG), **files}
    answer = requests.post(f"{url}/load", json={"parameters": parameters}, timeout=60)
    assert (answer.status_code, answer.content) == (200, b"")
    try:
        assert infer(stack, "by_curl").json()["outputs"][0]["data"] == [1.0, 1.0]
    finally:
        assert requests.post(f"{url}/unload", json={}, timeout=60).status_code == 200
    assert infer(stack, "by_curl").status_code in (404, 503)
