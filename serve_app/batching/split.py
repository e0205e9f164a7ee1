"""Requests cut into parts, and responses cut into one for each caller, without copying a row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from serve_app.errors import BackendFailed, ServeAppError, TensorDatatypeMismatch, TensorShapeMismatch
from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.messages import InferRequest, InferResponse
from serve_app.protocol.tensor import Buffer, Tensor, bytes_offsets


def bytes_view(data: Buffer) -> memoryview:
    """A flat view of single bytes over `data`, whatever its item size and shape were."""
    view = data if isinstance(data, memoryview) else memoryview(data)
    if view.nbytes == 0:
        return memoryview(b"")  # `cast` refuses views with a zero in their shape
    if view.ndim != 1 or view.itemsize != 1:
        return view.cast("B")
    return view


def row_offsets(tensor: Tensor) -> Sequence[int]:
    """Where each row of a tensor starts in its data, and where the last one ends.

    Returns:
        `shape[0] + 1` byte offsets; row i is `data[offsets[i]:offsets[i + 1]]`.

    Raises:
        TensorDatatypeMismatch: The datatype is not a V2 datatype.
        TensorShapeMismatch: The tensor is a scalar, or its data does not fill its shape.
    """
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None:
        expected = f"one of {', '.join(DATATYPES)}"
        raise TensorDatatypeMismatch(f"tensor {tensor.name!r}", f"datatype {tensor.datatype!r}", expected)
    if not tensor.shape:
        raise TensorShapeMismatch(f"tensor {tensor.name!r}", "shape []", "a first dimension that counts rows")
    num_rows, num_elements = tensor.shape[0], tensor.num_elements
    if num_elements == 0:
        size_bytes: int = 0
    elif datatype.size_bytes is None:
        offsets = bytes_offsets(tensor.data, name=tensor.name, num_elements=num_elements)
        return offsets[:: num_elements // num_rows]
    else:
        size_bytes = num_elements * datatype.size_bytes
    if tensor.size_bytes != size_bytes:
        raise TensorShapeMismatch(
            f"tensor {tensor.name!r}",
            f"{tensor.size_bytes} bytes of data",
            f"{size_bytes} bytes for shape {list(tensor.shape)} of {tensor.datatype}",
        )
    if size_bytes == 0:
        return [0] * (num_rows + 1)
    return range(0, size_bytes + 1, size_bytes // num_rows)


class RowSlicer:
    """Cuts one request's rows out of it, as views of its tensors.

    Args:
        request: Rows first in every input; borrowed, and so are the slices' buffers.

    Raises:
        TensorDatatypeMismatch: An input's datatype is not a V2 datatype.
        TensorShapeMismatch: An input has no rows, another number of rows than the first, or data that does not
            fill its shape.
    """

    __slots__ = ("_columns", "_request", "num_rows")

    def __init__(self, request: InferRequest) -> None:
        self._request = request
        self._columns = [(tensor, bytes_view(tensor.data), row_offsets(tensor)) for tensor in request.inputs]
        self.num_rows = request.inputs[0].shape[0] if request.inputs else 0
        for tensor in request.inputs:
            if tensor.shape[0] != self.num_rows:
                raise TensorShapeMismatch(
                    f"tensor {tensor.name!r}", f"{tensor.shape[0]} rows", f"{self.num_rows}, as the first input has"
                )

    def bytes_between(self, start: int, stop: int) -> int:
        """Bytes of input tensors in rows `start` to `stop`."""
        return sum([offsets[stop] - offsets[start] for _, _, offsets in self._columns])

    def slice(self, start: int, stop: int) -> InferRequest:
        """The request with rows `start` to `stop` only; everything else is shared with the whole."""
        inputs = [
            Tensor(
                tensor.name,
                tensor.datatype,
                (stop - start, *tensor.shape[1:]),
                view[offsets[start] : offsets[stop]],
            )
            for tensor, view, offsets in self._columns
        ]
        request = self._request
        return InferRequest(
            request.model_name, inputs, request.model_version, request.id, request.outputs, request.parameters
        )


def split_request(request: InferRequest, max_rows: int) -> list[InferRequest]:
    """The request in parts of at most `max_rows` rows, in order; at least one part.

    Raises:
        TensorDatatypeMismatch: As for `RowSlicer`.
        TensorShapeMismatch: As for `RowSlicer`.
    """
    if max_rows < 1:
        raise ValueError(f"max_rows: got {max_rows}, expected at least 1")
    slicer = RowSlicer(request)
    starts = range(0, max(slicer.num_rows, 1), max_rows)
    return [slicer.slice(start, min(start + max_rows, slicer.num_rows)) for start in starts]


def split_response(response: InferResponse, rows: Sequence[int]) -> list[InferResponse]:
    """One response for each of the requests that were merged.

    Args:
        response: The answer to the merged request. Borrowed: each part's tensors are views of its buffers, which
            therefore live as long as any part does.
        rows: How many rows each request had, in the order in which they were merged.

    Returns:
        The parts, with empty ids and the outputs in the response's order.

    Raises:
        BackendFailed: An output has no rows, another number of rows than were sent, an unknown datatype, or data
            that does not fill its shape; the text names it.
    """
    stops = [0]
    for count in rows:
        stops.append(stops[-1] + count)
    model_name, version, parameters = response.model_name, response.model_version, response.parameters
    parts = [InferResponse(model_name, [], version, "", dict(parameters)) for _ in rows]
    for tensor in response.outputs:
        offsets = _answered_offsets(tensor, stops[-1], model_name=model_name)
        name, datatype, view, inner = tensor.name, tensor.datatype, bytes_view(tensor.data), tensor.shape[1:]
        for part, (start, stop) in zip(parts, pairwise(stops), strict=True):
            data = view[offsets[start] : offsets[stop]]
            part.outputs.append(Tensor(name, datatype, (stop - start, *inner), data))
    return parts


def check_rows(response: InferResponse, rows: int) -> None:
    """Check that every output of a response has so many rows.

    Raises:
        BackendFailed: As for `split_response`.
    """
    for tensor in response.outputs:
        _answered_offsets(tensor, rows, model_name=response.model_name)


def _answered_offsets(tensor: Tensor, rows: int, *, model_name: str) -> Sequence[int]:
    if not tensor.shape or tensor.shape[0] != rows:
        raise BackendFailed(
            model_name,
            f"output {tensor.name!r} came back with shape {list(tensor.shape)} for {rows} rows; "
            f"a model that batches answers one row for each",
        )
    try:
        return row_offsets(tensor)
    except ServeAppError as error:
        raise BackendFailed(model_name, f"output of the model: {error}") from None
