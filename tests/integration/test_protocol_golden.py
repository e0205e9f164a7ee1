"""Our codecs in front of a real tritonserver, and the recorded answers of the unit tests beside what it says today."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import orjson
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.fleet.runtime import TritonRuntime
from serve_app.protocol import binary, client_codec, grpc_codec
from serve_app.protocol.model_spec import model_config_json, model_metadata_json, model_spec_from
from serve_app.protocol.validation import check_request
from serve_app.settings import LimitSettings
from tests.support import golden
from tests.support.echo_models import MODELS, write_echo_models
from tests.support.tensors import canonical
from tests.support.v2_cases import CASES, Case

pytestmark = pytest.mark.integration

RECORDED = golden.load()

# The python backend of Triton 24.10 was built for numpy 1; with numpy 2 its process dies of the first BYTES tensor.
CAN_TAKE_BYTES = int(np.__version__.partition(".")[0]) < 2
USABLE = [case for case in CASES if CAN_TAKE_BYTES or not (b"BYTES" in case.body or case.model == "raw_bytes")]
ANSWERED = [c for c in USABLE if not c.difference and RECORDED.answers[c.name].status == 200]


@dataclass(frozen=True)
class Server:
    http: str
    grpc: str
    stub: service_pb2_grpc.GRPCInferenceServiceStub


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("echo")
    write_echo_models(folder / "models")
    runtime = TritonRuntime.find()
    http_port, grpc_port = _free_ports(2)
    arguments = [
        str(runtime.tritonserver),
        f"--model-repository={folder / 'models'}",
        f"--backend-directory={runtime.backend_directory}",
        "--disable-auto-complete-config",
        "--allow-gpu-metrics=false",
        "--allow-metrics=false",
        "--exit-timeout-secs=5",
        "--backend-config=python,thread-pool-size=2",
        f"--backend-config=python,shm-region-prefix-name=protocol_test_{http_port}_",
        "--http-address=127.0.0.1",
        f"--http-port={http_port}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc_port}",
    ]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=output, env=runtime.environment())
    address = f"127.0.0.1:{grpc_port}"
    try:
        with grpc.insecure_channel(address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            _wait_until_ready(stub, process, log)
            yield Server(f"127.0.0.1:{http_port}", address, stub)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, process: subprocess.Popen[bytes], log: Path
) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=2).ready:
                return
        except grpc.RpcError:
            pass
        time.sleep(0.1)
    pytest.fail(f"tritonserver did not become ready:\n{log.read_text(errors='replace')[-3000:]}")


@pytest.mark.parametrize("case", USABLE, ids=lambda case: case.name)
def test_recorded_answers_are_what_the_server_says(server: Server, case: Case) -> None:
    """The file that the unit tests compare with says what this server says."""
    recorded = RECORDED.answers[case.name]
    now = golden.fetch(server.http, f"/v2/models/{case.model}/infer", case.body, case.header_length)
    assert (now.status, now.header_length) == (recorded.status, recorded.header_length)
    if now.status == 200:
        assert now.body == recorded.body


@pytest.mark.parametrize("case", ANSWERED, ids=lambda case: case.name)
def test_http_in_grpc_to_triton_http_out(server: Server, case: Case) -> None:
    """A body that we turn into ModelInfer, and the answer that we turn into a body, is Triton's own HTTP answer."""
    metadata = server.stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=case.model))
    config = server.stub.ModelConfig(service_pb2.ModelConfigRequest(name=case.model)).config
    spec = model_spec_from(metadata, config)
    decoded = binary.decode_infer_request(
        case.body,
        model_name=case.model,
        model_version="",
        header_length=case.header_length,
        limits=LimitSettings(),
        spec=spec,
    )
    check_request(decoded.request, spec, LimitSettings())
    answer = server.stub.ModelInfer(grpc_codec.encode_infer_request(decoded.request), timeout=10)
    ours = binary.encode_infer_response(grpc_codec.decode_infer_response(answer), decoded.wants_binary)
    theirs = golden.fetch(server.http, f"/v2/models/{case.model}/infer", case.body, case.header_length)
    assert ours.header_length == theirs.header_length
    left = client_codec.decode_infer_response(ours.body, header_length=ours.header_length)
    right = client_codec.decode_infer_response(theirs.body, header_length=theirs.header_length)
    assert [canonical(tensor) for tensor in left.outputs] == [canonical(tensor) for tensor in right.outputs]
    assert (left.id, left.model_name, left.model_version) == (right.id, right.model_name, right.model_version)


@pytest.mark.parametrize("model", MODELS)
def test_descriptions_are_the_servers(server: Server, model: str) -> None:
    """Metadata byte by byte, and config value by value, are what the server's own HTTP endpoint prints."""
    metadata = server.stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=model))
    assert orjson.dumps(model_metadata_json(metadata)) == golden.fetch(server.http, f"/v2/models/{model}").body
    config = server.stub.ModelConfig(service_pb2.ModelConfigRequest(name=model)).config
    printed = json.loads(golden.fetch(server.http, f"/v2/models/{model}/config").body)
    assert json.loads(orjson.dumps(model_config_json(config))) == printed
