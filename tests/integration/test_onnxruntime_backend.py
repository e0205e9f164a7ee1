"""The python-based `onnxruntime` backend inside a real tritonserver: same answers as onnxruntime, faults kept apart."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import onnx
import onnxruntime
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.fleet.runtime import TritonRuntime
from tests.support.triton_server import running_triton, write_model

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

Array = NDArray[Any]
DATATYPES = {"float32": "FP32", "float16": "FP16", "int64": "INT64", "object": "BYTES"}


def graph_bytes(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
) -> bytes:
    """A serialised model of IR 8 and opset 17, which every supported onnxruntime reads."""
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data


def mlp() -> bytes:
    """x [b, 64] to probs [b, 10]."""
    rng = np.random.default_rng(7)
    weights = {
        "w1": rng.normal(size=(64, 32)).astype("f4"),
        "b1": rng.normal(size=32).astype("f4"),
        "w2": rng.normal(size=(32, 10)).astype("f4"),
    }
    return graph_bytes(
        [
            helper.make_node("MatMul", ["x", "w1"], ["h"]),
            helper.make_node("Add", ["h", "b1"], ["h1"]),
            helper.make_node("Relu", ["h1"], ["h2"]),
            helper.make_node("MatMul", ["h2", "w2"], ["logits"]),
            helper.make_node("Softmax", ["logits"], ["probs"], axis=-1),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 64])],
        [
            helper.make_tensor_value_info("probs", TensorProto.FLOAT, ["b", 10]),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", 10]),
        ],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )


def gather() -> bytes:
    """index [b, n] into a table of 10 rows: an index beyond it makes the whole run fail."""
    table = numpy_helper.from_array(np.arange(10, dtype="f4"), "table")
    return graph_bytes(
        [helper.make_node("Gather", ["table", "index"], ["value"])],
        [helper.make_tensor_value_info("index", TensorProto.INT64, ["b", "n"])],
        [helper.make_tensor_value_info("value", TensorProto.FLOAT, ["b", "n"])],
        [table],
    )


def one_op(op: str, onnx_type: int, dims: Sequence[Any], out_dims: Sequence[Any], **attributes: Any) -> bytes:
    """x to y by one operator."""
    return graph_bytes(
        [helper.make_node(op, ["x"], ["y"], **attributes)],
        [helper.make_tensor_value_info("x", onnx_type, dims)],
        [helper.make_tensor_value_info("y", onnx_type, out_dims)],
    )


def optional_scale() -> bytes:
    """x [b, 2] times `scale`, an input with the default 3."""
    return graph_bytes(
        [helper.make_node("Mul", ["x", "scale"], ["y"])],
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 2]),
            helper.make_tensor_value_info("scale", TensorProto.FLOAT, [1]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 2])],
        [numpy_helper.from_array(np.array([3.0], "f4"), "scale")],
    )


def config(inputs: str, outputs: str, *, max_batch_size: int = 8, extra: str = "") -> str:
    """A full config; tensors as `name TYPE dims`, separated by semicolons."""

    def tensors(text: str) -> str:
        return ", ".join(
            f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] {" ".join(more)} }}'
            for name, kind, dims, *more in (item.split() for item in text.split(";"))
        )

    return (
        f'backend: "onnxruntime"\nmax_batch_size: {max_batch_size}\n'
        f"input [ {tensors(inputs)} ]\noutput [ {tensors(outputs)} ]\n"
        f"instance_group [ {{ count: 1 kind: KIND_AUTO }} ]\n{extra}\n"
    )


def write_repository(folder: Path) -> Path:
    """Every model of this file."""
    together = "dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 300000 }"
    threads = 'parameters { key: "intra_op_thread_count" value: { string_value: "2" } }'
    models = {
        "mlp": (mlp(), config("x FP32 64", "probs FP32 10;logits FP32 10", extra=threads)),
        "gather": (gather(), config("index INT64 -1", "value FP32 -1", extra=together)),
        "text": (
            one_op("Identity", TensorProto.STRING, ["b", 1], ["b", 1]),
            config("x STRING 1", "y STRING 1", extra=together),
        ),
        "half": (one_op("Neg", TensorProto.FLOAT16, ["b", 2], ["b", 2]), config("x FP16 2", "y FP16 2")),
        "total": (
            one_op("ReduceSum", TensorProto.FLOAT, [3], [], keepdims=0),
            config("x FP32 3", "y FP32 1", max_batch_size=0),
        ),
        "scale": (optional_scale(), config("x FP32 2;scale FP32 1 optional:true", "y FP32 2", max_batch_size=0)),
        "wrong": (mlp(), config("x FP64 64", "probs FP32 10")),
    }
    models["scale"] = (
        optional_scale(),
        config("x FP32 -1,2;scale FP32 1 optional:true", "y FP32 -1,2", max_batch_size=0),
    )
    for name, (data, text) in models.items():
        write_model(folder, name, config=text, files={"1/model.onnx": data})
    return folder


class Client:
    """Raw calls to one server."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.aio.insecure_channel(target)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    async def infer(self, model: str, outputs: Sequence[str] = (), **inputs: Array) -> dict[str, Array]:
        """Arrays in and out by name."""
        request = service_pb2.ModelInferRequest(model_name=model)
        for name, array in inputs.items():
            request.inputs.add(name=name, datatype=DATATYPES[array.dtype.name], shape=array.shape)
            if array.dtype == np.object_:
                raw = b"".join(len(item).to_bytes(4, "little") + item for item in array.ravel())
            else:
                raw = array.tobytes()
            request.raw_input_contents.append(raw)
        for name in outputs:
            request.outputs.add(name=name)
        answer = await self.stub.ModelInfer(request, timeout=20)
        result: dict[str, Array] = {}
        for tensor, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
            if tensor.datatype == "BYTES":
                items, offset = [], 0
                while offset < len(raw):
                    size = int.from_bytes(raw[offset : offset + 4], "little")
                    items.append(raw[offset + 4 : offset + 4 + size])
                    offset += 4 + size
                values: Array = np.array(items, dtype=object)
            else:
                values = np.frombuffer(raw, next(k for k, v in DATATYPES.items() if v == tensor.datatype))
            result[tensor.name] = values.reshape(tuple(tensor.shape))
        return result

    async def executions(self, model: str) -> int:
        """How often the backend was called for a model."""
        statistics = await self.stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name=model), timeout=5)
        return int(statistics.model_stats[0].execution_count)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Client, dict[str, str]]]:
    """One server for the file: a client, and the reasons of models that did not load."""
    repository = write_repository(tmp_path_factory.mktemp("onnx"))
    async with running_triton(repository) as supervisor:
        assert supervisor.endpoint is not None
        client = Client(supervisor.endpoint.address)
        try:
            yield client, supervisor.statistics()["reasons"]
        finally:
            await client.channel.close()


