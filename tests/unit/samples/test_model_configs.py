"""Every `config.pbtxt` in the repository is one that Triton accepts, with and without NVIDIA's own backend."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serve_app.samples.catalog import MODEL_FILE
from tests.support import sample_inputs

CONFIGS = sorted(sample_inputs.MODEL_REPOSITORY.glob("*/config.pbtxt"))
TYPES = {
    model_config_pb2.TYPE_FP32: onnx.TensorProto.FLOAT,
    model_config_pb2.TYPE_INT64: onnx.TensorProto.INT64,
}

each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)


def read_config(path: Path) -> model_config_pb2.ModelConfig:
    """The file as Triton's own message; unknown or mistyped fields are errors."""
    return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


def test_all_sample_models_have_a_config() -> None:
    """None is overlooked by the other tests."""
    assert {path.parent.name for path in CONFIGS} >= {"digits", "efficientnet", "identity", "minilm"}


@each_config
def test_config_is_portable(path: Path) -> None:
    """Named as its folder, one backend under both of its names, instances wherever there is room, no waiting."""
    config = read_config(path)
    assert config.name == path.parent.name
    assert (config.backend, config.platform) == ("onnxruntime", "onnxruntime_onnx")
    assert [(group.count, group.kind) for group in config.instance_group] == [
        (1, model_config_pb2.ModelInstanceGroup.KIND_AUTO)
    ]
    assert config.max_batch_size > 0
    assert config.HasField("dynamic_batching")
    assert config.dynamic_batching.max_queue_delay_microseconds == 0
    assert config.parameters["intra_op_thread_count"].string_value == "1"


@each_config
def test_labels_cover_every_class(path: Path) -> None:
    """A label file has one line for each value of its output."""
    for output in read_config(path).output:
        if output.label_filename:
            labels = (path.parent / output.label_filename).read_text(encoding="ascii").splitlines()
            assert [len(labels)] == list(output.dims)
            assert all(label.strip() == label != "" for label in labels)


@each_config
def test_config_matches_the_model(path: Path) -> None:
    """Names, types and dimensions are those of the ONNX file, which a runtime as old as Triton 24.10's can read."""
    file = path.parent / MODEL_FILE
    if not file.exists():
        pytest.skip(sample_inputs.NOT_BUILT)
    model = onnx.load(file)
    config = read_config(path)
    assert model.ir_version <= 10
    assert model.opset_import[0].version <= 21
    for declared, tensors in ((config.input, model.graph.input), (config.output, model.graph.output)):
        assert [tensor.name for tensor in tensors] == [tensor.name for tensor in declared]
        for tensor, value in zip(declared, tensors, strict=True):
            batch, *dims = value.type.tensor_type.shape.dim
            assert batch.dim_param == "batch"
            assert [dim.dim_value or -1 for dim in dims] == list(tensor.dims)
            assert value.type.tensor_type.elem_type == TYPES[tensor.data_type]
