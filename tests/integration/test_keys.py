"""Keys on the whole product: what unchanged clients send, through Ray Serve and HAProxy, and what ends in its logs."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc.auth import BasicAuth as GrpcBasicAuth
from tritonclient.http.auth import BasicAuth as HttpBasicAuth
from tritonclient.utils import InferenceServerException

from serve_app.auth.keys_file import KeyEntry, hash_of
from serve_app.auth.scopes import Scope
from serve_app.cli.keys import add_to
from tests.support.keys import SECRETS, WRONG, key_of, write_keys
from tests.support.stack import Stack
from tests.support.waiting import wait_until_sync
from tests.support.ways_in import client_inputs

pytestmark = pytest.mark.integration

VALUES = np.array([[1.5, 2.5]], np.float32)
LATE = "sak_added-while-it-runs-0010"


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, keys_file: Path) -> Iterator[Stack]:
    """An instance of its own that asks for keys; at its end no key is found in anything that it wrote."""
    run_dir, folder = Path(f"/tmp/sg-{os.getpid()}"), tmp_path_factory.mktemp("guarded")
    stack = Stack(folder, run_dir=run_dir, model_server_args={"auth": {"keys_file": str(keys_file)}})
    try:
        stack.start()
        yield stack
        searched = [path for path in [*run_dir.rglob("*"), *folder.rglob("*.log")] if path.is_file()]
        assert len(searched) > 20
        for path in searched:
            content = path.read_bytes()
            assert not [secret for secret in [*SECRETS, LATE] if secret.encode() in content], path
    finally:
        stack.stop()
        shutil.rmtree(run_dir, ignore_errors=True)


def infer(client: Any, library: Any, **options: Any) -> None:
    answer = client.infer("identity", client_inputs(library, {"INPUT0": VALUES}), **options)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), VALUES)


def test_tritons_http_client_sends_a_key(guarded: Stack) -> None:
    """By its argument `headers`, or by its plug-in for all calls; without one it is told that it needs one."""
    with triton_http.InferenceServerClient(guarded.http) as client:
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException, match="no valid API key"):
            infer(client, triton_http)
        infer(client, triton_http, headers={"Authorization": f"Bearer {key_of('runner')}"})
        infer(client, triton_http, headers={"X-API-Key": key_of("runner")})
        with pytest.raises(InferenceServerException, match="lacks the scope 'load'"):
            client.load_model("identity", headers={"X-API-Key": key_of("runner")})
        client.register_plugin(HttpBasicAuth("any", key_of("runner")))
        infer(client, triton_http)
        assert [entry["name"] for entry in client.get_model_repository_index()] == ["identity"]


def test_tritons_grpc_client_sends_a_key(guarded: Stack) -> None:
    """The same, and for streams."""
    with triton_grpc.InferenceServerClient(guarded.grpc) as client:
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException, match="no valid API key") as raised:
            infer(client, triton_grpc)
        assert raised.value.status() == "StatusCode.UNAUTHENTICATED"
        with pytest.raises(InferenceServerException, match="may not use model 'digits'") as raised:
            client.get_model_metadata("digits", headers={"x-api-key": key_of("runner")})
        assert raised.value.status() == "StatusCode.PERMISSION_DENIED"
        infer(client, triton_grpc, headers={"authorization": f"Bearer {key_of('runner')}"})
        answers: list[tuple[Any, Any]] = []
        client.start_stream(lambda result, error: answers.append((result, error)), headers={"x-api-key": WRONG})
        with contextlib.suppress(InferenceServerException):  # it may have been told already
            client.async_stream_infer("identity", client_inputs(triton_grpc, {"INPUT0": VALUES}))
        wait_until_sync(lambda: bool(answers), timeout_s=20, what=lambda: answers)
        assert answers[0][1] is not None
        client.stop_stream()
        answers.clear()
        headers = {"x-api-key": key_of("runner")}
        client.start_stream(lambda result, error: answers.append((result, error)), headers=headers)
        for model in ("identity", "digits"):
            client.async_stream_infer(model, client_inputs(triton_grpc, {"INPUT0": VALUES}))
        wait_until_sync(lambda: len(answers) == 2, timeout_s=20, what=lambda: answers)
        client.stop_stream()
        errors = [str(error) for _, error in answers if error is not None]
        assert len(errors) == 1
        assert "may not use model 'digits'" in errors[0]
        client.register_plugin(GrpcBasicAuth("any", key_of("runner")))
        infer(client, triton_grpc)


def test_health_is_open_and_reflection_is_not(guarded: Stack) -> None:
    """As probes and strangers see the gRPC port."""
    with grpc.insecure_channel(guarded.grpc) as channel:
        asked = health_pb2.HealthCheckRequest()
        status = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=20).status
        assert status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as raised:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_documents_and_unknown_paths_are_not_for_strangers(guarded: Stack) -> None:
    """A browser is asked for a password, which is the key."""
    for path in ("/docs", "/openapi.json", "/v2", "/nothing"):
        answer = requests.get(f"http://{guarded.http}{path}", timeout=20)
        assert answer.status_code == 401
        assert "Basic" in answer.headers["www-authenticate"]
    assert requests.get(f"http://{guarded.http}/docs", auth=("me", key_of("reader")), timeout=20).status_code == 200


def test_a_key_is_added_and_taken_away_while_it_runs(guarded: Stack, keys_file: Path) -> None:
    """In force about a second after the file has changed, with no restart."""
    url, before = f"http://{guarded.http}/v2", keys_file.read_text()

    def status() -> int:
        return requests.get(url, headers={"X-API-Key": LATE}, timeout=20).status_code

    assert status() == 401
    add_to(keys_file, KeyEntry(id="late", sha256=hash_of(LATE), scopes=[Scope.READ]))
    wait_until_sync(lambda: status() == 200, timeout_s=20, what=lambda: status())
    keys_file.write_text(before)
    wait_until_sync(lambda: status() == 401, timeout_s=20, what=lambda: status())


def test_rays_own_authentication_is_pinned(guarded: Stack) -> None:
    """In every process, and for programs that connect: left open, Ray turns it on for some and not for others."""
    seen = set()
    for process in guarded.processes():
        with contextlib.suppress(psutil.Error):
            seen.add(process.environ().get("RAY_AUTH_MODE"))
    assert seen == {"disabled"}
    assert "RAY_AUTH_MODE" in guarded.driver_env.read_text()