Server = tuple[Client, dict[str, str]]


async def test_answers_equal_onnxruntime(server: Server) -> None:
    """Rows of concurrent requests of different sizes come out as onnxruntime computes them, each to its caller."""
    client, _ = server
    session = onnxruntime.InferenceSession(mlp(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    batches = [rng.normal(size=(rows, 64)).astype("f4") for rows in (1, 3, 8, 2, 5, 1, 7, 4)]
    answers = await asyncio.gather(*(client.infer("mlp", x=batch) for batch in batches))
    for batch, answer in zip(batches, answers, strict=True):
        probs, logits = session.run(["probs", "logits"], {"x": batch})
        np.testing.assert_allclose(answer["probs"], probs, atol=1e-5)
        np.testing.assert_allclose(answer["logits"], logits, atol=1e-5)


async def test_only_requested_outputs_are_computed(server: Server) -> None:
    """A request that names one output gets that one, also beside requests that want others."""
    client, _ = server
    x = np.ones((1, 64), "f4")
    answers = await asyncio.gather(
        client.infer("mlp", ["logits"], x=x), client.infer("mlp", ["probs"], x=x), client.infer("mlp", x=x)
    )
    assert [set(answer) for answer in answers] == [{"logits"}, {"probs"}, {"logits", "probs"}]


async def test_a_bad_row_fails_alone(server: Server) -> None:
    """Of four requests that ran together, the one with an index out of range gets the error and the others answers."""
    client, _ = server
    before = await client.executions("gather")
    requests = [np.array([[i]], dtype="i8") for i in (1, 2, 99, 3, 4, 5, 6, 7)]
    answers = await asyncio.gather(*(client.infer("gather", index=x) for x in requests), return_exceptions=True)
    while (executions := await client.executions("gather")) == before:  # noqa: ASYNC110  # Triton tells nobody that it has counted
        await asyncio.sleep(0.01)
    assert executions == before + 1
    error = answers.pop(2)
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "onnxruntime" in str(error.details())
    assert "\n" not in str(error.details())
    assert [answer["value"].item() for answer in answers if isinstance(answer, dict)] == [1, 2, 3, 4, 5, 6, 7]


async def test_shapes_that_differ_run_apart(server: Server) -> None:
    """Requests of different lengths in one execution are not joined, and each gets its own shape back."""
    client, _ = server
    lengths = [1, 4, 2, 4, 1, 3, 2, 1]
    answers = await asyncio.gather(*(client.infer("gather", index=np.full((1, n), n, "i8")) for n in lengths))
    assert [answer["value"].tolist() for answer in answers] == [[[float(n)] * n] for n in lengths]


HAS_NUMPY_1 = np.__version__.startswith("1.")


@pytest.mark.skipif(
    not HAS_NUMPY_1, reason="Triton 24.10 returns strings with numpy 1 only; the next test refuses them"
)
async def test_strings(server: Server) -> None:
    """BYTES go through as UTF-8, empty and non-ASCII ones too; bytes that are not UTF-8 fail for their sender alone."""
    client, _ = server
    texts = [b"", "Zürich 東京".encode(), b"\xff\xfe", b"a\x00b", b"c", b"d", b"e", b"f"]
    calls = (client.infer("text", x=np.array([[text]], dtype=object)) for text in texts)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    error = answers.pop(2)
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in str(error.details())
    assert [a["y"].item() for a in answers if isinstance(a, dict)] == [t for t in texts if t != b"\xff\xfe"]


@pytest.mark.skipif(HAS_NUMPY_1, reason="with numpy 1 strings work")
async def test_strings_are_refused_with_numpy_2(server: Server) -> None:
    """A model whose answers could not be carried is not loaded, and says why."""
    _, reasons = server
    assert "numpy 1 only" in reasons["text"]


async def test_half_precision(server: Server) -> None:
    """FP16 goes in and out bit for bit."""
    client, _ = server
    x = np.array([[1.5, -65504.0]], "f2")
    np.testing.assert_array_equal((await client.infer("half", x=x))["y"], -x)


async def test_scalar_output(server: Server) -> None:
    """A graph's scalar comes out in the shape that the config gives it."""
    client, _ = server
    answer = (await client.infer("total", x=np.array([1, 2, 4], "f4")))["y"]
    assert answer.shape == (1,)
    assert answer.item() == 7.0


async def test_optional_input(server: Server) -> None:
    """An input with a default in the graph may be left out."""
    client, _ = server
    x = np.ones((1, 2), "f4")
    assert (await client.infer("scale", x=x))["y"].tolist() == [[3.0, 3.0]]
    assert (await client.infer("scale", x=x, scale=np.array([5.0], "f4")))["y"].tolist() == [[5.0, 5.0]]


async def test_a_config_that_contradicts_the_graph_is_refused(server: Server) -> None:
    """The reason names the tensor and both types; the other models are served."""
    _, reasons = server
    assert set(reasons) == {"wrong"} if HAS_NUMPY_1 else {"wrong", "text"}
    assert "'x' is TYPE_FP64 in the config and TYPE_FP32 in the graph" in reasons["wrong"]


async def test_auto_complete(tmp_path: Path) -> None:
    """A config of one line, or none, becomes the graph's: names, types, shapes, batching as the native backend does."""
    write_model(tmp_path, "mlp", config='platform: "onnxruntime_onnx"', files={"1/model.onnx": mlp()})
    total = one_op("ReduceSum", TensorProto.FLOAT, [3], [], keepdims=0)
    write_model(tmp_path, "total", config='backend: "onnxruntime"', files={"1/model.onnx": total})
    async with running_triton(tmp_path) as supervisor:
        assert supervisor.endpoint is not None
        assert supervisor.statistics()["reasons"] == {}
        client = Client(supervisor.endpoint.address)
        try:
            got = (await client.stub.ModelConfig(service_pb2.ModelConfigRequest(name="mlp"), timeout=5)).config
            assert got.max_batch_size == 4
            assert got.HasField("dynamic_batching")
            assert [(t.name, t.data_type, list(t.dims)) for t in got.input] == [("x", 11, [64])]
            assert [(t.name, list(t.dims)) for t in got.output] == [("probs", [10]), ("logits", [10])]
            assert (await client.infer("mlp", x=np.ones((4, 64), "f4")))["probs"].shape == (4, 10)
            assert (await client.infer("total", x=np.ones(3, "f4")))["y"].tolist() == [3.0]
        finally:
            await client.channel.close()


async def test_without_onnxruntime_the_reason_says_what_to_install(tmp_path: Path) -> None:
    """A Python without the package gives a model that is not ready, and a reason that a newcomer can act on."""
    repository, env = tmp_path / "repository", tmp_path / "env"
    write_model(repository, "mlp", config=config("x FP32 64", "probs FP32 10"), files={"1/model.onnx": mlp()})
    packages = env / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    for folder in (Path(np.__file__).parent, Path(np.__file__).parent.parent / "numpy.libs"):
        if folder.exists():
            (packages / folder.name).symlink_to(folder)
    (env / "bin").mkdir()
    base = Path(sys.executable).resolve()
    (env / "bin" / "python3").symlink_to(base)
    (env / "pyvenv.cfg").write_text(f"home = {base.parent}\n", encoding="utf-8")
    runtime = dataclasses.replace(TritonRuntime.find(), python_executable=env / "bin" / "python3")
    async with running_triton(repository, runtime=runtime) as supervisor:
        reason = supervisor.statistics()["reasons"]["mlp"]
    assert f"the onnxruntime package is not installed for {env}/bin/python3" in reason
    assert "pip install onnxruntime" in reason
