"""What may share a ModelInfer, and what must not."""

from __future__ import annotations

import numpy as np
import pytest

from serve_app.batching.signature import signature_of
from serve_app.protocol.messages import InferRequest, ParameterValue, RequestedOutput
from serve_app.protocol.tensor import Tensor


def tensor(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
    return Tensor.from_numpy(name, np.zeros(shape, dtype))


def request(*inputs: Tensor, outputs: tuple[str, ...] = (), **parameters: ParameterValue) -> InferRequest:
    return InferRequest("m", list(inputs), outputs=[RequestedOutput(name) for name in outputs], parameters=parameters)


BASE = request(tensor("a", (2, 3)), tensor("b", (2,)), outputs=("x", "y"), priority=1)


@pytest.mark.parametrize(
    "other",
    [
        request(tensor("a", (7, 3)), tensor("b", (7,)), outputs=("x", "y"), priority=1),
        request(tensor("b", (2,)), tensor("a", (2, 3)), outputs=("y", "x"), priority=1),
        InferRequest("m", BASE.inputs, id="another", outputs=BASE.outputs, parameters=BASE.parameters),
    ],
    ids=["other rows", "other order", "other id"],
)
def test_rows_order_and_id_do_not_matter(other: InferRequest) -> None:
    """Requests that differ in their rows, their id or the order of their names share a batch."""
    assert signature_of(other) == signature_of(BASE)


@pytest.mark.parametrize(
    "other",
    [
        request(tensor("a", (2, 4)), tensor("b", (2,)), outputs=("x", "y"), priority=1),
        request(tensor("a", (2, 3, 1)), tensor("b", (2,)), outputs=("x", "y"), priority=1),
        request(tensor("a", (2, 3), "int32"), tensor("b", (2,)), outputs=("x", "y"), priority=1),
        request(tensor("a", (2, 3)), outputs=("x", "y"), priority=1),
        request(tensor("a", (2, 3)), tensor("c", (2,)), outputs=("x", "y"), priority=1),
        request(tensor("a", (2, 3)), tensor("b", (2,)), outputs=("x",), priority=1),
        request(tensor("a", (2, 3)), tensor("b", (2,)), priority=1),
        request(tensor("a", (2, 3)), tensor("b", (2,)), outputs=("x", "y"), priority=2),
        request(tensor("a", (2, 3)), tensor("b", (2,)), outputs=("x", "y"), priority=True),
        request(tensor("a", (2, 3)), tensor("b", (2,)), outputs=("x", "y"), priority=1, custom="c"),
        request(tensor("a", (2, 3)), tensor("b", (2,)), outputs=("x", "y")),
        InferRequest("m", BASE.inputs, "2", outputs=BASE.outputs, parameters=BASE.parameters),
        InferRequest("m", BASE.inputs, outputs=[RequestedOutput("x", {"classification": 2}), RequestedOutput("y")]),
    ],
)
def test_anything_that_changes_the_answer_separates(other: InferRequest) -> None:
    """Another inner shape, datatype, set of inputs or outputs, version or parameter is another batch."""
    assert signature_of(other) != signature_of(BASE)


def test_a_sequence_equals_nothing_but_itself() -> None:
    """Requests of a sequence are never merged, not even two that look the same."""
    one, other = request(tensor("a", (1, 2)), sequence_id=5), request(tensor("a", (1, 2)), sequence_id=5)
    assert signature_of(one) != signature_of(other)


def test_a_parameter_that_cannot_be_compared_is_never_merged() -> None:
    """A value that is no V2 value makes the request go alone instead of failing."""
    odd = request(tensor("a", (1, 2)))
    odd.parameters["list"] = []  # type: ignore[assignment]  # what a careless caller may do
    assert signature_of(odd) != signature_of(odd)
    assert hash(signature_of(odd)) is not None
