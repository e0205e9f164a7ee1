"""The JSON of Triton's generate extension: one object whose members are inputs, parameters, or outputs by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson

from serve_app.errors import InvalidRequest, ServeAppError, TensorShapeMismatch
from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.json_codec import parse_json
from serve_app.protocol.json_scan import CutPlace
from serve_app.protocol.json_tensor import check_has_json, json_values, non_finite_fragment, pack_json
from serve_app.protocol.large_json import LongValue, is_large
from serve_app.protocol.large_request import cut_json
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec, Parameters, TensorSpec
from serve_app.protocol.parameters import RESERVED_PREFIX, check_request_parameters, json_type
from serve_app.protocol.tensor import Tensor


def _go_on() -> None:
    """Nothing ends the work."""


def decode_generate_request(
    body: bytes, spec: ModelSpec, *, model_version: str = "", on_piece: Callable[[], None] = _go_on
) -> InferRequest:
    """The request in the body of `generate` or `generate_stream`.

    A member that is named like an input is that input: one value or a flat array. `id` is the request's id, and every
    other member is a parameter. The members of an object `parameters` count as members of the body, but for an `id`.
    Parameters that start with `triton_` are taken, as Triton takes them here, and go no further: over gRPC, by which
    the request goes on, Triton keeps such names for itself.

    Args:
        body: JSON, unpacked.
        spec: The model, whose inputs give names, datatypes and shapes.
        model_version: As asked for in the path.
        on_piece: Called before each piece of a body that is read in pieces (`large_json.is_large`); what it raises
            ends the work.

    Raises:
        InvalidRequest: No JSON object, an `id` that is no string, or an invalid parameter.
        TensorDatatypeMismatch: A value does not fit its input's datatype.
        TensorShapeMismatch: The number of values does not fit the input's shape.
        RequestTooLarge: A large body with too much beside its inputs; those in `parameters` are beside them.
    """
    if not is_large(len(body)):
        return _request_of(parse_json(body, field="body"), spec, model_version)
    large, document = cut_json(memoryview(body), CutPlace.MEMBER, on_piece)
    try:
        for key, token in document.items():
            value = large.value_of(token)
            if value is not None:
                # No parameter is an array, whatever is in it.
                document[key] = value if key in spec.inputs else [] if value.is_array else value.whole()
        request = _request_of(document, spec, model_version)
    except ServeAppError:
        large.check()
        raise
    large.check()
    large.make()
    return request


def _request_of(document: dict[str, Any], spec: ModelSpec, model_version: str) -> InferRequest:
    nested = document.pop("parameters", {}) if "parameters" not in spec.inputs else {}
    if type(nested) is not dict:
        raise InvalidRequest("parameters", json_type(nested), "an object")
    request_id = document.pop("id", "") if "id" not in spec.inputs else ""
    if type(request_id) is not str:
        raise InvalidRequest("id", json_type(request_id), "a string")
    inputs: list[Tensor] = []
    parameters: Parameters = {}
    for key, value in (*document.items(), *nested.items()):
        expected = spec.inputs.get(key)
        if expected is not None:
            inputs.append(_tensor(value, expected))
        elif not key.startswith(RESERVED_PREFIX) or type(value) not in (bool, int, float, str):
            parameters[key] = value
    check_request_parameters(parameters)
    return InferRequest(spec.name, inputs, model_version, request_id, [], parameters)


def _tensor(value: Any, expected: TensorSpec) -> Tensor:
    if type(value) is LongValue:
        return _large_tensor(value, expected)
    values = value if type(value) is list else [value]
    shape = shape_for(len(values), expected)
    data = pack_json(values, datatype=DATATYPES[expected.datatype], shape=(len(values),), field=expected.name)
    return Tensor(expected.name, expected.datatype, shape, data)


def _large_tensor(value: LongValue, expected: TensorSpec) -> Tensor:
    datatype = DATATYPES[expected.datatype]
    judged = value.judge(datatype=datatype, field=expected.name)  # the shape comes from the number of elements
    shape = shape_for(judged.num_elements, expected)
    check_has_json(datatype, expected.name)
    judged.finish()
    data = value.pack_flat(judged.num_elements, datatype=datatype, field=expected.name)
    return Tensor(expected.name, expected.datatype, shape, data)


def shape_for(num_elements: int, expected: TensorSpec) -> tuple[int, ...]:
    """The shape of a tensor that was given as a flat array: what the fixed dimensions leave goes to the last free one.

    Every other free dimension, the rows of a batching model among them, is 1.

    Raises:
        TensorShapeMismatch: The elements do not fill the fixed dimensions a whole number of times.
    """
    fixed = math.prod(size for size in expected.shape if size != -1)
    left, rest = divmod(num_elements, fixed) if fixed else (0, num_elements)
    shape = list(expected.shape)
    for index in range(len(shape) - 1, -1, -1):
        if shape[index] == -1:
            shape[index], left = left, 1
    if rest or (left != 1 and fixed):
        wanted = f"as many as fit shape {list(expected.shape)}, where -1 is any size"
        raise TensorShapeMismatch(f"input {expected.name!r}", f"{num_elements} elements", wanted)
    return tuple(shape)


def encode_generate_response(response: InferResponse) -> bytes:
    """The JSON of one response, in Triton's order: members by name, one value alone and several as a flat array.

    Raises:
        InvalidRequest: An output does not travel as JSON: FP16, BF16, or `BYTES` that are not UTF-8.
    """
    members: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        members["id"] = response.id
    for tensor in response.outputs:
        values = json_values(tensor, field=f"output {tensor.name!r}")
        members[tensor.name] = values[0] if tensor.num_elements == 1 else values
    members = dict(sorted(members.items()))
    text = orjson.dumps(members, option=orjson.OPT_SERIALIZE_NUMPY)
    if b"null" not in text:
        return text
    for tensor in response.outputs:  # NaN and infinities, as the words that Triton writes
        values = json_values(tensor, field=tensor.name)
        fragment = non_finite_fragment(values)
        if fragment is not None:
            members[tensor.name] = _word(float(values[0])) if tensor.num_elements == 1 else fragment
    return orjson.dumps(members, option=orjson.OPT_SERIALIZE_NUMPY)


def _word(value: float) -> orjson.Fragment:
    return orjson.Fragment("NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity")
