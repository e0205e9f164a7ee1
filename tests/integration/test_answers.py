"""Real models give their known answers on every way in, the same ones that onnxruntime gives by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from tests.support import sample_inputs
from tests.support.stack import Stack
from tests.support.ways_in import WAYS_IN, WayIn

pytestmark = pytest.mark.integration

Arrays = Mapping[str, npt.NDArray[Any]]


def directly(model: str, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """What onnxruntime says, with nothing of ours in between."""
    session = onnxruntime.InferenceSession(
        sample_inputs.MODEL_REPOSITORY / model / "1" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


@pytest.fixture(params=WAYS_IN, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> WayIn:
    """One of the ways in."""
    chosen: WayIn = request.param
    return chosen


def test_coffee_is_espresso_and_chelsea_a_cat(stack: Stack, way: WayIn) -> None:
    """EfficientNet-Lite0 names both pictures, batched, as it does one by one and without us."""
    images = np.stack([sample_inputs.image_tensor("coffee.png"), sample_inputs.image_tensor("chelsea.png")])
    answer = way(stack, "efficientnet", {"input": images})
    probabilities = sample_inputs.to_probabilities(answer["logits"])
    assert int(probabilities[0].argmax()) == sample_inputs.ESPRESSO
    assert probabilities[0].max() == pytest.approx(sample_inputs.ESPRESSO_PROBABILITY, abs=0.005)
    assert set(np.argsort(probabilities[1])[-3:].tolist()) == sample_inputs.CAT_CLASSES
    np.testing.assert_allclose(answer["logits"], directly("efficientnet", {"input": images})["logits"], atol=1e-5)


def test_digits_are_read(stack: Stack, way: WayIn) -> None:
    """The first five digits of the set, label and probabilities."""
    pixels, labels = sample_inputs.digits()
    answer = way(stack, "digits", {"pixels": pixels[:5]})
    assert answer["label"].ravel().tolist() == labels[:5].tolist() == [0, 1, 2, 3, 4]
    expected = directly("digits", {"pixels": pixels[:5]})
    np.testing.assert_allclose(answer["probabilities"], expected["probabilities"], atol=1e-5)


def test_the_nearest_line_of_the_zen(stack: Stack, way: WayIn) -> None:
    """all-MiniLM-L6-v2 finds the sentence that means the same; `[rows, tokens]` are both dynamic."""
    lines = sample_inputs.zen_lines()
    tokens = sample_inputs.tokenize(lines)
    answer = way(stack, "minilm", tokens)["sentence_embedding"]
    question = way(stack, "minilm", sample_inputs.tokenize([sample_inputs.QUESTION]))["sentence_embedding"]
    line, similarity = sample_inputs.nearest_line(question[0], answer)
    assert line == sample_inputs.NEAREST_LINE
    assert similarity == pytest.approx(sample_inputs.NEAREST_SIMILARITY, abs=0.001)
    np.testing.assert_allclose(answer, directly("minilm", tokens)["sentence_embedding"], atol=1e-5)
