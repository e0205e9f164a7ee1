"""Sends a rendered request to a server, ours or Triton's, and says what came back in words that can be compared."""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2_grpc

from serve_app.errors import ServeAppError
from serve_app.ingress.grpc_errors import grpc_status_of
from serve_app.protocol import client_codec, grpc_codec
from serve_app.protocol.binary import HEADER_LENGTH
from serve_app.protocol.messages import Arrays, InferResponse
from serve_app.protocol.tensor import Tensor
from tests.support.tensors import canonical

CALL_S = 60.0
_UNPACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress}
_GRPC_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True)
class Outcome:
    """What one request got.

    Attributes:
        status: HTTP status, or the name of the gRPC status; for handles the latter of the error's class.
        value: What was answered, to be compared; `None` for errors.
        text: Of an error.
    """

    status: str
    value: Any = None
    text: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether it is an answer."""
        return self.status in ("200", "OK")


@dataclass(frozen=True)
class HttpAnswer:
    """Status, headers and unpacked body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Server:
    """One server by its addresses; safe to use from several threads, each of which has its own HTTP connection.

    Args:
        http: `host:port`.
        grpc: `host:port`.
        handle: Calls a model with arrays as `ModelClient.infer` does; `None` for Triton.
    """

    def __init__(self, http: str, grpc_target: str, handle: Callable[..., Arrays] | None = None) -> None:
        self.http, self.grpc = http, grpc_target
        self.handle = handle
        self._channel = grpc.insecure_channel(grpc_target, options=_GRPC_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._local = threading.local()
        self._connections: list[HTTPConnection] = []

    def close(self) -> None:
        """Close every connection."""
        for connection in self._connections:
            connection.close()
        self._channel.close()

    def ask_http(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        """One request, on a connection that is kept."""
        connection: HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            host, _, port = self.http.rpartition(":")
            connection = self._local.connection = HTTPConnection(host, int(port), timeout=CALL_S)
            self._connections.append(connection)
        is_chunked = "Transfer-Encoding" in headers
        parts: Any = [body[:1000], body[1000:]] if is_chunked else body
        try:
            connection.request(method, path, parts, dict(headers), encode_chunked=is_chunked)
            response = connection.getresponse()
            content = response.read()
        except BaseException:
            connection.close()  # the next request opens it again
            raise
        found = {name.lower(): value for name, value in response.getheaders()}
        encoding = found.get("content-encoding", "")
        content = _UNPACK.get(encoding, bytes)(content)
        return HttpAnswer(response.status, found, content)

    def ask_grpc(self, rpc: str, message: Any, timeout_s: float = CALL_S) -> Any:
        """One call; raises `grpc.RpcError`."""
        return getattr(self._stub, rpc)(message, timeout=timeout_s)


# --- outcomes


def http_outcome(answer: HttpAnswer, look: Callable[[Any], Any] | None = None) -> Outcome:
    """The outcome of an HTTP request; with `look` the answer is any JSON, else one of inference."""
    if answer.status != 200:
        return Outcome(f"{answer.status}", None, _error_text(answer.body))
    if look is not None:
        document = json.loads(answer.body) if answer.body else None
        return Outcome("200", look(document))
    length = answer.headers.get(HEADER_LENGTH.lower())
    header_length = None if length is None else int(length)
    response = client_codec.decode_infer_response(answer.body, header_length=header_length)
    head = json.loads(answer.body[:header_length])
    is_binary = {output["name"]: "data" not in output for output in head["outputs"]}
    encoding = answer.headers.get("content-encoding", "")
    return Outcome("200", (*_infer_value(response), is_binary, encoding))


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


def grpc_outcome(call: Callable[[], Any], look: Callable[[Any], Any] | None = None) -> Outcome:
    """The outcome of a gRPC call; with `look` the answer is any message, else one of inference."""
    try:
        answer = call()
    except grpc.RpcError as error:
        return Outcome(error.code().name, None, error.details() or "")
    if look is not None:
        document = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        return Outcome("OK", look(document))
    return Outcome("OK", _infer_value(grpc_codec.decode_infer_response(answer)))


def handle_outcome(call: Callable[[], Arrays]) -> Outcome:
    """The outcome of a handle call."""
    try:
        arrays = call()
    except ServeAppError as error:
        return Outcome(grpc_status_of(error).name, None, str(error))
    return Outcome("OK", [_comparable(Tensor.from_numpy(name, array)) for name, array in arrays.items()])


def _infer_value(response: InferResponse) -> tuple[Any, ...]:
    outputs = [_comparable(tensor) for tensor in response.outputs]
    parameters = {key: value for key, value in response.parameters.items() if not key.startswith("sequence_")}
    return outputs, response.model_name, response.model_version, response.id, parameters


def _comparable(tensor: Tensor) -> tuple[Any, ...]:
    name, datatype, shape, data = canonical(tensor)
    return name, datatype, tuple(shape), data
