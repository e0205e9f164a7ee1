"""Serves ONNX models through the python backend where Triton has no native `onnxruntime` backend.

Triton runs this file in a stub process per model instance, for every model whose config says `backend: "onnxruntime"`
or `platform: "onnxruntime_onnx"`; the same repository runs on the native backend where there is one. It imports
nothing of ours. Parameters of the config are those of the native backend: `intra_op_thread_count` (1 by default:
instances and batches are what runs in parallel) and `inter_op_thread_count`.
"""

import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils

DATATYPES = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(string)": "TYPE_STRING",
}
"""Triton's name of each ONNX type that numpy can hold (BF16 it cannot)."""

DEFAULT_MAX_BATCH_SIZE = 4
"""What the native backend puts into a config that leaves it out, for graphs with a dynamic first dimension."""

MAX_REASON = 300
"""Characters of onnxruntime's reason that go into an answer."""


class TritonPythonModel:
    """One instance of one ONNX model."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        """Fill in what the config leaves out, from the graph."""
        config = auto_complete_model_config.as_dict()
        session = open_session(model_path(config), {}, providers=["CPUExecutionProvider"])
        tensors = [*session.get_inputs(), *session.get_outputs()]
        is_bare = not config["input"] and not config["output"]
        can_batch = all(tensor.shape and not isinstance(tensor.shape[0], int) for tensor in tensors)
        if is_bare and can_batch and config["max_batch_size"] == 0:
            auto_complete_model_config.set_max_batch_size(DEFAULT_MAX_BATCH_SIZE)
        max_batch_size = auto_complete_model_config.as_dict()["max_batch_size"]
        if max_batch_size > 1 and "sequence_batching" not in config:
            auto_complete_model_config.set_dynamic_batching()
        named = {tensor["name"] for tensor in [*config["input"], *config["output"]]}
        for tensor in session.get_inputs():
            if tensor.name not in named:
                auto_complete_model_config.add_input(describe(tensor, max_batch_size))
        for tensor in session.get_outputs():
            if tensor.name not in named:
                auto_complete_model_config.add_output(describe(tensor, max_batch_size))
        return auto_complete_model_config

    def initialize(self, args):
        """Open the session, and refuse a config that the graph cannot meet."""
        config = json.loads(args["model_config"])
        self.name = args["model_name"]
        self.can_batch = config["max_batch_size"] > 0
        self.session = open_session(
            model_path(config), config.get("parameters", {}), providers=providers_for(args, self.name)
        )
        self.inputs = {tensor.name: tensor for tensor in session_inputs(self.session)}
        self.optional = {tensor.name for tensor in self.session.get_overridable_initializers()}
        self.outputs = [output["name"] for output in config["output"]]
        self.scalar_dims = {
            output["name"]: [1] * len(output["dims"]) for output in config["output"] if not output.get("reshape")
        }
        if any(output["data_type"] == "TYPE_STRING" for output in config["output"]):
            check_strings(self.name)
        check_tensors(self.name, config["input"], self.inputs)
        check_tensors(self.name, config["output"], {t.name: t for t in self.session.get_outputs()})

    def execute(self, requests):
        """Answer every request by itself: requests of equal shape run together, a failure stays with who caused it."""
        answers = [None] * len(requests)
        groups = {}
        for index, request in enumerate(requests):
            if request.is_cancelled():
                answers[index] = failure("the request was cancelled", pb_utils.TritonError.CANCELLED)
                continue
            try:
                feed = self.feed_of(request)
            except ValueError as problem:
                answers[index] = failure(str(problem), pb_utils.TritonError.INVALID_ARG)
                continue
            wanted = tuple(name for name in self.outputs if name in request.requested_output_names())
            if self.can_batch:
                key = (wanted, *sorted((name, array.dtype.str, array.shape[1:]) for name, array in feed.items()))
            else:
                key = index
            groups.setdefault(key, []).append((index, feed, wanted))
        for group in groups.values():
            for (index, _, _), answer in zip(group, self.run_group(group), strict=True):
                answers[index] = answer
        return answers

    def finalize(self):
        """Let go of the session and its memory."""
        self.session = None

    def feed_of(self, request):
        """Arrays by input name; a `ValueError` says what is wrong with the request."""
        feed = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        for name in self.inputs:
            if name not in feed and name not in self.optional:
                raise ValueError(f"input {name!r} is missing")
        for name, array in feed.items():
            if array.dtype == np.object_:
                feed[name] = decode_strings(name, array)
        return feed

    def run_group(self, group):
        """Answers to requests that may run together, in their order."""
        if len(group) > 1:
            rows = [next(iter(feed.values())).shape[0] for _, feed, _ in group]
            joint = {name: np.concatenate([feed[name] for _, feed, _ in group]) for name in group[0][1]}
            try:
                arrays = self.run(joint, group[0][2])
            except Exception:  # noqa: BLE001 - whatever it is, the requests are tried one by one
                arrays = None
            if arrays is not None and all(array.ndim > 0 and array.shape[0] == sum(rows) for array in arrays):
                bounds = np.cumsum(rows)[:-1]
                parts = [np.split(array, bounds) for array in arrays]
                return [self.answer(group[0][2], [part[i] for part in parts]) for i in range(len(group))]
        answers = []
        for _, feed, wanted in group:
            try:
                answers.append(self.answer(wanted, self.run(feed, wanted)))
            except Exception as problem:  # noqa: BLE001 - onnxruntime's errors have no common class
                answers.append(failure(f"onnxruntime: {first_line(problem)}", pb_utils.TritonError.INTERNAL))
        return answers

    def run(self, feed, wanted):
        """Run the graph once."""
        return [np.asarray(array) for array in self.session.run(list(wanted), feed)] if wanted else []

    def answer(self, wanted, arrays):
        """A response with the arrays under their names."""
        tensors = []
        for name, array in zip(wanted, arrays, strict=True):
            if array.dtype == np.object_:
                array = encode_strings(array)
            if array.ndim == 0 and name in self.scalar_dims:
                array = array.reshape(self.scalar_dims[name])
            tensors.append(pb_utils.Tensor(name, np.ascontiguousarray(array) if array.ndim else array))
        return pb_utils.InferenceResponse(output_tensors=tensors)


def open_session(path, parameters, *, providers):
    """Open an ONNX file; errors say what to do."""
    try:
        import onnxruntime
    except ImportError as problem:
        raise RuntimeError(
            f"the onnxruntime package is not installed for {os.environ.get('PYTHONEXECUTABLE', 'this Python')} "
            f"({problem}); install it: pip install onnxruntime"
        ) from None
    if not os.path.isfile(path):
        raise RuntimeError(f"there is no file {path}")

    def threads(key):
        text = parameters.get(key, {}).get("string_value", "1")
        if not text.isdigit():
            raise RuntimeError(f"parameter {key!r} is {text!r}, expected a number of threads (0: all cores)")
        return int(text)

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads("intra_op_thread_count")
    options.inter_op_num_threads = threads("inter_op_thread_count")
    # Threads that spin while they wait take the cores from Triton and from the other instances.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=providers)


def providers_for(args, name):
    """Execution providers for an instance: CUDA on Triton's device where the instance is on a GPU."""
    if args["model_instance_kind"] != "GPU":
        return ["CPUExecutionProvider"]
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pb_utils.Logger.log_warn(
            f"model {name!r}: this onnxruntime has no CUDA support and runs on the CPU; "
            "install onnxruntime-gpu in its place"
        )
        return ["CPUExecutionProvider"]
    return [("CUDAExecutionProvider", {"device_id": int(args["model_instance_device_id"])}), "CPUExecutionProvider"]


