"""Model descriptions, from Triton's protobufs, beside what a real Triton's HTTP endpoint printed."""

from __future__ import annotations

import orjson
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from serve_app.protocol.messages import ModelSpec, TensorSpec
from serve_app.protocol.model_spec import model_config_json, model_metadata_json, model_spec_from
from tests.support import golden

GOLDEN = golden.load()


def spec_of(model: str, version: str = "") -> ModelSpec:
    recorded = GOLDEN.models[model]
    metadata = service_pb2.ModelMetadataResponse.FromString(recorded.metadata_pb)
    config = model_config_pb2.ModelConfig.FromString(recorded.config_pb)
    return model_spec_from(metadata, config, version=version)


@pytest.mark.parametrize("model", GOLDEN.models)
def test_metadata_is_tritons_byte_for_byte(model: str) -> None:
    """The metadata's JSON, keys in order, is what Triton prints, the -1 of the batch dimension included."""
    recorded = GOLDEN.models[model]
    pb = service_pb2.ModelMetadataResponse.FromString(recorded.metadata_pb)
    assert orjson.dumps(model_metadata_json(pb)) == recorded.metadata


@pytest.mark.parametrize("model", GOLDEN.models)
def test_config_is_tritons(model: str) -> None:
    """The config's JSON has the same members with the same values and the same JSON types."""
    recorded = GOLDEN.models[model]
    ours = model_config_json(model_config_pb2.ModelConfig.FromString(recorded.config_pb))
    # Through text, so that 1 and "1" differ and 1 and 1.0 do not.
    assert orjson.loads(orjson.dumps(ours)) == orjson.loads(recorded.config)


def test_fields_that_older_servers_do_not_know_are_left_out_unless_set() -> None:
    """A field that the client's protobufs have and the server's do not is printed only with a value."""
    config = model_config_pb2.ModelConfig(name="e")
    config.ensemble_scheduling.step.add(model_name="a")
    assert "max_inflight_requests" not in model_config_json(config)["ensemble_scheduling"]
    config.ensemble_scheduling.max_inflight_requests = 3
    assert model_config_json(config)["ensemble_scheduling"]["max_inflight_requests"] == 3


def test_spec_of_a_batching_model() -> None:
    """Shapes include the batch dimension; versions and optional inputs are known."""
    spec = spec_of("labels")
    assert spec.inputs["x"] == TensorSpec("x", "FP32", (-1, 4))
    assert spec.inputs["s"] == TensorSpec("s", "FP32", (-1, 1), is_optional=True)
    assert spec.outputs == {"x": TensorSpec("x", "FP32", (-1, 4))}
    assert (spec.versions, spec.platform, spec.max_batch_size) == (("1", "3"), "python", 16)
    assert spec.can_merge


@pytest.mark.parametrize(
    ("model", "can_merge", "is_decoupled", "is_sequence"),
    [
        ("echo1", False, False, False),
        ("rows", True, False, False),
        ("sequence", False, False, True),
        ("decoupled", False, True, False),
        ("ensemble", True, False, False),
    ],
)
def test_only_plain_batching_models_are_merged(
    model: str, can_merge: bool, is_decoupled: bool, is_sequence: bool
) -> None:
    """Rows of several requests may be put together unless the model does not batch, streams, or keeps state."""
    spec = spec_of(model)
    assert (spec.can_merge, spec.is_decoupled, spec.is_sequence) == (can_merge, is_decoupled, is_sequence)


def test_instances_are_counted_over_groups_and_gpus() -> None:
    """A group's count is for each of its GPUs; a model without groups counts as one instance."""
    assert spec_of("queues").num_instances == 3
    assert spec_of("ensemble").num_instances == 1
    config = model_config_pb2.ModelConfig(name="m")
    config.instance_group.add(count=2, gpus=[0, 1, 2])
    config.instance_group.add(count=1)
    assert model_spec_from(service_pb2.ModelMetadataResponse(name="m"), config).num_instances == 7


def test_the_version_asked_for_is_kept() -> None:
    """The spec of one version says which."""
    assert spec_of("labels/versions/1", "1").version == "1"
    assert spec_of("labels/versions/1", "1").versions == ("1",)
