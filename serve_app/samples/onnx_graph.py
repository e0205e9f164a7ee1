"""Builds ONNX models node by node, so that the samples need neither PyTorch nor its exporter.

The bytes depend on the graph and the weights alone: every version number that `onnx` would fill in by itself is
set here, names are counted, and protobuf writes fields in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

IR_VERSION = 8
"""Read by every ONNX Runtime since 1.12; Triton 24.10 has 1.19."""

OPSET_VERSION = 17
"""The first opset with `LayerNormalization`."""

FLOAT: int = onnx.TensorProto.FLOAT
INT64: int = onnx.TensorProto.INT64

Dim = int | str


class OnnxGraph:
    """A graph under construction; values are referred to by their names.

    Args:
        name: Name of the graph in the file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._nodes: list[onnx.NodeProto] = []

    def __repr__(self) -> str:
        return f"<OnnxGraph {self._name!r}: {len(self._nodes)} nodes, {len(self._initializers)} constants>"

    def input(self, name: str, elem_type: int, shape: Sequence[Dim]) -> str:
        """Declare an input; a string in `shape` is a dimension that may vary."""
        self._inputs.append(helper.make_tensor_value_info(name, elem_type, list(shape)))
        return name

    def output(self, name: str, elem_type: int, shape: Sequence[Dim]) -> None:
        """Declare the value `name` an output of the model."""
        self._outputs.append(helper.make_tensor_value_info(name, elem_type, list(shape)))

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        """Store an array in the file under `name`; its dtype is kept, its bytes are copied."""
        if name in self._initializers:
            raise ValueError(f"constant {name!r} is there already")
        self._initializers[name] = numpy_helper.from_array(value, name)
        return name

    def int64s(self, *values: int) -> str:
        """A constant vector of int64, stored once however often it is asked for."""
        name = "int64s_" + "_".join(str(value).replace("-", "minus") for value in values)
        if name not in self._initializers:
            self.constant(name, np.array(values, np.int64))
        return name

    def scalar(self, value: float) -> str:
        """A constant float32 scalar, stored once however often it is asked for."""
        name = f"scalar_{value!r}"
        if name not in self._initializers:
            self.constant(name, np.array(value, np.float32))
        return name

    def node(self, op_type: str, inputs: Sequence[str], *, name: str = "", **attributes: Any) -> str:
        """Append a node of one output.

        Args:
            op_type: Operator of the default domain.
            inputs: Names of its inputs; an empty name leaves an optional one out.
            name: Name of its output; counted when not given.
            attributes: The operator's attributes.

        Returns:
            Name of the output.
        """
        output = name or f"{op_type}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op_type, list(inputs), [output], name=output, **attributes))
        return output

    def serialize(self) -> bytes:
        """The checked model file.

        Raises:
            onnx.checker.ValidationError: The graph is not valid ONNX.
            onnx.shape_inference.InferenceError: The shapes of the graph contradict each other.
        """
        graph = helper.make_graph(
            self._nodes, self._name, self._inputs, self._outputs, initializer=list(self._initializers.values())
        )
        model = helper.make_model(
            graph,
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET_VERSION)],
            producer_name="serve_app.samples",
        )
        onnx.checker.check_model(model, full_check=True)
        return model.SerializeToString(deterministic=True)
