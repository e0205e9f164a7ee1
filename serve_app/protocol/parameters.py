"""V2 parameters: which keys and values may go on to Triton, the same for every way in."""

from __future__ import annotations

from serve_app.errors import InvalidRequest, Unsupported
from serve_app.protocol.messages import Parameters

INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1

RESERVED_PREFIX = "triton_"
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
"""The one reserved key that Triton accepts, and over gRPC only."""
FINAL_RESPONSE = "triton_final_response"
"""Response parameter in streams: whether it is the last one to its request."""

_SHARED_MEMORY_PREFIX = "shared_memory_"
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
    with. All others are the model's own: a boolean, an integer of 64 bits, a number or a string. Only `priority` may
    be larger than a signed 64-bit integer, because Triton takes no `uint64_param` for any other key.

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
    low = 0 if key in ("priority", "timeout") else INT64_MIN
    high = UINT64_MAX if key == "priority" else INT64_MAX
    if not low <= value <= high:
        raise InvalidRequest(parameter_field(field, key), "an integer out of range", f"one between {low} and {high}")


def check_output_parameters(parameters: Parameters, *, field: str) -> None:
    """Check the parameters of a requested output.

    Raises:
        InvalidRequest: `classification` is no positive integer, or a value is of no V2 type.
    """
    check_request_parameters(parameters, field=field)
    count = parameters.get("classification")
    if count is not None and (type(count) is not int or count < 1):
        got = f"{count}" if type(count) is int else json_type(count)
        raise InvalidRequest(f"{field}.classification", got, "a positive integer")


def refuse_shared_memory(parameters: Parameters, *, field: str) -> None:
    """Refuse an input or output whose data is in shared memory.

    Raises:
        Unsupported: A `shared_memory_*` parameter is there.
    """
    for key in parameters:
        if key.startswith(_SHARED_MEMORY_PREFIX):
            raise Unsupported(
                parameter_field(f"{field}.parameters", key),
                "the model may run on another machine than the one the region is on; send the data in the request",
            )
