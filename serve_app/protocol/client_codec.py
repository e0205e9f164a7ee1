"""The client's side of V2 over HTTP: the inverse of `binary`, for tests, tools and the command line."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import orjson

from serve_app.errors import BackendFailed, InvalidRequest, ServeAppError
from serve_app.protocol.binary import EncodedBody
from serve_app.protocol.json_codec import BinaryPart, tensor_of, write_json
from serve_app.protocol.messages import InferRequest, InferResponse, Parameters
from serve_app.protocol.output_plan import JSON_ONLY, OutputPlan

# Any rank will do: the answer is to a request of our own.
_MAX_RANK = 1 << 16


def encode_infer_request(
    request: InferRequest, *, plan: OutputPlan = JSON_ONLY, json_inputs: Collection[str] = ()
) -> EncodedBody:
    """The HTTP body of a request; the model's name and version are the URL's matter.

    Args:
        request: Its tensors are borrowed by the chunks.
        plan: How the answer's outputs shall be written.
        json_inputs: Names of the inputs that are sent as JSON; all others go as binary data.

    Raises:
        InvalidRequest: An input of `json_inputs` cannot be JSON: FP16, BF16, NaN, infinities, or `BYTES` that are
            not UTF-8.
        TensorShapeMismatch: A tensor's data does not fill its shape.
    """
    head: dict[str, Any] = {"id": request.id} if request.id else {}
    parameters: Parameters = dict(request.parameters)
    if plan.is_binary_default:
        parameters["binary_data_output"] = True
    if parameters:
        head["parameters"] = parameters
    if request.outputs:
        head["outputs"] = [
            {"name": output.name, "parameters": {**output.parameters, "binary_data": plan.is_binary(output.name)}}
            for output in request.outputs
        ]
    binary = [tensor.name not in json_inputs for tensor in request.inputs]
    text = write_json(head, "inputs", request.inputs, binary, has_non_finite=False)
    return EncodedBody.of(text, request.inputs, binary)


def decode_infer_response(body: bytes | memoryview, *, header_length: int | None) -> InferResponse:
    """The response in an HTTP body, ours or Triton's.

    Args:
        body: The whole body, not compressed. Binary tensors become views of it.
        header_length: From the `Inference-Header-Content-Length` header; `None` when it was not there.

    Raises:
        BackendFailed: The body is no V2 response.
    """
    view = memoryview(body)
    length = len(view) if header_length is None else header_length
    document: Any = None
    try:
        document = _loads(view[:length])
        part = BinaryPart(view[length:])
        outputs = [
            tensor_of(entry, part, field=f"outputs[{index}]", max_rank=_MAX_RANK)
            for index, entry in enumerate(document["outputs"])
        ]
        part.finish()
        return InferResponse(
            document["model_name"],
            outputs,
            document.get("model_version", ""),
            document.get("id", ""),
            document.get("parameters", {}),
        )
    except (ServeAppError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        name = document.get("model_name", "") if isinstance(document, dict) else ""
        reason = str(error) if isinstance(error, InvalidRequest) else type(error).__name__
        raise BackendFailed(str(name), f"the answer is no V2 response ({reason})") from None


def _loads(text: memoryview) -> Any:
    """JSON, and the words `NaN`, `Infinity` and `-Infinity` with which Triton writes what JSON cannot."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(bytes(text))
