"""V2 over HTTP: bodies of JSON alone, or of JSON and the binary tensor data behind it, to messages and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve_app.errors import BackendFailed, InvalidRequest, RequestTooLarge, TensorShapeMismatch, Unsupported
from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.json_codec import parse_json, request_of, response_head, write_json
from serve_app.protocol.large_json import is_large
from serve_app.protocol.large_request import large_request_of
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec, TensorSpec
from serve_app.protocol.output_plan import BINARY_ONLY, OutputPlan
from serve_app.protocol.tensor import Buffer, Tensor
from serve_app.settings import LimitSettings

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The HTTP header with the length of the JSON in bytes, in requests and responses that carry binary data."""


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """A request and how its answer is to be written.

    Attributes:
        request: Its tensors borrow the body where they came as binary data: keep the body unchanged.
        wants_binary: Which outputs to write as binary data.
    """

    request: InferRequest
    wants_binary: OutputPlan


@dataclass(frozen=True, slots=True)
class EncodedBody:
    """An HTTP body in parts that need not be joined.

    Attributes:
        chunks: The JSON, then the binary tensors; the latter borrowed from the message.
        header_length: Length of the JSON, to be sent as `HEADER_LENGTH`; `None` when there is only JSON.
    """

    chunks: tuple[Buffer, ...]
    header_length: int | None = None

    @classmethod
    def of(cls, text: bytes, tensors: Sequence[Tensor], binary: Sequence[bool]) -> EncodedBody:
        """The body of a JSON part and those of its tensors that are binary data."""
        if True not in binary:
            return cls((text,))
        chunks = (tensor.data for tensor, is_binary in zip(tensors, binary, strict=True) if is_binary)
        return cls((text, *chunks), len(text))

    @property
    def body(self) -> bytes:
        """All of it in one piece."""
        first = self.chunks[0]
        return first if len(self.chunks) == 1 and isinstance(first, bytes) else b"".join(self.chunks)

    @property
    def size_bytes(self) -> int:
        """Length of the body."""
        return sum(chunk.nbytes if isinstance(chunk, memoryview) else len(chunk) for chunk in self.chunks)

    @property
    def media_type(self) -> str:
        """The Content-Type that Triton gives such a body."""
        return "application/json" if self.header_length is None else "application/octet-stream"


def parse_header_length(value: str | None) -> int | None:
    """The length in an `Inference-Header-Content-Length` header; `None` when there is no header.

    An empty value is 0, a raw binary request, as in Triton. A value that is no number is refused; Triton would
    take it for 0 and read the JSON as tensor data.

    Raises:
        InvalidRequest: The value is not a non-negative integer.
    """
    if value is None:
        return None
    text = value.strip()
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise InvalidRequest(HEADER_LENGTH, repr(text[:32]), "the length of the JSON in bytes")
    return int(text)


def _go_on() -> None:
    """Nothing ends the work."""


def decode_infer_request(
    body: bytes | memoryview,
    *,
    model_name: str,
    model_version: str,
    header_length: int | None,
    limits: LimitSettings,
    spec: ModelSpec | None = None,
    on_piece: Callable[[], None] = _go_on,
) -> DecodedRequest:
    """The request in an HTTP body.

    Names, datatypes and shapes are not compared with the model here, nor is the inside of binary `BYTES` tensors
    looked at; `validation.check_request` does both.

    Args:
        body: The whole body, not compressed. Binary tensors become views of it.
        model_name: From the URL.
        model_version: From the URL; empty when it names none.
        header_length: Length of the JSON in bytes; `None`: the body is all JSON; 0: a raw binary request, whose body
            is the data of the model's only input.
        limits: Sizes beyond which the request is refused.
        spec: The model. Raw binary requests need it; large JSON may be compared with it before it is made tensors.
        on_piece: Called before each piece of JSON that is read in pieces (`large_json.is_large`); what it raises ends
            the work.

    Raises:
        InvalidRequest: Anything in the body is not as V2 wants it; the subclasses `TensorShapeMismatch` and
            `TensorDatatypeMismatch` for data that does not fit its own `shape` or `datatype`.
        RequestTooLarge: The body, its JSON, its number of inputs or a rank is above its limit.
        Unsupported: A raw binary request without `spec`.
    """
    size = len(body)
    if size > limits.max_request_bytes:
        raise RequestTooLarge("request body", size, limits.max_request_bytes)
    if header_length is None:
        header_length = size
    elif not 0 <= header_length <= size:
        raise InvalidRequest(HEADER_LENGTH, f"{header_length}", f"at most the body's {size} bytes")
    elif header_length == 0:
        return DecodedRequest(_raw_request(memoryview(body), model_name, model_version, spec), BINARY_ONLY)
    if header_length > limits.max_json_bytes:
        raise RequestTooLarge("JSON of the request", header_length, limits.max_json_bytes)
    view = memoryview(body)
    if is_large(header_length):
        return DecodedRequest(
            *large_request_of(
                view[:header_length],
                view[header_length:],
                model_name=model_name,
                model_version=model_version,
                limits=limits,
                spec=spec,
                on_piece=on_piece,
            )
        )
    document = parse_json(view[:header_length], field="body")
    request, plan = request_of(
        document, view[header_length:], model_name=model_name, model_version=model_version, limits=limits
    )
    return DecodedRequest(request, plan)


