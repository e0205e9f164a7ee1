"""Large messages in protobuf's wire form, so that tensors are not copied into protobuf's memory and out of it again.

A tensor of a large message is one field of bytes at the top of `ModelInferRequest` or `ModelInferResponse`. Here such
fields are views of the message as it came, or joined to it once as it leaves; protobuf reads and writes all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from serve_app.protocol.tensor import Buffer

LARGE_BYTES = 64 * 1024
"""Messages from this size on go this way; for smaller ones protobuf's copies cost less than what is done here."""

RAW_INPUT_FIELD = service_pb2.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
RAW_OUTPUT_FIELD = service_pb2.ModelInferResponse.DESCRIPTOR.fields_by_name["raw_output_contents"].number

# A message of more fields than this is left to protobuf, which keeps a few bytes for each where we keep objects.
_MAX_FIELDS = 4096

# Wire types: https://protobuf.dev/programming-guides/encoding/
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5


class LargeMessage:
    """A message whose raw contents stay in the buffers they are in until it is serialized.

    It has of a protobuf message what those need who send one: Ray Serve and our channels.

    Args:
        head: The message without its raw contents.
        field: Number of the field of raw contents.
        contents: The raw contents; borrowed.

    Attributes:
        head: As given; may be changed until it is serialized.
        size_bytes: Bytes of the raw contents.
    """

    __slots__ = ("_contents", "_field", "head", "size_bytes")

    def __init__(self, head: Any, field: int, contents: Sequence[Buffer]) -> None:
        self.head = head
        self._field = field
        self._contents = contents
        self.size_bytes = sum([data.nbytes if isinstance(data, memoryview) else len(data) for data in contents])

    def SerializeToString(self) -> bytes:  # noqa: N802  # protobuf's name
        """The message in its wire form: the one copy of its contents."""
        key = _varint(self._field << 3 | _LENGTH_DELIMITED)
        parts: list[Buffer] = [self.head.SerializeToString()]
        for data in self._contents:
            size = data.nbytes if isinstance(data, memoryview) else len(data)
            parts += (key + _varint(size), data)
        return b"".join(parts)

    def __repr__(self) -> str:
        return f"<LargeMessage {type(self.head).__name__} with {self.size_bytes} bytes of raw contents>"


class LargeRequest:
    """A large `ModelInferRequest` as it came; parsed when first looked at, and pickled as it came.

    Args:
        data: Its wire form.
    """

    __slots__ = ("_parsed", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._parsed: tuple[Any, Sequence[Buffer]] | None = None

    @property
    def model_name(self) -> str:
        """What the message's field of that name says; empty when it is no such message."""
        try:
            name: str = self.parse()[0].model_name
        except DecodeError:
            return ""
        return name

    def parse(self) -> tuple[Any, Sequence[Buffer]]:
        """As the function of that name, once."""
        if self._parsed is None:
            self._parsed = parse(self.data, service_pb2.ModelInferRequest, RAW_INPUT_FIELD)
        return self._parsed

    def __reduce__(self) -> tuple[Any, ...]:
        return LargeRequest, (self.data,)

    def __repr__(self) -> str:
        return f"<LargeRequest of {len(self.data)} bytes>"


def read_infer_request(data: bytes) -> Any:
    """How a server reads a `ModelInferRequest`: the message, or a `LargeRequest` when it is large.

    What it gives can be pickled without being parsed; `grpc_codec.decode_infer_request` takes both.

    Raises:
        google.protobuf.message.DecodeError: `data` is small and no such message.
    """
    return LargeRequest(data) if len(data) >= LARGE_BYTES else service_pb2.ModelInferRequest.FromString(data)


def read_infer_response(data: bytes) -> Any:
    """How a client reads a `ModelInferResponse`: the message, or `data` itself when that is large.

    `grpc_codec.decode_infer_response` takes both.

    Raises:
        google.protobuf.message.DecodeError: `data` is small and no such message.
    """
    return data if len(data) >= LARGE_BYTES else service_pb2.ModelInferResponse.FromString(data)


def parse(data: bytes, message_type: Any, field: int) -> tuple[Any, Sequence[Buffer]]:
    """A message and its raw contents.

    Args:
        data: Its wire form; the contents are views of it where it has the form that everybody writes, and protobuf's
            copies where it has not.
        message_type: Class of the message.
        field: Number of its field of raw contents, a repeated one of bytes.

    Returns:
        The message, whose own raw contents are to be ignored, and the raw contents.

    Raises:
        google.protobuf.message.DecodeError: `data` is no such message.
    """
    parts = _split(data, field)
    if parts is None:
        message = message_type.FromString(data)
        return message, getattr(message, message_type.DESCRIPTOR.fields_by_number[field].name)
    head, contents = parts
    return message_type.FromString(head), contents


def _split(data: bytes, field: int) -> tuple[bytes, list[Buffer]] | None:
    """The wire form without a field of bytes, and that field's values; `None` where protobuf had better look itself."""
    view, size = memoryview(data), len(data)
    head: list[Buffer] = []
    contents: list[Buffer] = []
    at = kept = 0
    try:
        for _ in range(_MAX_FIELDS):
            if at == size:
                head.append(view[kept:])
                return b"".join(head), contents
            start = at
            key, at = _read_varint(data, at)
            wire_type = key & 7
            if wire_type == _LENGTH_DELIMITED:
                length, at = _read_varint(data, at)
                if key >> 3 == field:
                    head.append(view[kept:start])
                    contents.append(view[at : at + length])
                    kept = at + length
                at += length
            elif wire_type == _VARINT:
                _, at = _read_varint(data, at)
            elif wire_type in (_FIXED64, _FIXED32):
                at += 8 if wire_type == _FIXED64 else 4
            else:
                return None
            if at > size:
                return None
    except IndexError:  # it ends within a number
        return None
    return None


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 28:  # above 2**31 no message goes; protobuf decides on what such a number is
            raise IndexError


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
