"""Rows of several requests put into one, and answers of one request's parts put together again."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.errors import BackendFailed
from serve_app.protocol.messages import InferRequest, InferResponse
from serve_app.protocol.tensor import Tensor


def merge(requests: Sequence[InferRequest]) -> InferRequest:
    """One request with the rows of all, in order.

    Args:
        requests: At least one, all of the same signature (see `signature_of`).

    Returns:
        The request itself when there is one; else one whose tensors are copies, joined along the rows, with the
        first request's order of inputs and outputs and an id such as `a17+3`: the first caller's and how many more
        are in it.
    """
    first = requests[0]
    if len(requests) == 1:
        return first
    inputs = [
        _join([_named(request.inputs, index, tensor.name) for request in requests])
        for index, tensor in enumerate(first.inputs)
    ]
    request_id = f"{first.id}+{len(requests) - 1}" if first.id else ""
    return InferRequest(
        first.model_name,
        inputs,
        first.model_version,
        request_id,
        first.outputs,
        first.parameters,
        num_callers=len(requests),
    )


def join_responses(parts: Sequence[InferResponse]) -> InferResponse:
    """The answers to one request's parts as one response, rows in the order of the parts.

    Args:
        parts: At least one; each checked to have its rows (see `check_rows`).

    Returns:
        The response itself when there is one; else copies, with the first part's outputs, version and parameters.

    Raises:
        BackendFailed: The parts have other outputs, datatypes or inner shapes than the first; the text names the
            output.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    names = {tensor.name for tensor in first.outputs}
    for part in parts:
        if len(part.outputs) != len(names) or {tensor.name for tensor in part.outputs} != names:
            raise BackendFailed(first.model_name, "the parts of a split request came back with different outputs")
    outputs = []
    for index, tensor in enumerate(first.outputs):
        column = [_named(part.outputs, index, tensor.name) for part in parts]
        for other in column:
            if other.datatype != tensor.datatype or other.shape[1:] != tensor.shape[1:]:
                raise BackendFailed(
                    first.model_name,
                    f"output {tensor.name!r}: the parts of a split request came back as {tensor.datatype}"
                    f"{list(tensor.shape)} and {other.datatype}{list(other.shape)}, which cannot be joined",
                )
        outputs.append(_join(column))
    return InferResponse(first.model_name, outputs, first.model_version, first.id, dict(first.parameters))


def _named(tensors: Sequence[Tensor], index: int, name: str) -> Tensor:
    """The tensor of that name, which is nearly always at the same index as in the first request."""
    if index < len(tensors) and tensors[index].name == name:
        return tensors[index]
    for tensor in tensors:
        if tensor.name == name:
            return tensor
    raise KeyError(name)


def _join(column: Sequence[Tensor]) -> Tensor:
    first = column[0]
    num_rows = sum([tensor.shape[0] for tensor in column])
    data = b"".join([tensor.data for tensor in column])
    return Tensor(first.name, first.datatype, (num_rows, *first.shape[1:]), data)
