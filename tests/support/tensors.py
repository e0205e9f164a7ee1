"""Hypothesis strategies for tensors and messages of every V2 datatype, bit patterns included."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.messages import InferRequest, InferResponse, Parameters, RequestedOutput
from serve_app.protocol.tensor import Tensor, pack_bytes

JSON_DATATYPES = tuple(name for name, row in DATATYPES.items() if row.has_json)

# Scalars, zero sizes, several dimensions.
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
# UTF-8 text and bytes that are none: NULs, empty, invalid sequences.
elements = st.one_of(st.text(max_size=6).map(lambda text: text.encode()), st.binary(max_size=8))
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
ids = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def tensors(draw: st.DrawFn, *, name: str = "x", datatypes: Sequence[str] = tuple(DATATYPES)) -> Tensor:
    """A tensor of any datatype and shape, its bytes arbitrary (so NaN payloads and BOOL bytes beside 0 and 1 too)."""
    datatype = DATATYPES[draw(st.sampled_from(datatypes))]
    shape = draw(shapes)
    count = math.prod(shape)
    if datatype.size_bytes is None:
        data = pack_bytes(draw(st.lists(elements, min_size=count, max_size=count)), name=name)
    else:
        size = count * datatype.size_bytes
        data = draw(st.binary(min_size=size, max_size=size))
    return Tensor(name, datatype.name, shape, data)


def has_json(tensor: Tensor) -> bool:
    """Whether strict JSON can carry every value of the tensor."""
    if tensor.datatype in ("FP16", "BF16"):
        return False
    array = tensor.to_numpy()
    if tensor.datatype == "BYTES":
        return all(_is_text(element) for element in array.reshape(-1))
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _is_text(element: bytes) -> bool:
    try:
        element.decode()
    except UnicodeDecodeError:
        return False
    return True


def canonical(tensor: Tensor) -> tuple[str, str, tuple[int, ...], bytes]:
    """What has to survive every codec; every BOOL byte but zero is true."""
    data = bytes(tensor.data)
    if tensor.datatype == "BOOL":
        data = bytes(byte != 0 for byte in data)
    return tensor.name, tensor.datatype, tensor.shape, data


parameters = st.dictionaries(
    names.filter(
        lambda name: (
            not name.startswith("triton_")
            and name
            not in ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output")
        )
    ),
    st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), ids),
    max_size=3,
)


@st.composite
def requests(draw: st.DrawFn) -> InferRequest:
    """A request of any tensors, names, parameters and requested outputs."""
    inputs = [draw(tensors(name=name)) for name in draw(st.lists(names, max_size=4, unique=True))]
    request_parameters: Parameters = draw(parameters)
    outputs = [
        RequestedOutput(name, draw(st.sampled_from(({}, {"classification": 3}))))
        for name in draw(st.lists(names, max_size=3, unique=True))
    ]
    return InferRequest("m", inputs, "2", draw(ids), outputs, request_parameters)


@st.composite
def responses(draw: st.DrawFn) -> InferResponse:
    """A response of any tensors, names and parameters."""
    outputs = [draw(tensors(name=name)) for name in draw(st.lists(names, max_size=4, unique=True))]
    response_parameters: Parameters = draw(parameters)
    return InferResponse("m", outputs, "2", draw(ids), response_parameters)
