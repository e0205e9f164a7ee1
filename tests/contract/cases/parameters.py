"""Parameters of requests, inputs and outputs; classification among them."""

from __future__ import annotations

from typing import Any

from tests.contract.case import Theme, tensor
from tests.contract.differences import CLASS_ZERO, ENDS_TRITON, MALFORMED, SHARED_MEMORY, WRAPS

T = Theme()
X = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0.1, 0.4, 0.2, 0.3]}]

T.one("parameters", "FP32", [1], [1], parameters={"i": 1, "b": True, "s": "x", "d": 1.5, "n": -(2**63)})
T.one("known parameters", "FP32", [1], [1], parameters={"priority": 1, "timeout": 10**7, "sequence_id": 5})
T.one("reserved parameter", "FP32", [1], [1], parameters={"triton_x": 1})
T.one("array as parameter", "FP32", [1], [1], parameters={"x": [1]})
T.one("null as parameter", "FP32", [1], [1], parameters={"x": None})
T.one("string as priority", "FP32", [1], [1], parameters={"priority": "x"}, difference=MALFORMED)
T.one("parameters is an array", "FP32", [1], [1], parameters=[], difference=MALFORMED)
T.add(
    "shared memory",
    "echo1",
    [tensor("FP32", [1], shared_memory_region="r", shared_memory_byte_size=4)],
    difference=SHARED_MEMORY,
    ours="unsupported",
)

T.one("object as parameter", "FP32", [1], [1], parameters={"x": {"y": 1}})
T.one("parameters is null", "FP32", [1], [1], parameters=None, difference=MALFORMED)
T.one("parameter beyond 64 bits", "FP32", [1], [1], parameters={"x": 2**64})
T.one("parameter beyond signed 64 bits", "FP32", [1], [1], parameters={"x": 2**63}, difference=WRAPS)
T.one("negative priority", "FP32", [1], [1], parameters={"priority": -1}, difference=MALFORMED)
T.one("large priority", "FP32", [1], [1], parameters={"priority": 2**64 - 1})
T.one("float as priority", "FP32", [1], [1], parameters={"priority": 1.5}, difference=MALFORMED)
T.one("negative timeout", "FP32", [1], [1], parameters={"timeout": -1}, difference=WRAPS)
T.one("string as timeout", "FP32", [1], [1], parameters={"timeout": "1"}, difference=MALFORMED)
T.one("float as sequence id", "FP32", [1], [1], parameters={"sequence_id": 1.5}, difference=MALFORMED)
T.one("boolean as sequence id", "FP32", [1], [1], parameters={"sequence_id": True}, difference=MALFORMED)
T.one("string sequence id, model without", "FP32", [1], [1], parameters={"sequence_id": "a", "sequence_start": True})
T.one(
    "string as sequence start",
    "FP32",
    [1],
    [1],
    parameters={"sequence_id": 1, "sequence_start": "yes"},
    difference=MALFORMED,
)
T.one("empty parameter name", "FP32", [1], [1], parameters={"": 1})
T.one("empty string as parameter", "FP32", [1], [1], parameters={"x": ""})
T.one("empty final response", "FP32", [1], [1], parameters={"triton_enable_empty_final_response": True}, is_wire=True)
T.one("number as binary_data_output", "FP32", [1], [1], parameters={"binary_data_output": 1}, difference=MALFORMED)
T.add("unknown parameter of an input", "echo1", [tensor("FP32", [1], [1], x=5)])
T.add("array as parameter of an input", "echo1", [tensor("FP32", [1], [1], x=[5])])
T.add(
    "parameters of an input are an array",
    "echo1",
    [{**tensor("FP32", [1], [1]), "parameters": [1]}],
    difference=MALFORMED,
)
T.one("unknown parameter of an output", "FP32", [1], [1], outputs=[{"name": "FP32", "parameters": {"x": 5}}])
T.one(
    "parameters of an output are an array",
    "FP32",
    [1],
    [1],
    outputs=[{"name": "FP32", "parameters": [1]}],
    difference=MALFORMED,
)
T.one(
    "output in shared memory",
    "FP32",
    [1],
    [1],
    outputs=[{"name": "FP32", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 4}}],
    is_wire=True,
    difference=SHARED_MEMORY,
    ours="unsupported",
)

# --- classification


def _classes(name: str, count: object, *, inputs: object = X, **rest: Any) -> None:
    T.add(name, "labels", inputs, outputs=[{"name": "x", "parameters": {"classification": count}}], **rest)


_classes("one class", 1)
_classes("two classes", 2)
_classes("more classes than there are", 9)
_classes("no class", 0, difference=CLASS_ZERO)
_classes("negative class", -1, difference=MALFORMED)
_classes("string as classification", "2", difference=MALFORMED)
_classes("float as classification", 1.5, difference=MALFORMED)
_classes("classes of two rows", 1, inputs=[{**X[0], "shape": [2, 4], "data": [1, 0, 0, 0, 0, 0, 1, 0]}])
_classes("classes of a tie", 4, inputs=[{**X[0], "data": [1, 1, 1, 1]}])
T.one("classes without labels", "FP32", [3], [3, 1, 2], outputs=[{"name": "FP32", "parameters": {"classification": 2}}])
T.one("classes of integers", "INT32", [3], [3, 1, 2], outputs=[{"name": "INT32", "parameters": {"classification": 2}}])
_ENDS: dict[str, Any] = {"ends_triton": True, "difference": ENDS_TRITON}
_ONE_CLASS = {"parameters": {"classification": 1}}
T.one("classes of bytes", "BYTES", [1], ["a"], outputs=[{"name": "STRING", **_ONE_CLASS}], **_ENDS)
T.one("classes of nothing", "FP32", [0], [], outputs=[{"name": "FP32", **_ONE_CLASS}], **_ENDS, ours="ok")
