"""The built sample models give the known answers when ONNX Runtime runs them directly."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest

from serve_app.samples.catalog import MODEL_FILE
from tests.support import sample_inputs

needs_samples = pytest.mark.skipif(not sample_inputs.are_samples_built(), reason=sample_inputs.NOT_BUILT)

Arrays = Mapping[str, npt.NDArray[Any]]


@functools.cache
def _session(model_name: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # a refused request is an expected error
    path = sample_inputs.MODEL_REPOSITORY / model_name / MODEL_FILE
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_model(model_name: str, inputs: Arrays) -> Arrays:
    """One call of ONNX Runtime; inputs and outputs by name."""
    session = _session(model_name)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def assert_batched_equals_single(model_name: str, inputs: Arrays, *, atol: float) -> None:
    """A batch's rows are what each of them gets alone."""
    together = run_model(model_name, inputs)
    rows = len(next(iter(inputs.values())))
    for row in range(rows):
        alone = run_model(model_name, {name: value[row : row + 1] for name, value in inputs.items()})
        for name, value in alone.items():
            np.testing.assert_allclose(together[name][row : row + 1], value, rtol=0, atol=atol)


def test_digits_reads_the_first_items_right() -> None:
    """Items 0 to 4 are read right, and no fewer than 98 % of the whole data set (training data included)."""
    pixels, labels = sample_inputs.digits()
    answers = run_model("digits", {"pixels": pixels})
    assert answers["label"].shape == (len(labels), 1)
    assert answers["label"][:5, 0].tolist() == [0, 1, 2, 3, 4]
    assert np.mean(answers["label"][:, 0] == labels) > 0.98
    np.testing.assert_allclose(answers["probabilities"].sum(axis=1), 1.0, atol=1e-5)


def test_digits_batched_equals_one_by_one() -> None:
    """The company in a batch does not change a row's answer."""
    assert_batched_equals_single("digits", {"pixels": sample_inputs.digits()[0][:64]}, atol=1e-6)


def test_identity_answers_with_its_input() -> None:
    """Any width, bit for bit, NaN and infinities included."""
    rows = np.array([[1.5, np.nan, np.inf], [-0.0, -np.inf, 3e38]], np.float32)
    answer = run_model("identity", {"INPUT0": rows})["OUTPUT0"]
    assert answer.tobytes() == rows.tobytes()


@needs_samples
def test_coffee_is_espresso() -> None:
    """The picture of a cup of coffee is an espresso with the probability known from the published weights."""
    logits = run_model("efficientnet", {"input": sample_inputs.image_tensor("coffee.png")[None]})["logits"]
    probabilities = sample_inputs.to_probabilities(logits)[0]
    assert sample_inputs.class_name(int(probabilities.argmax())) == "espresso"
    assert probabilities[sample_inputs.ESPRESSO] == pytest.approx(sample_inputs.ESPRESSO_PROBABILITY, abs=2e-3)


@needs_samples
def test_chelsea_is_a_cat() -> None:
    """The three likeliest classes of the cat's picture are cats."""
    logits = run_model("efficientnet", {"input": sample_inputs.image_tensor("chelsea.png")[None]})["logits"]
    best = set(logits[0].argsort()[-3:].tolist())
    assert best == sample_inputs.CAT_CLASSES
    assert all("cat" in sample_inputs.class_name(index) for index in best)


@needs_samples
def test_efficientnet_batched_equals_one_by_one() -> None:
    """The company in a batch does not change a picture's logits."""
    pictures = [sample_inputs.image_tensor(name) for name in ("coffee.png", "chelsea.png", "rocket.jpg")]
    assert_batched_equals_single("efficientnet", {"input": np.stack(pictures)}, atol=1e-5)


@needs_samples
def test_minilm_finds_the_nearest_line() -> None:
    """The sentence nearest in meaning is found, with the similarity known from the published weights."""
    lines = run_model("minilm", sample_inputs.tokenize(sample_inputs.zen_lines()))["sentence_embedding"]
    question = run_model("minilm", sample_inputs.tokenize([sample_inputs.QUESTION]))["sentence_embedding"][0]
    line, similarity = sample_inputs.nearest_line(question, lines)
    assert line == sample_inputs.NEAREST_LINE
    assert similarity == pytest.approx(sample_inputs.NEAREST_SIMILARITY, abs=1e-3)
    np.testing.assert_allclose(np.linalg.norm(lines, axis=1), 1.0, atol=1e-5)


@needs_samples
def test_minilm_padding_changes_nothing() -> None:
    """A sentence has one embedding, whether it is padded to a longer one's length or alone."""
    lines = sample_inputs.zen_lines()
    together = run_model("minilm", sample_inputs.tokenize(lines))["sentence_embedding"]
    for line, embedding in zip(lines, together, strict=True):
        alone = run_model("minilm", sample_inputs.tokenize([line]))["sentence_embedding"][0]
        np.testing.assert_allclose(alone, embedding, rtol=0, atol=1e-6)


@needs_samples
def test_minilm_refuses_more_tokens_than_it_has_positions() -> None:
    """512 tokens pass; with 513 the run fails instead of answering with something wrong."""
    longest = np.ones((1, 512), np.int64)
    assert run_model("minilm", {"input_ids": longest, "attention_mask": longest})["sentence_embedding"].shape == (
        1,
        384,
    )
    too_long = np.ones((1, 513), np.int64)
    with pytest.raises(Exception, match="512 by 513"):
        run_model("minilm", {"input_ids": too_long, "attention_mask": too_long})


@needs_samples
def test_minilm_without_any_token_is_zero() -> None:
    """A mask that keeps nothing gives zeros, not NaN."""
    answer = run_model("minilm", {"input_ids": np.ones((1, 3), np.int64), "attention_mask": np.zeros((1, 3), np.int64)})
    assert not answer["sentence_embedding"].any()
