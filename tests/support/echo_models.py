"""A model repository of Python models that answer with their own inputs, for comparing ourselves with a real Triton.

The models touch no array, so they work with any numpy: outputs have the inputs' names, and the very tensors of the
request become the answer.
"""

from __future__ import annotations

from pathlib import Path

ALL_TYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "BF16", "FP32", "FP64", "STRING"),
)

_MODEL = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(output_tensors=list(request.inputs())) for request in requests]
"""

_ONE_INSTANCE = "instance_group [ { count: 1 kind: KIND_CPU } ]\n"


def _tensors(types: tuple[str, ...], dims: str, *, optional: bool = False) -> str:
    suffix = " optional: true" if optional else ""
    inputs = ", ".join(f'{{ name: "{name}" data_type: TYPE_{name} dims: {dims}{suffix} }}' for name in types)
    outputs = ", ".join(f'{{ name: "{name}" data_type: TYPE_{name} dims: {dims} }}' for name in types)
    return f"input [ {inputs} ]\noutput [ {outputs} ]\n"


_PLAIN = {
    # One optional input for each datatype; a tensor is named after its datatype in the config.
    "echo1": _tensors(ALL_TYPES, "[ -1 ]", optional=True) + _ONE_INSTANCE,
    "echo2": _tensors(ALL_TYPES, "[ -1, -1 ]", optional=True) + _ONE_INSTANCE,
    "rows": "max_batch_size: 4\n" + _tensors(("FP32", "STRING", "INT32"), "[ -1 ]", optional=True) + _ONE_INSTANCE,
    "fixed": _tensors(("FP32",), "[ 2, 3 ]") + _ONE_INSTANCE,
    "raw_rows": "max_batch_size: 4\n" + _tensors(("FP32",), "[ 3 ]") + _ONE_INSTANCE,
    "raw_dynamic": _tensors(("INT16",), "[ -1, 2 ]") + _ONE_INSTANCE,
    "raw_bytes": _tensors(("STRING",), "[ 1 ]") + _ONE_INSTANCE,
    "decoupled": _tensors(("FP32",), "[ 1 ]") + _ONE_INSTANCE + "model_transaction_policy { decoupled: true }\n",
    # The rest is for the JSON of configs: as many kinds of fields as a server without GPU loads.
    "sequence": "max_batch_size: 2\n"
    + _tensors(("FP32",), "[ 1 ]")
    + _ONE_INSTANCE
    + """sequence_batching { direct { max_queue_delay_microseconds: 300 minimum_slot_utilization: 0.1 } control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0.1, 1.5 ] } ] },
  { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ] }
""",
    "wide": "max_batch_size: 4\n"
    + _tensors(("FP32",), "[ 1 ]")
    + """version_policy { specific { versions: [ 1, 2 ] } }
instance_group [ { count: 1 kind: KIND_CPU rate_limiter { resources [ { name: "R1" count: 2 } ] priority: 3 } } ]
optimization { graph { level: -1 } cuda { graphs: true output_copy_stream: true graph_spec [ { batch_size: 4
  input { key: "FP32" value { dim: [ 1 ] } }
  graph_lower_bound { batch_size: 1 input { key: "FP32" value { dim: [ 1 ] } } } } ] }
  execution_accelerators { cpu_execution_accelerator [ { name: "x" parameters { key: "k" value: "v" } } ] }
  gather_kernel_buffer_threshold: 7 eager_batching: true }
sequence_batching { max_sequence_idle_microseconds: 9000000
  oldest { max_candidate_sequences: 4 preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 300 }
  state [ { input_name: "in" output_name: "out" data_type: TYPE_FP32 dims: [ 2 ]
    initial_state { name: "z" data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } } ] }
metric_tags { key: "t" value: "v" }
cc_model_filenames { key: "7.0" value: "m" }
""",
    "queues": "max_batch_size: 4\n"
    + _tensors(("FP32",), "[ 1 ]")
    + """instance_group [ { count: 2 kind: KIND_MODEL secondary_devices [ { kind: KIND_NVDLA device_id: 3 } ] },
  { count: 1 kind: KIND_CPU name: "more" } ]
dynamic_batching { priority_levels: 3 default_priority_level: 2
  default_queue_policy { default_timeout_microseconds: 4000000000000 }
  priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 5
    allow_timeout_override: true max_queue_size: 2 } } }
batch_input [ { kind: BATCH_ELEMENT_COUNT target_name: "n" data_type: TYPE_FP32 source_input: "FP32" } ]
batch_output [ { target_name: "FP32" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "FP32" } ]
response_cache { enable: false }
parameters { key: "text" value { string_value: "\\303\\251\\n" } }
model_warmup [ { name: "w" batch_size: 2 count: 3
  inputs { key: "FP32" value { data_type: TYPE_FP32 dims: [ 1 ] random_data: true } } } ]
""",
}

_LABELS = """max_batch_size: 16
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] },
        { name: "s" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } optional: true } ]
output [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" } ]
version_policy { all { } }
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 500 }
"""

_ENSEMBLE = """platform: "ensemble"
max_batch_size: 4
input [ { name: "A" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 3 ] } ]
ensemble_scheduling { step [ { model_name: "raw_rows" model_version: -1
  input_map { key: "FP32" value: "A" } output_map { key: "FP32" value: "B" } } ] }
"""

# Business logic scripting: the model itself asks another one.
_BLS = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(pb_utils.get_input_tensor_by_name(request, "A")) for request in requests]

    def _answer(self, tensor):
        step = pb_utils.InferenceRequest(
            model_name="raw_rows",
            requested_output_names=["FP32"],
            inputs=[pb_utils.Tensor.from_dlpack("FP32", tensor.to_dlpack())],
        )
        answer = step.exec()
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        output = pb_utils.get_output_tensor_by_name(answer, "FP32")
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("B", output.to_dlpack())])
"""
_BLS_CONFIG = """backend: "python"
max_batch_size: 4
input [ { name: "A" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""

MODELS = (*_PLAIN, "labels", "ensemble")
"""All but `bls`, which asks `raw_rows` from within."""


def write_echo_models(repository: Path) -> None:
    """Write the whole repository; every model of it loads on a server without GPU."""
    for name, config in _PLAIN.items():
        _write(repository / name, 'backend: "python"\n' + config, versions=(1, 2) if name == "wide" else (1,))
    _write(repository / "labels", 'backend: "python"\n' + _LABELS + _ONE_INSTANCE, versions=(1, 3))
    (repository / "labels" / "labels.txt").write_text("a\nb\nc\nd\n", encoding="utf-8")
    _write(repository / "bls", _BLS_CONFIG + _ONE_INSTANCE, versions=(1,), model=_BLS)
    (repository / "ensemble" / "1").mkdir(parents=True)
    (repository / "ensemble" / "config.pbtxt").write_text(_ENSEMBLE, encoding="utf-8")


def _write(folder: Path, config: str, *, versions: tuple[int, ...], model: str = _MODEL) -> None:
    for version in versions:
        (folder / str(version)).mkdir(parents=True)
        (folder / str(version) / "model.py").write_text(model, encoding="utf-8")
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
