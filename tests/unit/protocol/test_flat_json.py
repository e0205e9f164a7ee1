"""The JSON of the generate extension, as the real server reads and writes it."""

from __future__ import annotations

import numpy as np
import orjson
import pytest

from serve_app.errors import InvalidRequest, TensorDatatypeMismatch, TensorShapeMismatch
from serve_app.protocol.flat_json import decode_generate_request, encode_generate_response, shape_for
from serve_app.protocol.messages import InferResponse, ModelSpec, TensorSpec
from serve_app.protocol.tensor import Tensor

SPEC = ModelSpec(
    "m",
    "1",
    ("1",),
    "python",
    inputs={
        "TEXT": TensorSpec("TEXT", "BYTES", (-1, 1)),
        "FLAG": TensorSpec("FLAG", "BOOL", (-1, 1), is_optional=True),
        "GRID": TensorSpec("GRID", "FP32", (2, 3), is_optional=True),
    },
    outputs={},
    max_batch_size=8,
)


def decode(document: object) -> object:
    return decode_generate_request(orjson.dumps(document), SPEC, model_version="1")


def test_members_are_inputs_an_id_or_parameters() -> None:
    """By name; those of `parameters` count as members of the body."""
    request = decode_generate_request(
        orjson.dumps(
            {"TEXT": "hello", "id": "7", "stream": False, "parameters": {"temperature": 0.5, "FLAG": True, "n": 3}}
        ),
        SPEC,
    )
    assert request.id == "7"
    assert request.parameters == {"stream": False, "temperature": 0.5, "n": 3}
    text, flag = request.inputs
    assert (text.name, text.datatype, text.shape) == ("TEXT", "BYTES", (1, 1))
    assert text.to_numpy().tolist() == [[b"hello"]]
    assert (flag.shape, flag.to_numpy().tolist()) == ((1, 1), [[True]])


def test_tritons_own_parameters_are_taken_and_go_no_further() -> None:
    """As Triton takes them; over gRPC it would refuse them. Only a body's own `id` is the request's."""
    request = decode_generate_request(
        orjson.dumps({"TEXT": "a", "triton_a": 1, "parameters": {"triton_b": "x", "id": "7"}}), SPEC
    )
    assert (request.id, request.parameters) == ("", {"id": "7"})


@pytest.mark.parametrize(
    ("num_elements", "shape", "expected"),
    [
        (1, (1,), (1,)),
        (1, (), ()),
        (1, (-1, 1), (1, 1)),
        (3, (-1, 1), (3, 1)),
        (3, (-1, -1), (1, 3)),
        (0, (-1, -1), (1, 0)),
        (6, (2, 3), (2, 3)),
        (12, (-1, 2, 3), (2, 2, 3)),
        (12, (-1, 2, -1), (1, 2, 6)),
    ],
)
def test_a_flat_array_gets_the_shape_that_triton_gives_it(
    num_elements: int, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Fixed dimensions first, the last free one takes the rest, the others are 1."""
    assert shape_for(num_elements, TensorSpec("X", "FP32", shape)) == expected


@pytest.mark.parametrize(("num_elements", "shape"), [(2, (1,)), (4, (2, 3)), (7, (-1, 2, 3)), (0, (1,)), (1, (0, 2))])
def test_elements_that_fill_no_shape(num_elements: int, shape: tuple[int, ...]) -> None:
    """A typed error that names both."""
    with pytest.raises(TensorShapeMismatch, match=f"{num_elements} elements"):
        shape_for(num_elements, TensorSpec("X", "FP32", shape))


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ([], InvalidRequest),
        ({"TEXT": 7}, TensorDatatypeMismatch),
        ({"TEXT": None}, TensorDatatypeMismatch),
        ({"TEXT": [["a"]]}, InvalidRequest),
        ({"TEXT": {"a": 1}}, TensorDatatypeMismatch),
        ({"GRID": [1, 2, 3, 4]}, TensorShapeMismatch),
        ({"FLAG": 1}, TensorDatatypeMismatch),
        ({"id": 7}, InvalidRequest),
        ({"parameters": 7}, InvalidRequest),
        ({"other": [1]}, InvalidRequest),
        ({"other": None}, InvalidRequest),
        ({"other": {}}, InvalidRequest),
        ({"triton_other": {}}, InvalidRequest),
    ],
)
def test_what_is_no_generate_request(document: object, error: type[InvalidRequest]) -> None:
    """Refused with the caller's fault, whatever it is."""
    with pytest.raises(error):
        decode(document)


def test_a_response_is_written_as_triton_does() -> None:
    """Members by name, one value alone, several flat, `id` only where there is one, NaN as a word."""
    response = InferResponse(
        "m",
        [
            Tensor.from_numpy("text", np.array([['a "b"']], np.object_)),
            Tensor.from_numpy("grid", np.array([[1.5, 2], [np.nan, 4]], np.float32)),
            Tensor.from_numpy("alone", np.array([-np.inf], np.float32)),
            Tensor.from_numpy("Flag", np.array([True])),
            Tensor.from_numpy("none", np.array([], np.int64)),
        ],
        "1",
        "x",
    )
    assert encode_generate_response(response) == (
        b'{"Flag":true,"alone":-Infinity,"grid":[1.5,2.0,NaN,4.0],"id":"x","model_name":"m","model_version":"1",'
        b'"none":[],"text":"a \\"b\\""}'
    )
    assert b'"id"' not in encode_generate_response(response.with_id(""))
