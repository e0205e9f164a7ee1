"""A model that answers with its input: for tests that must tell every row from every other one."""

from __future__ import annotations

from serve_app.samples.onnx_graph import FLOAT, OnnxGraph


def build_identity() -> bytes:
    """The ONNX file: `INPUT0` float32 `[batch, n]` to `OUTPUT0`, the same values."""
    graph = OnnxGraph("identity")
    graph.node("Identity", [graph.input("INPUT0", FLOAT, ["batch", "n"])], name="OUTPUT0")
    graph.output("OUTPUT0", FLOAT, ["batch", "n"])
    return graph.serialize()
