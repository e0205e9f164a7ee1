"""A small network for handwritten digits, trained on scikit-learn's own data set.

Its ONNX file is committed, for a training's last bits depend on the machine. `python -m serve_app.samples.digits
FILE` trains it anew (needs scikit-learn).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console

from serve_app.samples.onnx_graph import FLOAT, INT64, OnnxGraph

NUM_PIXELS = 64
NUM_CLASSES = 10
MAX_PIXEL = 16.0
"""Pixels are counts from 0 to 16, as in the data set; the file divides by this itself."""

HIDDEN_SIZES = (128, 64)
SEED = 0

Layer = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def train_digits() -> tuple[list[Layer], float]:
    """Train the network, 75 % of the data for training.

    Returns:
        Weight `[in, out]` and bias `[out]` of each layer for pixels from 0 to 1, and the share of the other 25 % of
        the data that it reads right.
    """
    from sklearn.datasets import load_digits  # here, for building the other samples needs no scikit-learn
    from sklearn.model_selection import train_test_split
    from sklearn.neural_network import MLPClassifier

    pixels, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels / MAX_PIXEL, labels, test_size=0.25, stratify=labels, random_state=SEED
    )
    network = MLPClassifier(HIDDEN_SIZES, alpha=1e-3, max_iter=200, random_state=SEED)
    network.fit(train_x, train_y)
    layers = list(zip(network.coefs_, network.intercepts_, strict=True))
    return layers, float(network.score(test_x, test_y))


def build_digits(layers: Sequence[Layer]) -> bytes:
    """The ONNX file: `pixels` float32 `[batch, 64]` to `label` int64 `[batch, 1]` and `probabilities` `[batch, 10]`.

    Args:
        layers: Weight `[in, out]` and bias `[out]` of each layer, for pixels from 0 to 1.
    """
    graph = OnnxGraph("digits")
    pixels = graph.input("pixels", FLOAT, ["batch", NUM_PIXELS])
    value = graph.node("Div", [pixels, graph.scalar(MAX_PIXEL)])
    for index, (weight, bias) in enumerate(layers):
        inputs = [
            value,
            graph.constant(f"layer{index}.weight", weight.astype(np.float32)),
            graph.constant(f"layer{index}.bias", bias.astype(np.float32)),
        ]
        value = graph.node("Gemm", inputs)
        if index < len(layers) - 1:
            value = graph.node("Relu", [value])
    graph.node("ArgMax", [value], name="label", axis=1, keepdims=1)
    graph.node("Softmax", [value], name="probabilities", axis=1)
    graph.output("label", INT64, ["batch", 1])
    graph.output("probabilities", FLOAT, ["batch", NUM_CLASSES])
    return graph.serialize()


def main(file: Path) -> None:
    """Train the network and write it to FILE."""
    layers, accuracy = train_digits()
    file.write_bytes(build_digits(layers))
    Console().print(f"{file}: {accuracy:.1%} of the held-out digits are read right")


if __name__ == "__main__":
    typer.run(main)
