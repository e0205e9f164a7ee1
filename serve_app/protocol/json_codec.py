"""The JSON part of V2 inference requests and responses; `binary` puts it together with the binary part."""

from __future__ import annotations

from typing import Any

import orjson

from serve_app.errors import InvalidRequest, RequestTooLarge, TensorDatatypeMismatch, TensorShapeMismatch
from serve_app.protocol.datatypes import DATATYPES, Datatype
from serve_app.protocol.json_tensor import json_values, non_finite_fragment, pack_json
from serve_app.protocol.large_json import LongValue
from serve_app.protocol.messages import (
    REGION,
    InferRequest,
    InferResponse,
    Parameters,
    RequestedOutput,
    regions_of,
)
from serve_app.protocol.output_plan import BINARY_ONLY, JSON_ONLY, OutputPlan
from serve_app.protocol.parameters import (
    INT64_MAX,
    check_output_parameters,
    check_request_parameters,
    json_type,
    region_of,
)
from serve_app.protocol.tensor import Buffer, Tensor
from serve_app.settings import LimitSettings

_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def parse_json(text: bytes | memoryview, *, field: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        InvalidRequest: Not JSON (NaN and infinities are not), nested too deeply, or not an object.
    """
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        # The message names what was wrong and where, and none of the text.
        copy = bytes(text)
        has_words = b"NaN" in copy or b"Infinity" in copy
        note = "; NaN and infinities are not JSON, send them as binary data" if has_words else ""
        raise InvalidRequest(field, f"invalid JSON ({error})", f"a JSON object{note}") from None
    if type(document) is not dict:
        raise InvalidRequest(field, json_type(document), "a JSON object")
    return document


class BinaryPart:
    """What follows the JSON in a body: the binary tensors, one after the other.

    Args:
        data: All bytes behind the JSON.
    """

    __slots__ = ("_data", "_offset")

    def __init__(self, data: memoryview) -> None:
        self._data, self._offset = data, 0

    def take(self, size_bytes: int, *, field: str) -> memoryview:
        """The next `size_bytes` bytes, without a copy.

        Raises:
            InvalidRequest: So many are not left.
        """
        start, left = self._offset, len(self._data) - self._offset
        if size_bytes > left:
            raise InvalidRequest(field, f"{size_bytes}", f"at most the {left} bytes that are left of the body")
        self._offset = start + size_bytes
        return self._data[start : self._offset]

    def finish(self) -> None:
        """Check that nothing is left.

        Raises:
            InvalidRequest: Bytes follow the last binary tensor.
        """
        left = len(self._data) - self._offset
        if left:
            raise InvalidRequest(
                "body", f"{left} bytes after the last binary tensor", f"{self._offset} bytes of binary data in all"
            )

    def __repr__(self) -> str:
        return f"<BinaryPart {self._offset} of {len(self._data)} bytes taken>"


def request_of(
    document: dict[str, Any], tail: memoryview, *, model_name: str, model_version: str, limits: LimitSettings
) -> tuple[InferRequest, OutputPlan]:
    """The request in a decoded JSON object and the bytes behind it, and how its outputs are to be written.

    Unknown members are ignored, as in Triton.

    Raises:
        InvalidRequest: See `binary.decode_infer_request`.
        RequestTooLarge: Too many inputs or dimensions.
    """
    request_id = document.get("id", "")
    if type(request_id) is not str:
        raise InvalidRequest("id", json_type(request_id), "a string")
    parameters = _member(document, "parameters", "parameters")
    is_binary_default = _take_bool(parameters, "binary_data_output", "parameters")
    if parameters:
        check_request_parameters(parameters)
    entries = document.get("inputs")
    if type(entries) is not list:
        got = "no such member" if entries is None else json_type(entries)
        raise InvalidRequest("inputs", got, "an array of tensors")
    if len(entries) > limits.max_inputs:
        raise RequestTooLarge("inputs", len(entries), limits.max_inputs, "tensors")
    part = BinaryPart(tail)
    inputs = [
        tensor_of(entry, part, field=f"inputs[{index}]", max_rank=limits.max_rank)
        for index, entry in enumerate(entries)
    ]
    part.finish()
    outputs, plan = _outputs_of(document.get("outputs"), is_binary_default)
    regions = regions_of(inputs, outputs)
    return InferRequest(model_name, inputs, model_version, request_id, outputs, parameters, regions), plan


def tensor_of(entry: Any, part: BinaryPart, *, field: str, max_rank: int) -> Tensor:
    """The tensor of one entry of `inputs` (or, for a client, of a response's `outputs`).

    Its parameters, `binary_data_size` among them, are read here and go no further.
    """
    if type(entry) is not dict:
        raise InvalidRequest(field, json_type(entry), "an object with name, datatype, shape and data")
    name = _name_of(entry, field)
    datatype = _datatype_of(entry.get("datatype"), f"{field}.datatype")
    shape = _shape_of(entry.get("shape"), f"{field}.shape", max_rank)
    size_bytes = None
    if "parameters" in entry:
        parameters = _member(entry, "parameters", f"{field}.parameters")
        size_bytes = parameters.get("binary_data_size")
        region = region_of(parameters, field=f"{field}.parameters")
        if region is not None:
            if "data" in entry or size_bytes is not None:
                raise InvalidRequest(field, f"{REGION} and data of its own", "one of them")
            return Tensor(name, datatype.name, shape, b"", region)
    if size_bytes is None:
        if "data" not in entry:
            raise InvalidRequest(field, "neither data nor parameters.binary_data_size", "one of them")
        found = entry["data"]
        if type(found) is LongValue:
            return Tensor(name, datatype.name, shape, found.pack(datatype=datatype, shape=shape, field=f"{field}.data"))
        data: Buffer = pack_json(found, datatype=datatype, shape=shape, field=f"{field}.data")
        return Tensor(name, datatype.name, shape, data)
    if "data" in entry:
        raise InvalidRequest(field, "both data and parameters.binary_data_size", "one of them")
    size_field = f"{field}.parameters.binary_data_size"
    if type(size_bytes) is not int or size_bytes < 0:
        got = "a negative integer" if type(size_bytes) is int else json_type(size_bytes)
        raise InvalidRequest(size_field, got, "a non-negative integer")
    tensor = Tensor(name, datatype.name, shape, part.take(size_bytes, field=size_field))
    if datatype.size_bytes is not None and size_bytes != tensor.num_elements * datatype.size_bytes:
        raise TensorShapeMismatch(
            size_field, f"{size_bytes}", f"{tensor.num_elements * datatype.size_bytes} for {datatype.name}{list(shape)}"
        )
    return tensor


def _name_of(entry: dict[str, Any], field: str) -> str:
    name = entry.get("name")
    if type(name) is not str or not name:
        got = "an empty string" if name == "" else json_type(name)
        raise InvalidRequest(f"{field}.name", got, "a non-empty string")
    return name


def _datatype_of(value: Any, field: str) -> Datatype:
    datatype = DATATYPES.get(value) if type(value) is str else None
    if datatype is None:
        got = repr(value[:16]) if type(value) is str else json_type(value)
        raise TensorDatatypeMismatch(field, got, f"one of {', '.join(DATATYPES)}")
    return datatype


def _shape_of(value: Any, field: str, max_rank: int) -> tuple[int, ...]:
    if type(value) is not list:
        raise InvalidRequest(field, json_type(value), "an array of non-negative integers")
    if len(value) > max_rank:
        raise RequestTooLarge(field, len(value), max_rank, "dimensions")
    for index, size in enumerate(value):
        if type(size) is not int or not 0 <= size <= INT64_MAX:
            got = f"{size}" if type(size) is int else json_type(size)
            raise TensorShapeMismatch(f"{field}[{index}]", got, "a non-negative 64-bit integer")
    return tuple(value)


def _member(holder: dict[str, Any], key: str, field: str) -> Parameters:
    value = holder.get(key)
    if value is None and key not in holder:
        return {}
    if type(value) is not dict:
        raise InvalidRequest(field, json_type(value), "an object")
    return value


def _take_bool(parameters: Parameters, key: str, field: str) -> bool:
    value = parameters.pop(key, False)
    if type(value) is not bool:
        raise InvalidRequest(f"{field}.{key}", json_type(value), "true or false")
    return value


def _outputs_of(entries: Any, is_binary_default: bool) -> tuple[list[RequestedOutput], OutputPlan]:
    if entries is not None and type(entries) is not list:
        raise InvalidRequest("outputs", json_type(entries), "an array of objects")
    if not entries:
        return [], BINARY_ONLY if is_binary_default else JSON_ONLY
    outputs: list[RequestedOutput] = []
    binary_by_name: dict[str, bool] = {}
    for index, entry in enumerate(entries):
        field = f"outputs[{index}]"
        if type(entry) is not dict:
            raise InvalidRequest(field, json_type(entry), "an object with name and parameters")
        name = _name_of(entry, field)
        parameters = _member(entry, "parameters", f"{field}.parameters")
        binary_by_name[name] = _take_bool(parameters, "binary_data", f"{field}.parameters")
        if parameters:
            check_output_parameters(parameters, field=f"{field}.parameters")
            if binary_by_name[name] and REGION in parameters:
                raise InvalidRequest(f"{field}.parameters", f"both {REGION} and binary_data", "one of them")
        outputs.append(RequestedOutput(name, parameters))
    return outputs, OutputPlan(is_binary_default, binary_by_name)


def write_json(
    head: dict[str, Any], key: str, tensors: list[Tensor], binary: list[bool], *, has_non_finite: bool
) -> bytes:
    """The JSON of a request or response, `head` first and the tensors under `key` last, in Triton's key order.

    Args:
        head: The members before the tensors; `key` is added to it.
        key: `inputs` or `outputs`.
        tensors: What to write.
        binary: For each tensor whether only its size is written here.
        has_non_finite: Whether NaN and infinities may be written, as the words that Triton uses.

    Raises:
        InvalidRequest: A tensor does not travel as JSON.
        TensorDatatypeMismatch: NaN or an infinity where they may not be written.
        TensorShapeMismatch: A tensor's data does not fill its shape.
    """
    entries: list[dict[str, Any]] = []
    for index, (tensor, is_binary) in enumerate(zip(tensors, binary, strict=True)):
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if tensor.region is not None:
            pass  # as Triton answers: no data, and not where it went
        elif is_binary:
            entry["parameters"] = {"binary_data_size": tensor.size_bytes}
        else:
            entry["data"] = json_values(tensor, field=f"{key}[{index}].data")
        entries.append(entry)
    head[key] = entries
    text = orjson.dumps(head, option=_NUMPY)
    if b"null" not in text:
        return text
    # `null` may be a number that is not finite, or a part of some string.
    for index, entry in enumerate(entries):
        fragment = non_finite_fragment(entry.get("data"))
        if fragment is None:
            continue
        if not has_non_finite:
            raise TensorDatatypeMismatch(f"{key}[{index}].data", "NaN or an infinity as JSON", "binary data")
        entry["data"] = fragment
    return orjson.dumps(head, option=_NUMPY)


def response_head(response: InferResponse) -> dict[str, Any]:
    """The members of a response's JSON before `outputs`; `id` and `parameters` only where there are any."""
    head: dict[str, Any] = {"id": response.id} if response.id else {}
    head["model_name"] = response.model_name
    head["model_version"] = response.model_version
    if response.parameters:
        head["parameters"] = response.parameters
    return head
