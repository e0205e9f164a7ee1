"""What Triton's protobufs say of a model: as our `ModelSpec`, and as the JSON that Triton's HTTP endpoint prints."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from serve_app.protocol.messages import ModelSpec, TensorSpec

# Fields that the protobufs of tritonclient 2.73 have and Triton 2.51 (24.10) does not: a server that does not know
# them prints nothing, so they are printed only where they are set.
_NEWER_FIELDS = frozenset(("inference.ModelEnsembling.max_inflight_requests",))

# The 64-bit integers that Triton leaves as text, as protobuf's JSON has them; it turns all others into numbers.
_TEXT_FIELDS = frozenset(
    (
        "inference.ModelInstanceGroup.SecondaryDevice.device_id",
        "inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
        "inference.ModelSequenceBatching.InitialState.dims",
    )
)


def model_spec_from(metadata_pb: Any, config_pb: Any, *, version: str = "") -> ModelSpec:
    """The spec of a model version.

    Args:
        metadata_pb: `ModelMetadataResponse`.
        config_pb: `ModelConfig` (the `config` of a `ModelConfigResponse`).
        version: The version both were asked for; empty when it was the server's choice.
    """
    optional = {tensor.name for tensor in config_pb.input if tensor.optional}
    return ModelSpec(
        name=metadata_pb.name,
        version=version,
        versions=tuple(metadata_pb.versions),
        platform=metadata_pb.platform,
        inputs={t.name: TensorSpec(t.name, t.datatype, tuple(t.shape), t.name in optional) for t in metadata_pb.inputs},
        outputs={t.name: TensorSpec(t.name, t.datatype, tuple(t.shape)) for t in metadata_pb.outputs},
        max_batch_size=config_pb.max_batch_size,
        num_instances=max(1, sum(_instances(group) for group in config_pb.instance_group)),
        is_decoupled=config_pb.model_transaction_policy.decoupled,
        is_sequence=config_pb.HasField("sequence_batching"),
    )


def _instances(group: Any) -> int:
    # `count` is for each GPU of the group.
    return int(group.count) * max(1, len(group.gpus))


def model_metadata_json(pb: Any) -> dict[str, Any]:
    """A `ModelMetadataResponse` as `GET /v2/models/{model}` prints it, keys in that order."""
    return {
        "name": pb.name,
        "versions": list(pb.versions),
        "platform": pb.platform,
        "inputs": [_tensor_json(tensor) for tensor in pb.inputs],
        "outputs": [_tensor_json(tensor) for tensor in pb.outputs],
    }


def _tensor_json(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def model_config_json(pb: Any) -> dict[str, Any]:
    """A `ModelConfig` as `GET /v2/models/{model}/config` prints it.

    Every scalar and repeated field is there, set or not; messages and members of a oneof only where they are set;
    64-bit integers are numbers but for three fields that Triton forgets. Compared with Triton 2.51.
    """
    document: dict[str, Any] = {}
    for field in pb.DESCRIPTOR.fields:
        is_list = _is_repeated(field)
        if not is_list and field.has_presence and not pb.HasField(field.name):
            continue
        value = getattr(pb, field.name)
        if field.full_name in _NEWER_FIELDS and not value:
            continue
        if not is_list:
            document[field.name] = _value_json(field, value)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"]
            document[field.name] = {str(key): _value_json(inner, value[key]) for key in value}
        else:
            document[field.name] = [_value_json(field, item) for item in value]
    return document


def _is_repeated(field: Any) -> bool:
    repeated = getattr(field, "is_repeated", None)  # protobuf 6.31 and later; `label` is deprecated there
    return bool(field.label == field.LABEL_REPEATED if repeated is None else repeated)


def _value_json(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return model_config_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if field.type == field.TYPE_FLOAT:
        return float(str(np.float32(value)))  # the fewest digits that are this float32
    if field.type == field.TYPE_BYTES:
        return base64.b64encode(value).decode("ascii")
    return str(value) if field.full_name in _TEXT_FIELDS else value
