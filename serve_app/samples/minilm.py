"""all-MiniLM-L6-v2 as ONNX, from its published weights.

BERT with six layers, then what sentence-transformers puts behind it: the mean over the tokens that the attention
mask keeps, scaled to length 1. Token types are all zero inside, so a client sends ids and mask only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
from safetensors.numpy import load

from serve_app.samples.onnx_graph import FLOAT, INT64, OnnxGraph

NUM_LAYERS = 6
NUM_HEADS = 12
HIDDEN_SIZE = 384
HEAD_SIZE = HIDDEN_SIZE // NUM_HEADS
LAYER_NORM_EPSILON = 1e-12

MASKED_SCORE = -10000.0
"""Added to the scores of masked tokens, as BERT does; its exponential is 0 in float32, so padding changes nothing."""

Weights = Mapping[str, npt.NDArray[Any]]


def build_minilm(safetensors: bytes) -> bytes:
    """The ONNX file: `input_ids` and `attention_mask` int64 `[batch, seq]` to `sentence_embedding` `[batch, 384]`.

    The embedding is float32 and of length 1; `seq` is at most the 512 positions that the model knows.

    Args:
        safetensors: The `model.safetensors` of the weights' package.
    """
    return _Network(load(safetensors)).build()


class _Network:
    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._graph = OnnxGraph("all_minilm_l6_v2")

    def build(self) -> bytes:
        graph = self._graph
        ids = graph.input("input_ids", INT64, ["batch", "seq"])
        mask = graph.input("attention_mask", INT64, ["batch", "seq"])
        kept = graph.node("Cast", [mask], to=FLOAT)
        hidden = self._embed(ids)
        masked = graph.node("Mul", [graph.node("Sub", [graph.scalar(1.0), kept]), graph.scalar(MASKED_SCORE)])
        bias = graph.node("Unsqueeze", [masked, graph.int64s(1, 2)])
        for layer in range(NUM_LAYERS):
            name = f"encoder.layer.{layer}"
            attended = self._linear(
                self._attend(hidden, bias, f"{name}.attention.self"), f"{name}.attention.output.dense"
            )
            hidden = self._layer_norm(graph.node("Add", [attended, hidden]), f"{name}.attention.output.LayerNorm")
            widened = self._gelu(self._linear(hidden, f"{name}.intermediate.dense"))
            narrowed = self._linear(widened, f"{name}.output.dense")
            hidden = self._layer_norm(graph.node("Add", [narrowed, hidden]), f"{name}.output.LayerNorm")
        self._pool(hidden, kept)
        graph.output("sentence_embedding", FLOAT, ["batch", HIDDEN_SIZE])
        return graph.serialize()

    def _embed(self, ids: str) -> str:
        """Words, positions 0 to seq - 1, and token type 0 (added to the positions once, here)."""
        graph, weights = self._graph, self._weights
        words = graph.constant("word_embeddings", weights["embeddings.word_embeddings.weight"])
        table = weights["embeddings.position_embeddings.weight"] + weights["embeddings.token_type_embeddings.weight"][0]
        length = graph.node("Shape", [ids], start=1, end=2)
        positions = graph.node(
            "Slice", [graph.constant("position_embeddings", table), graph.int64s(0), length, graph.int64s(0)]
        )
        added = graph.node("Add", [graph.node("Gather", [words, ids]), positions])
        return self._layer_norm(added, "embeddings.LayerNorm")

    def _attend(self, hidden: str, bias: str, name: str) -> str:
        graph = self._graph
        query = self._heads(self._linear(hidden, f"{name}.query"), [0, 2, 1, 3])
        key = self._heads(self._linear(hidden, f"{name}.key"), [0, 2, 3, 1])
        value = self._heads(self._linear(hidden, f"{name}.value"), [0, 2, 1, 3])
        scores = graph.node("Div", [graph.node("MatMul", [query, key]), graph.scalar(math.sqrt(HEAD_SIZE))])
        shares = graph.node("Softmax", [graph.node("Add", [scores, bias])], axis=-1)
        mixed = graph.node("Transpose", [graph.node("MatMul", [shares, value])], perm=[0, 2, 1, 3])
        return graph.node("Reshape", [mixed, graph.int64s(0, 0, HIDDEN_SIZE)])

    def _heads(self, value: str, perm: list[int]) -> str:
        split = self._graph.node("Reshape", [value, self._graph.int64s(0, 0, NUM_HEADS, HEAD_SIZE)])
        return self._graph.node("Transpose", [split], perm=perm)

    def _linear(self, value: str, name: str) -> str:
        graph = self._graph
        weight = graph.constant(f"{name}.weight", self._weights[f"{name}.weight"].T)
        bias = graph.constant(f"{name}.bias", self._weights[f"{name}.bias"])
        return graph.node("Add", [graph.node("MatMul", [value, weight]), bias])

    def _layer_norm(self, value: str, name: str) -> str:
        scale = self._graph.constant(f"{name}.weight", self._weights[f"{name}.weight"])
        bias = self._graph.constant(f"{name}.bias", self._weights[f"{name}.bias"])
        return self._graph.node("LayerNormalization", [value, scale, bias], axis=-1, epsilon=LAYER_NORM_EPSILON)

    def _gelu(self, value: str) -> str:
        graph = self._graph
        erf = graph.node("Erf", [graph.node("Div", [value, graph.scalar(math.sqrt(2.0))])])
        scaled = graph.node("Mul", [value, graph.node("Add", [erf, graph.scalar(1.0)])])
        return graph.node("Mul", [scaled, graph.scalar(0.5)])

    def _pool(self, hidden: str, kept: str) -> None:
        """Mean over the kept tokens, divided by its own length; 0 where nothing is kept."""
        graph = self._graph
        weight = graph.node("Unsqueeze", [kept, graph.int64s(2)])
        total = graph.node("ReduceSum", [graph.node("Mul", [hidden, weight]), graph.int64s(1)], keepdims=0)
        count = graph.node("Max", [graph.node("ReduceSum", [weight, graph.int64s(1)], keepdims=0), graph.scalar(1e-9)])
        mean = graph.node("Div", [total, count])
        length = graph.node("Max", [graph.node("ReduceL2", [mean], axes=[1], keepdims=1), graph.scalar(1e-12)])
        graph.node("Div", [mean, length], name="sentence_embedding")
