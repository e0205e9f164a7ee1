"""Graphs are valid, their versions are fixed, and their bytes depend on nothing but what was put in."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from serve_app.samples.efficientnet import BATCH_NORM_EPSILON, fold_batch_norm
from serve_app.samples.identity import build_identity
from serve_app.samples.onnx_graph import FLOAT, IR_VERSION, OPSET_VERSION, OnnxGraph


def test_versions_are_those_that_triton_24_10_reads() -> None:
    """IR 8 and opset 17 of the default domain, whatever release of `onnx` builds the file."""
    model = onnx.load_from_string(build_identity())
    assert (model.ir_version, IR_VERSION) == (8, 8)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", OPSET_VERSION)]
    assert not model.producer_version


def test_the_same_graph_is_the_same_bytes() -> None:
    """Two builds are equal byte for byte."""
    assert build_identity() == build_identity()


def test_constants_are_stored_once() -> None:
    """Equal scalars and index vectors share one entry; another value under a taken name is refused."""
    graph = OnnxGraph("constants")
    assert graph.scalar(0.5) == graph.scalar(0.5)
    assert graph.int64s(0, -1) == graph.int64s(0, -1) != graph.int64s(0, 1)
    assert repr(graph) == "<OnnxGraph 'constants': 0 nodes, 3 constants>"
    graph.constant("weight", np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="constant 'weight' is there already"):
        graph.constant("weight", np.ones(3, np.float32))


def test_a_graph_that_contradicts_itself_is_refused() -> None:
    """Shapes are inferred and compared before anything is written."""
    graph = OnnxGraph("wrong")
    value = graph.input("x", FLOAT, ["batch", 3])
    graph.node("MatMul", [value, graph.constant("weight", np.zeros((4, 2), np.float32))], name="y")
    graph.output("y", FLOAT, ["batch", 2])
    with pytest.raises(onnx.shape_inference.InferenceError):
        graph.serialize()


def test_folded_batch_norm_does_the_same() -> None:
    """A folded convolution gives what the convolution and its normalisation gave."""
    random = np.random.default_rng(0)
    weights = {
        "conv.weight": random.normal(size=(4, 3, 1, 1)).astype(np.float32),
        "norm.weight": random.uniform(0.5, 2, 4).astype(np.float32),
        "norm.bias": random.normal(size=4).astype(np.float32),
        "norm.running_mean": random.normal(size=4).astype(np.float32),
        "norm.running_var": random.uniform(0.1, 2, 4).astype(np.float32),
    }
    pixel = random.normal(size=3).astype(np.float32)
    plain = weights["conv.weight"][:, :, 0, 0] @ pixel
    spread = np.sqrt(weights["norm.running_var"] + BATCH_NORM_EPSILON)
    expected = (plain - weights["norm.running_mean"]) / spread * weights["norm.weight"] + weights["norm.bias"]

    weight, bias = fold_batch_norm(weights, "conv", "norm")
    assert {weight.dtype, bias.dtype} == {np.dtype(np.float32)}
    np.testing.assert_allclose(weight[:, :, 0, 0] @ pixel + bias, expected, rtol=1e-5, atol=1e-6)
