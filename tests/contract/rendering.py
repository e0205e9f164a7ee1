"""One written inference request as every way in would carry it: JSON, binary data, raw and typed gRPC, arrays."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.messages import Arrays
from serve_app.protocol.tensor import Tensor, pack_bytes
from tests.contract.case import UNIQUE, Case

_CODES = {"BOOL": "?", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "FP32": "f", "FP64": "d"} | {
    f"UINT{bits}": code for bits, code in ((8, "B"), (16, "H"), (32, "I"), (64, "Q"))
}
_CONTENTS = {"BOOL": "bool", "UINT64": "uint64", "INT64": "int64", "FP32": "fp32", "FP64": "fp64", "BYTES": "bytes"} | {
    f"{sign}{bits}": sign.lower() for sign in ("INT", "UINT") for bits in (8, 16, 32)
}
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Input:
    """One input: its bytes, its values, or both; `None` for what cannot be said that way."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes | None
    values: list[Any] | None


@dataclass(frozen=True)
class Request:
    """A request whose parts every protocol has words for."""

    id: str
    inputs: list[Input]
    outputs: list[tuple[str, dict[str, Any]]]
    parameters: dict[str, Any]
    is_binary: bool


def request_of(body: bytes, header_length: int | None) -> Request | None:
    """What a body says, or `None` where only the body itself can say it."""
    length = len(body) if header_length is None else header_length
    if not 0 < length <= len(body):
        return None
    try:
        document = json.loads(body[:length])
        tail = _Tail(body[length:])
        outputs = [(entry["name"], _parameters(entry)) for entry in document.get("outputs", [])]
        inputs = [_input(entry, tail) for entry in document["inputs"]]
        parameters = _parameters(document)
        if tail.data or not isinstance(document.get("id", ""), str) or not isinstance(document["inputs"], list):
            return None
        for name, options in outputs:
            if not isinstance(name, str) or not isinstance(options.pop("binary_data", False), bool):
                return None
        if not isinstance(parameters.pop("binary_data_output", False), bool):
            return None
        return Request(document.get("id", ""), inputs, outputs, parameters, header_length is not None)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return None


class _Tail:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self.data):
            raise ValueError("not so many bytes")
        taken, self.data = self.data[:size], self.data[size:]
        return taken


