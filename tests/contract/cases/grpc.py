"""What exists over gRPC alone: messages that contradict themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from tests.contract.case import Theme
from tests.contract.differences import EMPTY_TYPED, RAW_SURPLUS, SHARED_MEMORY, UINT64

T = Theme()
_MEMORY: dict[str, Any] = {"difference": SHARED_MEMORY, "ours": "unsupported"}
Message = Any


def _infer(name: str, change: Callable[[Message], object], *, model: str = "echo1", **rest: Any) -> None:
    message = pb.ModelInferRequest(model_name=model)
    change(message)
    T.call(name, rpc=("ModelInfer", message), **rest)


def _input(message: Message, datatype: str = "FP32", shape: tuple[int, ...] = (1,), name: str = "") -> Message:
    return message.inputs.add(name=name or datatype.replace("BYTES", "STRING"), datatype=datatype, shape=shape)


def _contents(message: Message, datatype: str, field: str, values: list[Any]) -> None:
    getattr(_input(message, datatype, (len(values),)).contents, field).extend(values)


def _mixed(message: Message) -> None:
    _input(message)
    _contents(message, "INT8", "int_contents", [1])
    message.raw_input_contents.append(b"\0\0\x80\x3f")


def _both(message: Message) -> None:
    _contents(message, "FP32", "fp32_contents", [1.0])
    message.raw_input_contents.append(b"\0\0\x80\x3f")


def _raw(count: int, size: int = 4) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        _input(message)
        message.raw_input_contents.extend([b"\0" * size] * count)

    return change


_infer("raw and typed contents mixed", _mixed)
_infer("raw and typed contents for one input", _both)
_infer("no contents at all", lambda message: _input(message))
_infer("too many raw contents", _raw(2), difference=RAW_SURPLUS)
_infer("raw contents too short", _raw(1, 3))
_infer("raw contents too long", _raw(1, 5))
_infer("raw contents empty", _raw(1, 0))
_infer("contents of another datatype", lambda message: _contents(message, "FP32", "int_contents", [1]))
_infer("fp64 for fp32", lambda message: _contents(message, "FP32", "fp64_contents", [1.0]))
_infer("int64 for int32", lambda message: _contents(message, "INT32", "int64_contents", [1]))
_infer("uint for int", lambda message: _contents(message, "INT8", "uint_contents", [1]))
_infer("typed contents for fp16", lambda message: _contents(message, "FP16", "fp32_contents", [1.0]))
_infer("typed contents for bf16", lambda message: _contents(message, "BF16", "fp32_contents", [1.0]))
_infer("typed contents of nothing", lambda message: _input(message, "FP32", (0,)), difference=EMPTY_TYPED, ours="ok")
_infer("typed bytes of nothing", lambda message: _input(message, "BYTES", (0,)), difference=EMPTY_TYPED, ours="ok")


def _two_fields(message: Message) -> None:
    entry = _input(message)
    entry.contents.fp32_contents.append(1.0)
    entry.contents.int_contents.append(1)


_infer("contents of two datatypes", _two_fields)


def _parameter(**choice: Any) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        _contents(message, "INT8", "int_contents", [1])
        for name, value in choice.items():
            key, _, field = name.partition("__")
            setattr(message.parameters[key], field, value)

    return change


_infer("parameter without a value", lambda message: (_parameter()(message), message.parameters["x"]))
_infer("uint64 parameter", _parameter(x__uint64_param=5), difference=UINT64, ours="ok")
_infer("uint64 priority", _parameter(priority__uint64_param=2))
_infer("int64 priority", _parameter(priority__int64_param=2))
_infer("negative int64 priority", _parameter(priority__int64_param=-2))
_infer("string priority", _parameter(priority__string_param="2"))
_infer("uint64 timeout", _parameter(timeout__uint64_param=10_000_000), difference=UINT64, ours="ok")
_infer("double timeout", _parameter(timeout__double_param=1.0))
_infer("double parameter", _parameter(x__double_param=1.5))
_infer("bytes as sequence id", _parameter(sequence_id__bool_param=True))
_infer("empty final response by gRPC", _parameter(triton_enable_empty_final_response__bool_param=True))
_infer("reserved parameter by gRPC", _parameter(triton_x__bool_param=True))
_infer("no model name", _parameter(), model="", ours="not found")
_infer("empty message", lambda message: None)


def _output(**choice: Any) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        _contents(message, "INT8", "int_contents", [1])
        entry = message.outputs.add(name="INT8")
        for name, value in choice.items():
            key, _, field = name.partition("__")
            setattr(entry.parameters[key], field, value)

    return change


_infer("classification as a string", _output(classification__string_param="1"))
_infer("classification as uint64", _output(classification__uint64_param=1), difference=UINT64, ours="ok")
_infer("binary_data by gRPC", _output(binary_data__bool_param=True))
_infer(
    "shared memory of an output",
    _output(shared_memory_region__string_param="r", shared_memory_byte_size__int64_param=4),
    **_MEMORY,
)


def _bytes(data: bytes, count: int) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        _input(message, "BYTES", (count,))
        message.raw_input_contents.append(data)

    return change


_infer("raw bytes that are none", _bytes(b"\5\0\0\0ab", 1))
_infer("raw bytes too many", _bytes(b"\1\0\0\0a\1\0\0\0b", 1))
_infer("raw bytes cut in a length", _bytes(b"\1\0\0\0a\1\0", 2))
for _rpc, _message in (
    ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="r")),
    ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(name="r")),
):
    T.call(f"{_rpc} of no region", rpc=(_rpc, _message), **_MEMORY)
