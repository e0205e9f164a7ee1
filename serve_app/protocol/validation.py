"""Whether a request is one that its model can answer; asked before it meets any other request."""

from __future__ import annotations

from serve_app.errors import (
    InvalidRequest,
    RequestTooLarge,
    TensorDatatypeMismatch,
    TensorNameMismatch,
    TensorShapeMismatch,
)
from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.messages import InferRequest, ModelSpec, TensorSpec
from serve_app.protocol.tensor import Tensor, check_bytes
from serve_app.settings import LimitSettings


def check_request(request: InferRequest, spec: ModelSpec, limits: LimitSettings) -> int:
    """Check a request against its model.

    Names, datatypes, ranks, every dimension, equal rows in all inputs, data that fills its shape (for `BYTES` the
    length before each element too) and the requested outputs. As in Triton a batching model takes at least one row,
    and every other dimension may be 0. Unlike Triton it refuses an output that is asked for twice.

    Args:
        request: From any of the codecs.
        spec: The model.
        limits: `max_inputs`, `max_rank` and `max_request_bytes` are checked here for every way in.

    Returns:
        The rows, the size of every input's first dimension; 1 for models that do not batch. More than
        `max_batch_size` only where rows can be split over several requests (`spec.can_merge`, no regions).

    Raises:
        TensorNameMismatch: An unknown, repeated or missing input or output.
        TensorDatatypeMismatch: An input of another datatype than the model's.
        TensorShapeMismatch: An input of another shape, or whose data does not fill its shape.
        RequestTooLarge: Too many inputs, bytes in them, dimensions or rows.
        InvalidRequest: No inputs for a model whose inputs are all optional and that batches, or the classification of
            an output that has no numbers.
    """
    inputs, has_rows = request.inputs, spec.max_batch_size > 0
    if len(inputs) > limits.max_inputs:
        raise RequestTooLarge("inputs", len(inputs), limits.max_inputs, "tensors")
    size_bytes = sum([tensor.size_bytes for tensor in inputs])
    if size_bytes > limits.max_request_bytes:  # over HTTP the body was measured; gRPC and handles are measured here
        raise RequestTooLarge("input tensors", size_bytes, limits.max_request_bytes)
    seen: set[str] = set()
    rows = -1
    for tensor in inputs:
        expected = spec.inputs.get(tensor.name)
        if expected is None or tensor.name in seen:
            raise _input_name_error(tensor.name, spec, is_known=expected is not None)
        seen.add(tensor.name)
        _check_input(tensor, expected, limits, has_rows=has_rows)
        if has_rows:
            if rows not in (-1, tensor.shape[0]):
                raise TensorShapeMismatch(
                    f"input {tensor.name!r}",
                    f"shape {list(tensor.shape)}, {tensor.shape[0]} rows",
                    f"{rows} rows as in input {inputs[0].name!r} of shape {list(inputs[0].shape)}",
                )
            rows = tensor.shape[0]
    if len(seen) != len(spec.inputs):
        _check_missing(seen, spec)
    if request.outputs:
        _check_outputs(request, spec)
    if not has_rows:
        return 1
    if rows > spec.max_batch_size and (request.regions or not spec.can_merge):  # what is in a region cannot be cut
        raise RequestTooLarge(f"rows for model {spec.name!r}", rows, spec.max_batch_size, "rows")
    return rows


def _check_input(tensor: Tensor, expected: TensorSpec, limits: LimitSettings, *, has_rows: bool) -> None:
    shape, wanted = tensor.shape, expected.shape
    if tensor.datatype != expected.datatype:
        raise TensorDatatypeMismatch(f"input {tensor.name!r}", f"datatype {tensor.datatype}", expected.datatype)
    if len(shape) > limits.max_rank:
        raise RequestTooLarge(f"rank of input {tensor.name!r}", len(shape), limits.max_rank, "dimensions")
    if shape != wanted:
        if len(shape) != len(wanted):
            raise _shape_error(tensor, expected, has_rows=has_rows)
        for size, want in zip(shape, wanted, strict=True):
            if size != want and (want != -1 or size < 0):
                raise _shape_error(tensor, expected, has_rows=has_rows)
        if has_rows and shape[0] < 1:
            raise TensorShapeMismatch(f"input {tensor.name!r}", f"shape {list(shape)}, 0 rows", "at least 1 row")
    elif -1 in wanted:
        raise _shape_error(tensor, expected, has_rows=has_rows)
    num_elements = tensor.num_elements
    element_bytes = DATATYPES[tensor.datatype].size_bytes
    size_bytes = tensor.size_bytes if tensor.region is None else tensor.region.size_bytes
    if element_bytes is None and tensor.region is not None:
        return  # Triton reads it
    if element_bytes is None:
        check_bytes(tensor.data, name=tensor.name, num_elements=num_elements)
    elif size_bytes != num_elements * element_bytes:
        raise TensorShapeMismatch(
            f"input {tensor.name!r}",
            f"{size_bytes} bytes of data",
            f"{num_elements * element_bytes} for {tensor.datatype}{list(shape)}",
        )


def _shape_error(tensor: Tensor, expected: TensorSpec, *, has_rows: bool) -> TensorShapeMismatch:
    note = " (the first dimension is the rows)" if has_rows and len(tensor.shape) < len(expected.shape) else ""
    return TensorShapeMismatch(
        f"input {tensor.name!r}", f"shape {list(tensor.shape)}", f"{list(expected.shape)}, where -1 is any size{note}"
    )


def _input_name_error(name: str, spec: ModelSpec, *, is_known: bool) -> TensorNameMismatch:
    if is_known:
        return TensorNameMismatch(f"input {name!r}", "the same input twice", "each input once")
    return TensorNameMismatch(
        f"input {name[:64]!r}", f"an input that model {spec.name!r} does not have", f"one of {', '.join(spec.inputs)}"
    )


def _check_missing(seen: set[str], spec: ModelSpec) -> None:
    for tensor in spec.inputs.values():
        if not tensor.is_optional and tensor.name not in seen:
            raise TensorNameMismatch(
                f"input {tensor.name!r}", "no such input", f"{tensor.datatype}{list(tensor.shape)}: it is required"
            )
    if not seen and spec.max_batch_size > 0:
        raise InvalidRequest("inputs", "no inputs", f"at least one input, to know the rows for model {spec.name!r}")


def _check_outputs(request: InferRequest, spec: ModelSpec) -> None:
    seen: set[str] = set()
    for output in request.outputs:
        if output.name not in spec.outputs:
            raise TensorNameMismatch(
                f"output {output.name[:64]!r}",
                f"an output that model {spec.name!r} does not have",
                f"one of {', '.join(spec.outputs)}",
            )
        if output.name in seen:
            raise TensorNameMismatch(f"output {output.name!r}", "the same output twice", "each output once")
        seen.add(output.name)
        if "classification" in output.parameters and spec.outputs[output.name].datatype == "BYTES":
            # Triton 2.51 divides by the size of an element, which is 0 here, and its process ends.
            raise InvalidRequest(
                f"output {output.name!r}", "classification of BYTES", "classification of numbers alone"
            )
