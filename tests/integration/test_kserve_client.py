"""The KServe client, unchanged, from an environment of its own: its V2 calls over REST and gRPC."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.other_clients import kserve_answers
from tests.support.stack import Stack

pytestmark = pytest.mark.integration

ANSWER = ["42", "identity", "FP32", [[1.5, 2.0, 3.0]]]
EXPECTED: dict[str, Any] = {
    "rest live": True,
    "rest ready": True,
    "rest model ready": True,
    "rest model unknown": False,
    "rest infer JSON": ANSWER,
    "rest infer binary": ANSWER,
    "rest infer binary there and back": ANSWER,
    "rest infer an output": ANSWER,
    "rest infer unknown": "404 unknown model 'nothing'",
    "grpc live": True,
    "grpc ready": True,
    "grpc model ready": True,
    "grpc model unknown": False,
    "grpc infer typed contents": ANSWER,
    "grpc infer raw contents": ANSWER,
    "grpc infer an output": ANSWER,
    "grpc infer unknown": "NOT_FOUND unknown model 'nothing'",
}


@pytest.fixture(scope="module")
def answers(stack: Stack) -> dict[str, Any]:
    """All calls, made by one process."""
    return kserve_answers(f"http://{stack.http}", stack.grpc)


def test_every_call_is_looked_at(answers: dict[str, Any]) -> None:
    """None is made that has no expectation here."""
    assert list(answers) == list(EXPECTED)


@pytest.mark.parametrize("call", EXPECTED)
def test_a_call_gives_what_it_should(answers: dict[str, Any], call: str) -> None:
    """The right values, or the error with our own text."""
    assert answers[call] == EXPECTED[call]
