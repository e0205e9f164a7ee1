"""What a row of the contract table is: an inference request written once, or one call of one protocol."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

HTTP_JSON, HTTP_BINARY, GRPC, GRPC_TYPED, HANDLE = "http_json", "http_binary", "grpc", "grpc_typed", "handle"
WAYS = (HTTP_JSON, HTTP_BINARY, GRPC, GRPC_TYPED, HANDLE)

UNIQUE = "a sequence of its own"
"""As `sequence_id`: replaced by a string that no other request has; for a case's steps it is the same one."""

# Each kind of answer: its status over HTTP and over gRPC. Handles raise the class that the gRPC status stands for.
KINDS: dict[str, tuple[str, str]] = {
    "ok": ("200", "OK"),
    "invalid": ("400", "INVALID_ARGUMENT"),
    "not found": ("404", "NOT_FOUND"),
    "no such method": ("405", ""),
    "too large": ("413", "INVALID_ARGUMENT"),
    "failed": ("500", "INTERNAL"),
    "unsupported": ("501", "UNIMPLEMENTED"),
    "unavailable": ("503", "UNAVAILABLE"),
    "busy": ("429", "RESOURCE_EXHAUSTED"),
    "deadline": ("504", "DEADLINE_EXCEEDED"),
}


@dataclass(frozen=True)
class Case:
    """One inference request, in the words of V2 over HTTP; the other ways in are rendered from that.

    Attributes:
        name: Its key in the table, and in the recorded answers.
        model: Which model.
        body: JSON and binary data, as written.
        header_length: What goes into `Inference-Header-Content-Length`, if anything.
        version: Of the model; empty for the server's choice.
        headers: More of them, over HTTP. A request with any exists over HTTP alone.
        is_wire: The case is the very bytes, so that no other way in can carry it.
        before: JSON documents that are sent first, the same way; all have to be answered well.
        timeout_s: Budget; 0 for none.
        ends_triton: Triton's process ends of it, so that it is not asked beside the others.
        difference: Which row of `docs/protocol.md` says why we answer otherwise than Triton; empty where we do not.
        ours: Our kind of answer, or kinds with `or` between them, where there is a difference.
        says: Words that our error text has.
    """

    name: str
    model: str
    body: bytes
    header_length: int | None = None
    version: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    is_wire: bool = False
    before: tuple[Mapping[str, Any], ...] = ()
    timeout_s: float = 0.0
    ends_triton: bool = False
    difference: str = ""
    ours: str = "invalid"
    says: tuple[str, ...] = ()

    @property
    def is_codec_case(self) -> bool:
        """Whether the answer depends on the body and the echo models alone, so that it is recorded for unit tests."""
        is_echo = self.model in ("echo1", "echo2", "rows", "fixed", "raw_rows", "raw_dynamic", "raw_bytes")
        return (
            is_echo
            and b'"classification"' not in self.body
            and not (self.version or self.headers or self.before or self.timeout_s)
        )


@dataclass(frozen=True)
class Call:
    """One call that is no inference, or an inference that only one protocol can express.

    Attributes:
        name: Its key in the table.
        http: Method, path and body; `None` where the call does not exist over HTTP.
        rpc: RPC and message; `None` where the call does not exist over gRPC.
        headers: Over HTTP.
        look: What of a good answer has to be Triton's: given the answer as JSON. Everything by default.
        difference: As for `Case`.
        ours: As for `Case`.
        says: As for `Case`.
    """

    name: str
    http: tuple[str, str, bytes] | None = None
    rpc: tuple[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    look: Callable[[Any], Any] = lambda answer: answer
    difference: str = ""
    ours: str = "invalid"
    says: tuple[str, ...] = ()


Row = Case | Call


def tensor(
    datatype: str, shape: Any, data: Any = None, *, name: str | None = None, **parameters: Any
) -> dict[str, Any]:
    """An entry of `inputs`, named as the echo models name it."""
    entry: dict[str, Any] = {"name": name or datatype.replace("BYTES", "STRING"), "datatype": datatype, "shape": shape}
    if data is not None:
        entry["data"] = data
    if parameters:
        entry["parameters"] = parameters
    return entry


class Theme:
    """The rows of one file; `add` and `one` are how they are written."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(
        self, name: str, model: str, inputs: Any, *, tail: bytes = b"", length: int | None = None, **rest: Any
    ) -> None:
        """An inference request.

        Args:
            name: Of the case.
            model: Which model.
            inputs: The member of that name, or the whole body as bytes.
            tail: Binary data behind the JSON.
            length: `header_length`; that of the JSON where there is a tail.
            **rest: Attributes of `Case`; all others are members of the JSON document.
        """
        attributes = {key: rest.pop(key) for key in list(rest) if key in Case.__dataclass_fields__}
        text = inputs if isinstance(inputs, bytes) else json.dumps({"inputs": inputs, **rest}).encode()
        if length is None and tail:
            length = len(text)
        self.rows.append(Case(name, model, text + tail, length, **attributes))

    def one(self, name: str, datatype: str, shape: Any, data: Any, *, model: str = "echo1", **rest: Any) -> None:
        """An inference request with one input."""
        self.add(name, model, [tensor(datatype, shape, data)], **rest)

    def call(self, name: str, **attributes: Any) -> None:
        """A call."""
        self.rows.append(Call(name, **attributes))