def encode_infer_response(response: InferResponse, plan: OutputPlan) -> EncodedBody:
    """The HTTP body of a response.

    JSON data is flat, in row-major order. NaN and infinities are written as `NaN`, `Infinity` and `-Infinity`, as
    Triton does, although strict JSON parsers refuse them.

    Args:
        response: Its tensors are borrowed by the chunks.
        plan: From the request.

    Raises:
        InvalidRequest: JSON was asked for an output that JSON cannot carry: FP16, BF16, or `BYTES` that are not UTF-8.
        BackendFailed: A tensor's data does not fill its shape.
    """
    outputs = response.outputs
    binary = [plan.is_binary(tensor.name) and tensor.region is None for tensor in outputs]
    try:
        text = write_json(response_head(response), "outputs", outputs, binary, has_non_finite=True)
    except TensorShapeMismatch as error:
        raise BackendFailed(response.model_name, str(error)) from None
    return EncodedBody.of(text, outputs, binary)


def _raw_request(body: memoryview, model_name: str, model_version: str, spec: ModelSpec | None) -> InferRequest:
    if spec is None:
        raise Unsupported("a raw binary request", "the model's metadata is not at hand; name the input in JSON")
    if len(spec.inputs) != 1:
        raise InvalidRequest(
            HEADER_LENGTH, "0 (a raw binary request)", f"JSON: model {spec.name!r} has {len(spec.inputs)} inputs, not 1"
        )
    return InferRequest(model_name, [_raw_tensor(body, next(iter(spec.inputs.values())), spec)], model_version)


def _raw_tensor(body: memoryview, tensor: TensorSpec, spec: ModelSpec) -> Tensor:
    """The body as the model's only input: one row, its one dynamic dimension as large as the data makes it."""
    shape = (1, *tensor.shape[1:]) if spec.max_batch_size else tensor.shape
    size_bytes = DATATYPES[tensor.datatype].size_bytes
    if size_bytes is None:
        # The whole body is one element; only a tensor of one element can hold it.
        if any(size not in (1, -1) for size in shape):
            raise TensorShapeMismatch("body", "one BYTES element", f"JSON for shape {list(shape)}")
        data = len(body).to_bytes(4, "little") + bytes(body)
        return Tensor(tensor.name, tensor.datatype, (1,) * len(shape), data)
    if shape.count(-1) > 1:
        raise TensorShapeMismatch("body", "a raw binary request", f"JSON: shape {list(shape)} is not known from a size")
    row_bytes = math.prod(size for size in shape if size != -1) * size_bytes
    length = len(body) // row_bytes if row_bytes else 0
    shape = tuple(length if size == -1 else size for size in shape)
    if math.prod(shape) * size_bytes != len(body):
        raise TensorShapeMismatch(
            "body", f"{len(body)} bytes", f"{row_bytes} for {tensor.datatype}{list(tensor.shape)}"
        )
    return Tensor(tensor.name, tensor.datatype, shape, body)
