"""V2 parameters: which keys and values may go on to Triton, the same for every way in."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.errors import InvalidRequest
from serve_app.protocol.messages import REGION, REGION_OFFSET, REGION_SIZE, Parameters
from serve_app.protocol.tensor import Region

INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1

RESERVED_PREFIX = "triton_"
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
"""The one reserved key that Triton accepts, and over gRPC only."""
FINAL_RESPONSE = "triton_final_response"
"""Response parameter in streams: whether it is the last one to its request."""

RESERVED_REGION_PREFIX = "serve_app."
"""Names of regions that clients can neither register nor use: those that this server may make for itself."""

_SCALARS = frozenset((bool, int, float, str))
_KNOWN: dict[str, tuple[frozenset[type], str]] = {
    "sequence_id": (frozenset((int, str)), "an integer or a string"),
    "sequence_start": (frozenset((bool,)), "true or false"),
    "sequence_end": (frozenset((bool,)), "true or false"),
    "priority": (frozenset((int,)), "a non-negative integer"),
    "timeout": (frozenset((int,)), "a non-negative integer (microseconds)"),
}


def json_type(value: object) -> str:
    """What a decoded JSON value is called in JSON; for error texts, which never carry the value itself."""
    if value is None:
        return "null"
    kind = type(value)
    return {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}.get(
        kind, "an object"
    )


def parameter_field(field: str, key: str) -> str:
    """The path of a parameter for error texts: one short line, whatever the caller's key holds."""
    return f"{field}.{key}" if len(key) <= 64 and key.isprintable() else f"{field}[{key[:64]!r}]"


def check_request_parameters(parameters: Parameters, *, field: str = "parameters", is_grpc: bool = False) -> None:
    """Check a request's parameters.

    `sequence_id`, `sequence_start`, `sequence_end`, `priority` and `timeout` have the types that Triton reads them
    with. All others are the model's own: a boolean, an integer of 64 bits, a number or a string. Only `priority` and
    `sequence_id` may be larger than a signed 64-bit integer, because Triton reads no other key as an unsigned one.

    Args:
        parameters: All of them.
        field: Their path for error texts.
        is_grpc: Whether `EMPTY_FINAL_RESPONSE` may be among them.

    Raises:
        InvalidRequest: A key that starts with `triton_`, or a value of another type or range.
    """
    for key, value in parameters.items():
        kind = type(value)
        if kind not in _SCALARS:
            wanted = "a boolean, an integer, a number or a string"
            raise InvalidRequest(parameter_field(field, key), json_type(value), wanted)
        if key.startswith(RESERVED_PREFIX) and not (is_grpc and key == EMPTY_FINAL_RESPONSE):
            wanted = f"no key that starts with {RESERVED_PREFIX!r}"
            raise InvalidRequest(parameter_field(field, key), "a reserved key", wanted)
        known = _KNOWN.get(key)
        if known is not None and kind not in known[0]:
            raise InvalidRequest(f"{field}.{key}", json_type(value), known[1])
        if kind is int:
            _check_range(key, value, field)  # type: ignore[arg-type]  # an int, as `kind` says


def _check_range(key: str, value: int, field: str) -> None:
    low = 0 if key in ("priority", "timeout", "sequence_id") else INT64_MIN
    high = UINT64_MAX if key in ("priority", "sequence_id") else INT64_MAX
    if not low <= value <= high:
        raise InvalidRequest(parameter_field(field, key), "an integer out of range", f"one between {low} and {high}")


def check_output_parameters(parameters: Parameters, *, field: str) -> None:
    """Check the parameters of a requested output.

    Raises:
        InvalidRequest: `classification` is no positive integer, a value is of no V2 type, or shared memory is named
            as `region_of` has it, or beside `classification`.
    """
    check_request_parameters(parameters, field=field)
    count = parameters.get("classification")
    if count is not None and (type(count) is not int or count < 1):
        got = f"{count}" if type(count) is int else json_type(count)
        raise InvalidRequest(f"{field}.classification", got, "a positive integer")
    if region_of(parameters, field=field) is not None and count is not None:
        raise InvalidRequest(field, f"both {REGION} and classification", "one of them")


def region_of(parameters: Mapping[str, object], *, field: str) -> Region | None:
    """Where in shared memory an input or output is; `None` when it is not.

    Whether such a region is registered, and large enough, Triton knows.

    Args:
        parameters: Of the input or output.
        field: Their path for error texts.

    Raises:
        InvalidRequest: A `shared_memory_*` parameter is of another type or range, stands without a region, or the
            region is one of this server's own.
    """
    if REGION not in parameters and REGION_SIZE not in parameters and REGION_OFFSET not in parameters:
        return None
    name = parameters.get(REGION)
    size_bytes, offset = _size_of(parameters, REGION_SIZE, field), _size_of(parameters, REGION_OFFSET, field)
    if REGION not in parameters:
        raise InvalidRequest(f"{field}.{REGION}", "nothing", "the name of a region beside its size and offset")
    if type(name) is not str or not name:
        raise InvalidRequest(f"{field}.{REGION}", "an empty string" if name == "" else json_type(name), "a string")
    check_region_name(name, field=f"{field}.{REGION}")
    if not size_bytes:
        got = "nothing" if size_bytes is None else "0"
        raise InvalidRequest(f"{field}.{REGION_SIZE}", got, "the size of the data in bytes")
    return Region(name, size_bytes, offset or 0)


def check_region_name(name: str, *, field: str) -> None:
    """Keep clients from the regions of this server.

    Raises:
        InvalidRequest: The name begins with `RESERVED_REGION_PREFIX`.
    """
    if name.startswith(RESERVED_REGION_PREFIX):
        raise InvalidRequest(field, "a reserved name", f"one that does not begin with {RESERVED_REGION_PREFIX!r}")


def _size_of(parameters: Mapping[str, object], key: str, field: str) -> int | None:
    value = parameters.get(key)
    if value is None and key not in parameters:
        return None
    if type(value) is not int or not 0 <= value <= INT64_MAX:
        got = "an integer out of range" if type(value) is int else json_type(value)
        raise InvalidRequest(f"{field}.{key}", got, "a non-negative 64-bit integer")
    return value
