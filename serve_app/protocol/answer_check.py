"""Whether what Triton answered is an answer to what it was asked; looked at before anyone gets a row of it."""

from __future__ import annotations

from typing import Any

from serve_app.errors import AnswerMalformed, BackendFailed, TensorShapeMismatch
from serve_app.protocol.grpc_codec import decode_infer_response, output_regions
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec, TensorSpec
from serve_app.protocol.tensor import Tensor, check_bytes


def decode_answer(pb: Any, request: InferRequest, spec: ModelSpec | None) -> InferResponse:
    """The response in a `ModelInferResponse`, checked against the request and the model.

    Outputs whose parameters make them something else than the model's own (`classification`, shared memory) are
    compared by name and rows alone.

    Args:
        pb: The message.
        request: What was asked.
        spec: The model; `None` leaves the comparison with it out.

    Raises:
        AnswerMalformed: Data that does not fill its shape, a requested output that is missing, one that was not asked
            for, another datatype or shape than the model's, or another number of rows than were sent.
    """
    try:
        response = decode_infer_response(pb, output_regions(request) if request.regions else None)
    except BackendFailed as error:
        raise AnswerMalformed(request.model_name, error.reason) from None
    if (fault := find_fault(response, request, spec)) is not None:
        raise AnswerMalformed(request.model_name, fault)
    return response


def find_fault(response: InferResponse, request: InferRequest, spec: ModelSpec | None) -> str | None:
    """What is wrong with an answer, in one sentence; `None` when nothing."""
    wanted = {output.name: output.parameters for output in request.outputs}
    names = {tensor.name for tensor in response.outputs}
    if len(names) != len(response.outputs):
        return "its answer has an output twice"
    if missing := wanted.keys() - names:
        return f"its answer lacks the requested output {min(missing)!r}"
    if wanted and len(wanted) != len(names):
        return f"its answer has output {min(names - wanted.keys())!r}, which was not asked for"
    for tensor in response.outputs:
        if tensor.datatype == "BYTES" and tensor.region is None:
            try:
                check_bytes(tensor.data, name=tensor.name, num_elements=tensor.num_elements)
            except TensorShapeMismatch as error:
                return f"its answer is malformed: {error}"
    if spec is None:
        return None
    rows = request.inputs[0].shape[0] if spec.max_batch_size > 0 and request.inputs else None
    for tensor in response.outputs:
        expected = spec.outputs.get(tensor.name)
        if expected is None:
            return f"its answer has output {tensor.name!r}, which the model does not have"
        if rows is not None and (not tensor.shape or tensor.shape[0] != rows):
            return (
                f"output {tensor.name!r} came back with shape {list(tensor.shape)} for {rows} rows; "
                f"a model that batches answers one row for each"
            )
        if not wanted.get(tensor.name) and not fits(tensor, expected):
            return (
                f"output {tensor.name!r} came back as {tensor.datatype}{list(tensor.shape)}, "
                f"the model says {expected.datatype}{list(expected.shape)}"
            )
    return None


def fits(tensor: Tensor, expected: TensorSpec) -> bool:
    """Whether an output is of the datatype and shape that the model declares."""
    shape, declared = tensor.shape, expected.shape
    return (
        tensor.datatype == expected.datatype
        and len(shape) == len(declared)
        and all(want in (-1, size) for size, want in zip(shape, declared, strict=True))
    )
