"""What goes into the sample models and what their answers mean: pictures, sentences and digits with known answers.

Pictures and digits come with scikit-image and scikit-learn, the sentences with Python; nothing is downloaded.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from tokenizers import Tokenizer

from serve_app.samples.builder import is_built
from serve_app.samples.catalog import SAMPLES

MODEL_REPOSITORY = Path(__file__).parents[2] / "model_repository"
NOT_BUILT = "sample models are not built: run `make install`"

IMAGE_SIZE = 224
CROP_SHARE = 224 / 256
"""Share of the short side that is kept, as when the network was evaluated."""

MAX_TOKENS = 256
"""Longer texts are cut, as sentence-transformers does for this model."""

ESPRESSO = 967
ESPRESSO_PROBABILITY = 0.951
"""Of `coffee.png`."""

CAT_CLASSES = {281, 282, 285}
"""The three likeliest classes of `chelsea.png`: tabby, tiger cat, Egyptian cat."""

QUESTION = "Never ignore an error silently."
NEAREST_LINE = "Errors should never pass silently."
NEAREST_SIMILARITY = 0.861

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


@functools.cache
def are_samples_built() -> bool:
    """Whether every sample model is there, whole; the answer is kept, for it reads some 100 MB."""
    return all(is_built(sample, MODEL_REPOSITORY) for sample in SAMPLES)


def image_tensor(file_name: str) -> Float32Array:
    """A picture of scikit-image as EfficientNet-Lite0 wants it: `[3, 224, 224]`, without the batch axis.

    Args:
        file_name: `coffee.png`, `chelsea.png` or another one that is in the scikit-image wheel.
    """
    import skimage  # here, for it takes a second

    with Image.open(Path(skimage.__file__).parent / "data" / file_name) as image:
        return to_tensor(image)


def to_tensor(image: Image.Image) -> Float32Array:
    """The centre of any picture, `[3, 224, 224]` with values of about -1 to 1."""
    side = int(min(image.size) * CROP_SHARE)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    centre = image.convert("RGB").crop((left, top, left + side, top + side))
    pixels = np.asarray(centre.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC), np.float32)
    return np.ascontiguousarray(((pixels - np.float32(127)) / np.float32(128)).transpose(2, 0, 1))


def to_probabilities(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Softmax over the last axis."""
    powers: npt.NDArray[Any] = np.exp(logits - logits.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers


def class_name(class_index: int) -> str:
    """Name of an ImageNet class, from the model's `labels.txt`."""
    return (MODEL_REPOSITORY / "efficientnet" / "labels.txt").read_text(encoding="utf-8").splitlines()[class_index]


def tokenize(texts: Sequence[str]) -> dict[str, Int64Array]:
    """Inputs of `minilm` for some texts: `input_ids` and `attention_mask`, each `[texts, longest]`, padded with 0."""
    encodings = _tokenizer().encode_batch(list(texts))
    return {
        "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
        "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
    }


@functools.cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(MODEL_REPOSITORY / "minilm" / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()  # to the longest of a call; the file itself pads everything to 128
    return tokenizer


@functools.cache
def zen_lines() -> tuple[str, ...]:
    """The lines of the standard library's `this` text, title included."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this  # prints itself
    return tuple(line for line in codecs.decode(this.s, "rot13").splitlines() if line)


def nearest_line(question: npt.NDArray[Any], lines: npt.NDArray[Any]) -> tuple[str, float]:
    """The line of `zen_lines()` nearest to a question, and the cosine of the two.

    Args:
        question: Embedding `[384]`.
        lines: Embeddings `[lines, 384]` of `zen_lines()`.
    """
    similarities = lines @ question
    best = int(similarities.argmax())
    return zen_lines()[best], float(similarities[best])


@functools.cache
def digits() -> tuple[Float32Array, Int64Array]:
    """All 1,797 digits of scikit-learn: `pixels` `[items, 64]` and the right `label` of each. Do not change them."""
    from sklearn.datasets import load_digits  # here, for it takes a second

    pixels, labels = load_digits(return_X_y=True)
    return pixels.astype(np.float32), labels.astype(np.int64)
