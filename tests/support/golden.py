"""Answers of a real Triton, recorded in a file: to the bodies of the contract table, and how it describes its models.

Written anew with `python -m tests.support.golden <host:http port> <host:grpc port>` beside a server of those models.
"""

from __future__ import annotations

import base64
import http.client
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.protocol.binary import HEADER_LENGTH
from tests.contract.case import Case
from tests.contract.table import CODEC_CASES
from tests.support.echo_models import MODELS

PATH = Path(__file__).parent.parent / "unit" / "protocol" / "golden" / "triton-2.51.0.json"


@dataclass(frozen=True)
class GoldenAnswer:
    """One HTTP answer; a status beside 200 has an error text as its body."""

    status: int
    header_length: int | None
    body: bytes


@dataclass(frozen=True)
class GoldenModel:
    """One model (or version of it) over both protocols.

    Attributes:
        metadata_pb: Serialized `ModelMetadataResponse`.
        config_pb: Serialized `ModelConfig`.
        metadata: Body of `GET /v2/models/{model}`.
        config: Body of `GET /v2/models/{model}/config`.
    """

    metadata_pb: bytes
    config_pb: bytes
    metadata: bytes
    config: bytes


@dataclass(frozen=True)
class Golden:
    """Everything in the file."""

    answers: dict[str, GoldenAnswer]
    models: dict[str, GoldenModel]


def load() -> Golden:
    """The recorded answers."""
    document = json.loads(PATH.read_text(encoding="utf-8"))
    decode = base64.b64decode
    answers = {k: GoldenAnswer(v["status"], v["length"], decode(v["body"])) for k, v in document["answers"].items()}
    models = {k: GoldenModel(**{name: decode(text) for name, text in v.items()}) for k, v in document["models"].items()}
    return Golden(answers, models)


def record(http_address: str, grpc_address: str, cases: Sequence[Case] = CODEC_CASES) -> Golden:
    """Ask a running server, which has the echo models."""
    models: dict[str, GoldenModel] = {}
    with grpc.insecure_channel(grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for key in (*MODELS, "labels/versions/1"):
            name, _, version = key.partition("/versions/")
            models[key] = GoldenModel(
                _call(stub.ModelMetadata, service_pb2.ModelMetadataRequest(name=name, version=version)),
                stub.ModelConfig(service_pb2.ModelConfigRequest(name=name, version=version)).config.SerializeToString(
                    deterministic=True
                ),
                fetch(http_address, f"/v2/models/{key}").body,
                fetch(http_address, f"/v2/models/{key}/config").body,
            )
    answers = {
        case.name: fetch(http_address, f"/v2/models/{case.model}/infer", case.body, case.header_length)
        for case in cases
    }
    return Golden(answers, models)


def _call(method: Any, request: Any) -> bytes:
    return bytes(method(request).SerializeToString(deterministic=True))


def fetch(address: str, path: str, body: bytes | None = None, header_length: int | None = None) -> GoldenAnswer:
    """One HTTP request: GET, or POST where there is a body."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    try:
        headers = {} if header_length is None else {HEADER_LENGTH: str(header_length)}
        connection.request("GET" if body is None else "POST", path, body=body, headers=headers)
        response = connection.getresponse()
        length = response.getheader(HEADER_LENGTH)
        return GoldenAnswer(response.status, None if length is None else int(length), response.read())
    finally:
        connection.close()


def save(golden: Golden) -> None:
    """Write the file."""

    def encode(data: bytes) -> str:
        return base64.b64encode(data).decode("ascii")

    document = {
        "answers": {
            k: {"status": v.status, "length": v.header_length, "body": encode(v.body)}
            for k, v in golden.answers.items()
        },
        "models": {
            k: {name: encode(getattr(v, name)) for name in ("metadata_pb", "config_pb", "metadata", "config")}
            for k, v in golden.models.items()
        },
    }
    PATH.write_text(json.dumps(document, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    save(record(sys.argv[1], sys.argv[2]))
