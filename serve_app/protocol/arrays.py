"""Handle calls: a request out of arrays by name, checked as the codecs check what came over a wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy.typing as npt

from serve_app.errors import InvalidRequest
from serve_app.protocol.messages import InferRequest, ParameterValue, RequestedOutput
from serve_app.protocol.parameters import check_request_parameters
from serve_app.protocol.tensor import Tensor


def request_of_arrays(
    model_name: str,
    inputs: Mapping[str, npt.ArrayLike],
    *,
    model_version: str = "",
    outputs: Sequence[str] | None = None,
    parameters: Mapping[str, ParameterValue] | None = None,
    request_id: str = "",
) -> InferRequest:
    """The request that a handle call asks for.

    Args:
        model_name: The model.
        inputs: Arrays by input name, borrowed; rows first where the model batches.
        model_version: Empty for the server's choice.
        outputs: Names wanted, all when `None`.
        parameters: V2 request parameters.
        request_id: Passed on to Triton.

    Raises:
        InvalidRequest: A text is no string, or one that UTF-8 cannot carry; or a parameter is not as V2 wants it.
        TensorDatatypeMismatch: An array's dtype has no V2 datatype.
    """
    values = dict(parameters or {})
    texts: list[tuple[str, object]] = [
        ("model_name", model_name),
        ("model_version", model_version),
        ("request_id", request_id),
        *(("inputs", name) for name in inputs),
        *(("outputs", name) for name in outputs or ()),
        *(("parameters", key) for key in values),
        *(("parameters", value) for value in values.values() if isinstance(value, str)),
    ]
    for field, text in texts:
        _check_text(field, text)
    check_request_parameters(values)
    return InferRequest(
        model_name,
        [Tensor.from_numpy(name, array) for name, array in inputs.items()],
        model_version=model_version,
        id=request_id,
        outputs=[RequestedOutput(name) for name in outputs or ()],
        parameters=values,
    )


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(field, f"a {type(text).__name__}", "a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, "a string with a lone surrogate", "one that UTF-8 can carry") from None
