"""Bodies of Triton's control calls over HTTP, as the protobufs of the same calls over gRPC, and back."""

from __future__ import annotations

import base64
import re
from typing import Any

import orjson
from tritonclient.grpc import service_pb2

from serve_app.errors import InvalidRequest

# Triton's type of each log setting; over gRPC a value of another type is taken for a zero.
_LOG_SETTINGS: dict[str, tuple[type, str]] = {
    "log_file": (str, "string_param"),
    "log_info": (bool, "bool_param"),
    "log_warning": (bool, "bool_param"),
    "log_error": (bool, "bool_param"),
    "log_verbose_level": (int, "uint32_param"),
    "log_format": (str, "string_param"),
}
# In the order in which Triton prints them.
_TRACE_SETTINGS = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode")

# What no path of ours has: control characters, and what is a separator elsewhere.
_NO_PATH = re.compile(r"[\x00-\x1f\x7f\\]")
_MAX_PATH_BYTES = 512

_MAX_UINT32, _MAX_UINT64 = 2**32 - 1, 2**64 - 1


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; an empty body is an empty object.

    Raises:
        InvalidRequest: It is something else.
    """
    if not body.strip():
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict):
        raise InvalidRequest("body", "something else", "an empty body or a JSON object")
    return document


# --- the model repository -----------------------------------------------------------------------------------


def decode_load(body: bytes, model_name: str, *, repository_name: str = "") -> Any:
    """`RepositoryModelLoadRequest` from the body of a load.

    Raises:
        InvalidRequest: A parameter that loading does not have, or not of its type.
    """
    message = service_pb2.RepositoryModelLoadRequest(repository_name=repository_name, model_name=model_name)
    for name, value in _parameters_of(body).items():
        field = f"parameters[{name[:64]!r}]"
        if name == "config":
            message.parameters[name].string_param = _text(field, value, "a model configuration as a JSON string")
        elif name.startswith("file:"):
            message.parameters[name].bytes_param = _base64(field, value)
        else:
            raise InvalidRequest("parameters", repr(name[:64]), "'config' and 'file:<path>'")
    return message


def check_file_paths(message: Any) -> None:
    """Refuse a load whose files would not lie inside the model's own folder.

    Args:
        message: `RepositoryModelLoadRequest`, from any way in.

    Raises:
        InvalidRequest: A path that is absolute, goes up, or is none.
    """
    for name in message.parameters:
        path = name.removeprefix("file:")
        if path == name:
            continue
        is_inside = not _NO_PATH.search(path) and not any(part in ("", ".", "..") for part in path.split("/"))
        if not is_inside or len(path.encode(errors="replace")) > _MAX_PATH_BYTES:
            raise InvalidRequest("parameters", repr(name[:64]), "'file:<path>' with a path inside the model's folder")


def decode_unload(body: bytes, model_name: str, *, repository_name: str = "") -> Any:
    """`RepositoryModelUnloadRequest` from the body of an unload; parameters it does not have are ignored, as in Triton.

    Raises:
        InvalidRequest: `unload_dependents` is not a boolean.
    """
    message = service_pb2.RepositoryModelUnloadRequest(repository_name=repository_name, model_name=model_name)
    value = _parameters_of(body).get("unload_dependents")
    if value is not None:
        if not isinstance(value, bool):
            raise InvalidRequest("parameters['unload_dependents']", _kind(value), "true or false")
        message.parameters["unload_dependents"].bool_param = value
    return message


def _parameters_of(body: bytes) -> dict[str, Any]:
    parameters = parse_object(body).get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidRequest("parameters", _kind(parameters), "a JSON object")
    return parameters


def _text(field: str, value: Any, expected: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(field, _kind(value), expected)
    return value


def _base64(field: str, value: Any) -> bytes:
    try:
        return base64.b64decode(_text(field, value, "a file in base64"), validate=True)
    except ValueError:  # binascii's error is one, and so is what it raises where there is more than ASCII
        raise InvalidRequest(field, "a string that is not base64", "a file in base64") from None


def _kind(value: Any) -> str:
    return {dict: "an object", list: "an array", type(None): "null"}.get(type(value), f"a {type(value).__name__}")


# --- shared memory ------------------------------------------------------------------------------------------


def decode_region(body: bytes, name: str) -> Any:
    """`SystemSharedMemoryRegisterRequest` from the body of a registration.

    Raises:
        InvalidRequest: `key` or `byte_size` is missing, or a value is of another type.
    """
    document = parse_object(body)
    key = _text("key", document.get("key"), "the key of POSIX shared memory")
    sizes = {}
    for field in ("offset", "byte_size"):
        value = document.get(field, 0 if field == "offset" else None)
        if type(value) is not int or not 0 <= value <= _MAX_UINT64:
            raise InvalidRequest(field, _kind(value), "a non-negative integer of 64 bits")
        sizes[field] = value
    return service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=key, **sizes)


def regions_json(pb: Any) -> list[dict[str, Any]]:
    """A `SystemSharedMemoryStatusResponse` as Triton prints it, in the order of the names."""
    keys = ("name", "key", "offset", "byte_size")
    return [{key: getattr(region, key) for key in keys} for _, region in sorted(pb.regions.items())]


# --- trace and log settings -----------------------------------------------------------------------------------


def decode_trace_setting(body: bytes, model_name: str = "") -> Any:
    """`TraceSettingRequest` from a body: strings, or arrays of strings; null puts a setting back to its default.

    Raises:
        InvalidRequest: A value is of another type.
    """
    message = service_pb2.TraceSettingRequest(model_name=model_name)
    for name, value in parse_object(body).items():
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in values):
            raise InvalidRequest(repr(name[:64]), _kind(value), "a string, an array of strings, or null")
        message.settings[name].value.extend(values)
    return message


def trace_setting_json(pb: Any) -> dict[str, Any]:
    """A `TraceSettingResponse` as Triton prints it."""
    names = [name for name in _TRACE_SETTINGS if name in pb.settings]
    names += sorted(set(pb.settings) - set(names))
    values = {name: list(pb.settings[name].value) for name in names}
    return {name: value if name == "trace_level" else ",".join(value) for name, value in values.items()}


def decode_log_settings(body: bytes) -> Any:
    """`LogSettingsRequest` from a body; settings that Triton does not have are ignored, as there.

    Raises:
        InvalidRequest: A value is not of the setting's type.
    """
    message = service_pb2.LogSettingsRequest()
    for name, value in parse_object(body).items():
        if name in _LOG_SETTINGS:
            kind, field = _LOG_SETTINGS[name]
            if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= _MAX_UINT32):
                expected = {bool: "true or false", int: f"an integer from 0 to {_MAX_UINT32}", str: "a string"}[kind]
                raise InvalidRequest(repr(name), str(value) if type(value) is int else _kind(value), expected)
            setattr(message.settings[name], field, value)
    return message


def log_settings_json(pb: Any) -> dict[str, Any]:
    """A `LogSettingsResponse` as Triton prints it."""
    names = [name for name in _LOG_SETTINGS if name in pb.settings]
    names += sorted(set(pb.settings) - set(names))
    return {name: getattr(pb.settings[name], pb.settings[name].WhichOneof("parameter_choice")) for name in names}
