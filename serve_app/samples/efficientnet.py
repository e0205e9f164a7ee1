"""EfficientNet-Lite0 as ONNX, from its published weights.

The architecture is in the EfficientNet-Lite repository of TensorFlow TPU models: MBConv blocks without
squeeze-and-excitation, ReLU6 throughout, stem and head of fixed width. Batch normalisation is folded into the
convolution before it, in double precision, so that the file holds convolutions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from serve_app.samples.onnx_graph import FLOAT, OnnxGraph
from serve_app.samples.torch_checkpoint import read_checkpoint

IMAGE_SIZE = 224
NUM_CLASSES = 1000
BATCH_NORM_EPSILON = 1e-3

# (blocks, kernel, stride of the first, expansion), from the table of EfficientNet-B0.
STAGES = [(1, 3, 1, 1), (2, 3, 2, 6), (2, 5, 2, 6), (3, 3, 2, 6), (3, 5, 1, 6), (4, 5, 2, 6), (1, 3, 1, 6)]

Weights = Mapping[str, npt.NDArray[Any]]


def build_efficientnet(checkpoint: bytes) -> bytes:
    """The ONNX file: `input` float32 `[batch, 3, 224, 224]` to `logits` float32 `[batch, 1000]`.

    Args:
        checkpoint: The `.pth` file of the weights' package.

    Raises:
        PreflightFailed: The checkpoint is not what was expected.
    """
    return _Network(read_checkpoint(checkpoint)).build()


def fold_batch_norm(weights: Weights, conv: str, norm: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Weight and bias of the convolution that does what `conv` followed by `norm` does.

    Args:
        weights: Arrays by parameter name.
        conv: Name of a convolution without bias, weight `[out, in, height, width]`.
        norm: Name of the batch normalisation over its output channels.

    Returns:
        Float32 arrays `[out, in, height, width]` and `[out]`.
    """
    weight = weights[f"{conv}.weight"].astype(np.float64)
    scale, bias, mean, variance = (
        weights[f"{norm}.{part}"].astype(np.float64) for part in ("weight", "bias", "running_mean", "running_var")
    )
    scale = scale / np.sqrt(variance + BATCH_NORM_EPSILON)
    return (weight * scale[:, None, None, None]).astype(np.float32), (bias - mean * scale).astype(np.float32)


class _Network:
    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._graph = OnnxGraph("efficientnet_lite0")
        self._size = IMAGE_SIZE

    def build(self) -> bytes:
        graph = self._graph
        image = graph.input("input", FLOAT, ["batch", 3, IMAGE_SIZE, IMAGE_SIZE])
        value = self._relu6(self._conv(image, "_conv_stem", "_bn0", kernel=3, stride=2))
        block = 0
        for num_blocks, kernel, first_stride, expansion in STAGES:
            for index in range(num_blocks):
                stride = first_stride if index == 0 else 1
                value = self._block(
                    value, f"_blocks.{block}", kernel=kernel, stride=stride, expansion=expansion, residual=index > 0
                )
                block += 1
        value = self._relu6(self._conv(value, "_conv_head", "_bn1", kernel=1))
        value = graph.node("Flatten", [graph.node("GlobalAveragePool", [value])], axis=1)
        weight = graph.constant("_fc.weight", self._weights["_fc.weight"])
        bias = graph.constant("_fc.bias", self._weights["_fc.bias"])
        graph.node("Gemm", [value, weight, bias], name="logits", transB=1)
        graph.output("logits", FLOAT, ["batch", NUM_CLASSES])
        return graph.serialize()

    def _block(self, value: str, name: str, *, kernel: int, stride: int, expansion: int, residual: bool) -> str:
        """Widen, filter each channel, narrow; only the first block of a stage changes the shape."""
        shortcut = value
        if expansion != 1:
            value = self._relu6(self._conv(value, f"{name}._expand_conv", f"{name}._bn0", kernel=1))
        value = self._relu6(
            self._conv(value, f"{name}._depthwise_conv", f"{name}._bn1", kernel=kernel, stride=stride, depthwise=True)
        )
        value = self._conv(value, f"{name}._project_conv", f"{name}._bn2", kernel=1)
        return self._graph.node("Add", [value, shortcut]) if residual else value

    def _conv(self, value: str, conv: str, norm: str, *, kernel: int, stride: int = 1, depthwise: bool = False) -> str:
        weight, bias = fold_batch_norm(self._weights, conv, norm)
        inputs = [
            value,
            self._graph.constant(f"{conv}.weight", weight),
            self._graph.constant(f"{conv}.bias", bias),
        ]
        before, after = self._padding(kernel, stride)
        self._size = -(-self._size // stride)
        return self._graph.node(
            "Conv",
            inputs,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[before, before, after, after],
            group=len(weight) if depthwise else 1,
        )

    def _padding(self, kernel: int, stride: int) -> tuple[int, int]:
        """TensorFlow's SAME padding, where the odd pixel goes to the right and the bottom."""
        total = max((-(-self._size // stride) - 1) * stride + kernel - self._size, 0)
        return total // 2, total - total // 2

    def _relu6(self, value: str) -> str:
        return self._graph.node("Clip", [value, self._graph.scalar(0.0), self._graph.scalar(6.0)])