def model_path(config):
    """The ONNX file of the version that is being loaded."""
    return os.path.join(pb_utils.get_model_dir(), config.get("default_model_filename") or "model.onnx")


def session_inputs(session):
    """Inputs of the graph, those with a default value included."""
    return [*session.get_inputs(), *session.get_overridable_initializers()]


def describe(tensor, max_batch_size):
    """A config entry for a tensor of the graph; a scalar becomes one of shape [1]."""
    if tensor.type not in DATATYPES:
        raise RuntimeError(f"tensor {tensor.name!r} is a {tensor.type}, which this backend does not carry")
    dims = [size if isinstance(size, int) and size >= 0 else -1 for size in tensor.shape]
    if max_batch_size > 0:
        dims = dims[1:]
    return {"name": tensor.name, "data_type": DATATYPES[tensor.type], "dims": dims or [1]}


def check_strings(model):
    """Refuse string outputs where the python backend cannot return them, before a request finds out."""
    if not getattr(pb_utils, "CAN_RETURN_STRINGS", True):
        raise RuntimeError(
            f"model {model!r} has a string output, which this Triton can return with numpy 1 only; numpy is "
            f"{np.__version__} (numpy 1 needs Python 3.12 or older)"
        )


def check_tensors(model, entries, tensors):
    """Compare config entries with the graph."""
    for entry in entries:
        tensor = tensors.get(entry["name"])
        if tensor is None:
            raise RuntimeError(
                f"model {model!r}: the config names {entry['name']!r}, the graph has {', '.join(sorted(tensors))}"
            )
        if DATATYPES.get(tensor.type) != entry["data_type"]:
            raise RuntimeError(
                f"model {model!r}: {entry['name']!r} is {entry['data_type']} in the config and "
                f"{DATATYPES.get(tensor.type, tensor.type)} in the graph"
            )


def decode_strings(name, array):
    """BYTES as the `str` that onnxruntime takes."""
    try:
        flat = [item.decode("utf-8") if isinstance(item, bytes) else str(item) for item in array.ravel()]
    except UnicodeDecodeError:
        raise ValueError(f"input {name!r} holds bytes that are not UTF-8, which an ONNX string must be") from None
    return object_array(flat, array.shape)


def encode_strings(array):
    """onnxruntime's `str` as BYTES."""
    flat = [item.encode("utf-8") if isinstance(item, str) else bytes(item) for item in array.ravel()]
    return object_array(flat, array.shape)


def object_array(items, shape):
    """An array of Python objects, each as it is."""
    array = np.empty(len(items), dtype=np.object_)
    array[:] = items
    return array.reshape(shape)


def failure(message, code):
    """A response that carries an error."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def first_line(problem):
    """The first line of an error's text, cut to a sane length."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:MAX_REASON]
