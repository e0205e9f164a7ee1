"""Requests out of arrays: what a handle call may ask for, and what it is told when it asks wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serve_app.errors import InvalidRequest
from serve_app.protocol.arrays import request_of_arrays

INPUTS = {"x": np.ones((2, 3), np.float32)}


def test_everything_is_taken_over() -> None:
    """Names, version, id, outputs and parameters reach the request; the array is borrowed."""
    request = request_of_arrays(
        "m", INPUTS, model_version="2", outputs=["y"], parameters={"priority": 1}, request_id="7"
    )
    assert (request.model_name, request.model_version, request.id) == ("m", "2", "7")
    assert [output.name for output in request.outputs] == ["y"]
    assert request.parameters == {"priority": 1}
    assert request.inputs[0].shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"request_id": 7}, "request_id"),
        ({"request_id": "\ud800"}, "request_id"),
        ({"model_version": 1}, "model_version"),
        ({"outputs": [b"y"]}, "outputs"),
        ({"parameters": {1: 2}}, "parameters"),
        ({"parameters": {"a": "\ud800"}}, "parameters"),
        ({"parameters": {"a": [1]}}, "parameters.a"),
        ({"parameters": {"sequence_start": "yes"}}, "parameters.sequence_start"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], field: str) -> None:
    """The caller's own mistake is a typed error that names the argument, not a failure further down."""
    with pytest.raises(InvalidRequest) as raised:
        request_of_arrays("m", INPUTS, **options)
    assert raised.value.field == field
