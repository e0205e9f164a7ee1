"""The JSON shapes of V2 as JSON Schema, which the OpenAPI document refers to."""

from __future__ import annotations

from typing import Any

from serve_app.protocol.datatypes import DATATYPES

Schema = dict[str, Any]


def ref(name: str) -> Schema:
    """A reference to one of `SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Schema, *, required: tuple[str, ...] = (), text: str = "") -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    if text:
        schema["description"] = text
    return schema


def _array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


_STRING: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1}
_DATATYPE: Schema = {"type": "string", "enum": list(DATATYPES)}
_SHAPE = _array({"type": "integer", "minimum": 0}, maxItems=32)
_SCALAR: Schema = {"type": ["boolean", "integer", "number", "string"]}
_TENSOR_METADATA = _object(
    {"name": _STRING, "datatype": _STRING, "shape": _array({"type": "integer"})}, required=("name", "datatype", "shape")
)
# Of inputs and outputs alike; refused unless shared memory of clients is allowed.
_REGION: Schema = {
    "shared_memory_region": {"type": "string", "description": "The data is in this registered region."},
    "shared_memory_byte_size": {"type": "integer", "minimum": 1},
    "shared_memory_offset": {"type": "integer", "minimum": 0},
}

SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        {"error": {"type": "string", "description": "One line: what was wrong, what was expected."}},
        required=("error",),
    ),
    "Object": {"type": "object"},
    "Live": _object({"live": {"type": "boolean"}}, required=("live",)),
    "Ready": _object({"ready": {"type": "boolean"}}, required=("ready",)),
    "ModelReady": _object({"name": _STRING, "ready": {"type": "boolean"}}, required=("name", "ready")),
    "ServerMetadata": _object(
        {"name": _STRING, "version": _STRING, "extensions": _array(_STRING)}, required=("name", "version", "extensions")
    ),
    "ModelMetadata": _object(
        {
            "name": _STRING,
            "versions": _array(_STRING),
            "platform": _STRING,
            "inputs": _array(_TENSOR_METADATA),
            "outputs": _array(_TENSOR_METADATA),
        },
        required=("name", "platform", "inputs", "outputs"),
    ),
    "ModelConfig": {"type": "object", "description": "Triton's ModelConfig, as Triton prints it."},
    "Parameters": {"type": "object", "additionalProperties": _SCALAR},
    "InputTensor": _object(
        {
            "name": _NAME,
            "datatype": _DATATYPE,
            "shape": _SHAPE,
            "data": {"type": "array", "description": "Flat in row-major order, or nested as `shape` says."},
            "parameters": _object(
                {
                    "binary_data_size": {
                        "type": "integer",
                        "minimum": 0,
                        "description": "Bytes of this tensor behind the JSON, in place of `data`.",
                    },
                    **_REGION,
                }
            ),
        },
        required=("name", "datatype", "shape"),
    ),
    "RequestedOutput": _object(
        {
            "name": _NAME,
            "parameters": _object(
                {"binary_data": {"type": "boolean"}, "classification": {"type": "integer", "minimum": 1}, **_REGION}
            ),
        },
        required=("name",),
    ),
    "InferRequest": {
        **_object(
            {
                "id": _STRING,
                "parameters": ref("Parameters"),
                "inputs": _array(ref("InputTensor")),
                "outputs": _array(ref("RequestedOutput")),
            },
            required=("inputs",),
        ),
        "examples": [{"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}],
    },
    "OutputTensor": _object(
        {
            "name": _STRING,
            "datatype": _STRING,
            "shape": _array({"type": "integer"}),
            "data": {"type": "array"},
            "parameters": {"type": "object"},
        },
        required=("name", "datatype", "shape"),
    ),
    "InferResponse": _object(
        {
            "id": _STRING,
            "model_name": _STRING,
            "model_version": _STRING,
            "parameters": {"type": "object"},
            "outputs": _array(ref("OutputTensor")),
        },
        required=("model_name", "model_version", "outputs"),
    ),
    "IndexRequest": _object({"ready": {"type": "boolean", "description": "Only models that are ready."}}),
    "Index": _array(
        _object({"name": _STRING, "version": _STRING, "state": _STRING, "reason": _STRING}, required=("name",))
    ),
    "RegionRequest": _object(
        {
            "key": {"type": "string", "description": "Name of the POSIX shared memory."},
            "offset": {"type": "integer", "minimum": 0},
            "byte_size": {"type": "integer", "minimum": 1},
        },
        required=("key", "byte_size"),
    ),
    "Regions": _array(
        _object(
            {
                "name": _STRING,
                "key": _STRING,
                "offset": {"type": "integer"},
                "byte_size": {"type": "integer"},
            },
            required=("name", "key", "offset", "byte_size"),
        )
    ),
    "Statistics": _object({"model_stats": _array({"type": "object"})}, required=("model_stats",)),
    "LoadRequest": _object(
        {
            "parameters": {
                "type": "object",
                "description": "`config`: a whole ModelConfig as JSON text; `file:<path>`: a file's content in base64.",
                "additionalProperties": _SCALAR,
            }
        }
    ),
    "UnloadRequest": _object({"parameters": _object({"unload_dependents": {"type": "boolean"}})}),
    "GenerateRequest": {
        "type": "object",
        "description": "Inputs by name as scalars or arrays; other members become request parameters.",
    },
}