def _parameters(holder: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(holder.get("parameters", {}))
    for key, value in found.items():
        if type(value) not in (bool, int, float, str) or (type(value) is int and not -_INT64_MAX <= value < 2**64):
            raise ValueError(key)
    return found


def _input(entry: Mapping[str, Any], tail: _Tail) -> Input:
    name, datatype, shape = entry["name"], entry["datatype"], entry["shape"]
    if not (name and isinstance(name, str) and isinstance(datatype, str) and isinstance(shape, list)):
        raise TypeError(name)
    if any(type(size) is not int or not -_INT64_MAX <= size <= _INT64_MAX for size in shape):
        raise TypeError(name)
    parameters = dict(entry.get("parameters", {}))
    size_bytes = parameters.pop("binary_data_size", None)
    if any(key.startswith("shared_memory") for key in parameters) or (size_bytes is not None) == ("data" in entry):
        raise ValueError(name)
    if size_bytes is not None:
        if type(size_bytes) is not int:
            raise TypeError(name)
        data = tail.take(size_bytes)
        return Input(name, datatype, shape, data, _values(name, datatype, shape, data))
    values = _flat(entry["data"], shape)
    return Input(name, datatype, shape, _bytes(datatype, values), values)


def _flat(data: Any, shape: list[int]) -> list[Any]:
    if not isinstance(data, list):
        raise TypeError("a bare value")
    if any(isinstance(item, list) for item in data):
        flat = np.array(data, dtype=object)
        if list(flat.shape) != shape:
            raise ValueError("nested otherwise than shape says")
        return list(flat.reshape(-1))
    return data


def _bytes(datatype: str, values: list[Any]) -> bytes | None:
    """The bytes of JSON values, `None` for values out of range."""
    datatype = datatype.upper()
    numbers: set[type] = {int, float} if datatype.startswith("FP") else {int}
    texts: dict[str, set[type]] = {"BYTES": {str}, "BOOL": {bool}}
    kinds = texts.get(datatype, numbers)
    if not {type(value) for value in values} <= kinds:
        raise TypeError(datatype)
    if datatype == "BYTES":
        return pack_bytes(values, name="x")
    try:
        return struct.pack(f"<{len(values)}{_CODES.get(datatype, 'f')}", *values)
    except (struct.error, OverflowError):
        return None


def _values(name: str, datatype: str, shape: list[int], data: bytes) -> list[Any] | None:
    row = DATATYPES.get(datatype)
    if row is None or not row.has_json:
        return None
    try:
        values: list[Any] = Tensor(name, datatype, tuple(shape), data).to_numpy().reshape(-1).tolist()
        return [value.decode() for value in values] if datatype == "BYTES" else values
    except Exception:  # data that does not fill its shape, or is not UTF-8
        return None


# --- one function for each way in; `None` where the request cannot be said that way


def as_json(request: Request) -> bytes | None:
    """A body without binary data."""
    inputs = []
    for entry in request.inputs:
        if entry.values is None or any(isinstance(v, float) and not math.isfinite(v) for v in entry.values):
            return None
        inputs.append({"name": entry.name, "datatype": entry.datatype, "shape": entry.shape, "data": entry.values})
    return json.dumps(_document(request, inputs, is_binary=False)).encode()


def as_binary(request: Request) -> tuple[bytes, int] | None:
    """A body with all inputs behind the JSON, which asks for all outputs so; and the JSON's length."""
    inputs, tail = [], b""
    for entry in request.inputs:
        if entry.data is None:
            return None
        tail += entry.data
        head = {"name": entry.name, "datatype": entry.datatype, "shape": entry.shape}
        inputs.append({**head, "parameters": {"binary_data_size": len(entry.data)}})
    text = json.dumps(_document(request, inputs, is_binary=True)).encode()
    return text + tail, len(text)


def _document(request: Request, inputs: list[Any], *, is_binary: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"id": request.id} if request.id else {}
    document["inputs"] = inputs
    parameters = dict(request.parameters)
    if request.outputs:
        extra = {"binary_data": True} if is_binary else {}
        document["outputs"] = [{"name": name, "parameters": {**extra, **rest}} for name, rest in request.outputs]
    elif is_binary:
        parameters["binary_data_output"] = True
    if parameters:
        document["parameters"] = parameters
    return document


def as_message(request: Request, case: Case, *, is_typed: bool) -> Any:
    """A `ModelInferRequest` with raw or typed contents."""
    message = service_pb2.ModelInferRequest(model_name=case.model, model_version=case.version, id=request.id)
    for entry in request.inputs:
        pb = message.inputs.add(name=entry.name, datatype=entry.datatype, shape=entry.shape)
        if not is_typed:
            if entry.data is None:
                return None
            message.raw_input_contents.append(entry.data)
            continue
        field = _CONTENTS.get(entry.datatype)
        if field is None or entry.values is None:
            return None
        values = (
            [value.encode("utf-8", "surrogatepass") for value in entry.values] if field == "bytes" else entry.values
        )
        try:
            getattr(pb.contents, f"{field}_contents").extend(values)
        except (ValueError, TypeError):
            return None
    if is_typed and not message.inputs:
        return None
    _set(message.parameters, request.parameters)
    for name, parameters in request.outputs:
        _set(message.outputs.add(name=name).parameters, parameters)
    return message


def _set(pb: Any, parameters: Mapping[str, Any]) -> None:
    fields = {bool: "bool_param", str: "string_param", float: "double_param", int: "int64_param"}
    for key, value in parameters.items():
        field = "uint64_param" if type(value) is int and value > _INT64_MAX else fields[type(value)]
        setattr(pb[key], field, value)


def as_arrays(request: Request) -> Arrays | None:
    """Arrays by name, for a handle: each with the shape and datatype it has, and nothing beside names of outputs."""
    arrays: Arrays = {}
    for entry in request.inputs:
        if entry.name in arrays or entry.data is None:
            return None
        try:
            arrays[entry.name] = Tensor(entry.name, entry.datatype, tuple(entry.shape), entry.data).to_numpy()
        except Exception:  # no array is like that
            return None
    return None if any(parameters for _, parameters in request.outputs) else arrays


def with_sequence(body: bytes, header_length: int | None, sequence_id: str) -> tuple[bytes, int | None]:
    """The body with `UNIQUE` replaced, and its header length."""
    replaced = body.replace(json.dumps(UNIQUE).encode(), json.dumps(sequence_id).encode())
    return replaced, None if header_length is None else header_length + len(replaced) - len(body)
