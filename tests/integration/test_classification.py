"""Classification: the N likeliest classes with their labels, from the real network and a picture of a cup of coffee."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.support import sample_inputs
from tests.support.stack import Stack
from tests.support.ways_in import client_inputs

pytestmark = pytest.mark.integration

ESPRESSO = (sample_inputs.ESPRESSO, "espresso")


def picture() -> dict[str, Any]:
    return {"input": sample_inputs.image_tensor("coffee.png")[None]}


def parsed(text: str) -> tuple[float, int, str]:
    """Triton's `value:index:label`."""
    value, index, label = text.split(":", 2)
    return float(value), int(index), label


def check(texts: list[str]) -> None:
    """Three classes, espresso first, the values falling and each label the one of its index."""
    classes = [parsed(text) for text in texts]
    assert len(classes) == 3
    assert classes[0][1:] == ESPRESSO
    assert [value for value, _, _ in classes] == sorted((value for value, _, _ in classes), reverse=True)
    assert [label for _, _, label in classes] == [sample_inputs.class_name(index) for _, index, _ in classes]


@pytest.mark.parametrize("library", [triton_http, triton_grpc], ids=["http", "grpc"])
def test_tritons_clients_ask_for_the_three_likeliest(stack: Stack, library: Any) -> None:
    """`class_count` of both libraries; beside them the logits themselves, which agree."""
    address = stack.grpc if library is triton_grpc else stack.http
    with library.InferenceServerClient(address) as client:
        (classes,), logits = (
            client.infer("efficientnet", client_inputs(library, picture()), outputs=[wanted]).as_numpy("logits")
            for wanted in (
                library.InferRequestedOutput("logits", class_count=3),
                library.InferRequestedOutput("logits"),
            )
        )
    check([text.decode() for text in classes])
    assert parsed(classes[0].decode())[0] == pytest.approx(float(logits.max()), rel=1e-4)


def test_plain_json_asks_for_it(stack: Stack) -> None:
    """As curl would."""
    values = picture()["input"]
    document = {
        "inputs": [{"name": "input", "datatype": "FP32", "shape": list(values.shape), "data": values.ravel().tolist()}],
        "outputs": [{"name": "logits", "parameters": {"classification": 3}}],
    }
    answer = requests.post(f"http://{stack.http}/v2/models/efficientnet/infer", json=document, timeout=60)
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [1, 3])
    check(output["data"])


def test_rows_are_classified_one_by_one(stack: Stack) -> None:
    """Two pictures in one request: each row has classes of its own."""
    values = np.stack([sample_inputs.image_tensor(name) for name in ("coffee.png", "chelsea.png")])
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        wanted = [triton_grpc.InferRequestedOutput("logits", class_count=1)]
        answer = client.infer("efficientnet", client_inputs(triton_grpc, {"input": values}), outputs=wanted)
    coffee, cat = (parsed(row[0].decode()) for row in answer.as_numpy("logits"))
    assert coffee[1:] == ESPRESSO
    assert cat[1] in sample_inputs.CAT_CLASSES
