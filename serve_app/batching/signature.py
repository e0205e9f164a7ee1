"""What must be equal for two requests to share one ModelInfer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from serve_app.protocol.messages import InferRequest, Parameters, RequestedOutput
from serve_app.protocol.tensor import Tensor

SEQUENCE_PREFIX = "sequence_"
"""V2 parameters of a stateful sequence (`sequence_id`, `sequence_start`, `sequence_end`) begin with this."""


def signature_of(request: InferRequest) -> Hashable:
    """What must be equal for two requests to share one ModelInfer.

    That is the model version as asked for, each input's name, datatype and shape without the rows, the requested
    outputs with their parameters, and every request parameter (priority, timeout, custom ones). The order of inputs
    and outputs does not matter. A request of a sequence (`sequence_*`), or with data in shared memory, equals
    nothing but itself.
    """
    parameters = request.parameters
    if request.regions:
        return object()
    if parameters and any(name.startswith(SEQUENCE_PREFIX) for name in parameters):
        return object()
    try:
        signature = (
            request.model_version,
            _inputs_key(request.inputs),
            _outputs_key(request.outputs) if request.outputs else None,
            _parameters_key(parameters) if parameters else None,
        )
        hash(signature)
    except TypeError:  # something in it is no V2 value, and nothing can be compared with it
        return object()
    return signature


def _inputs_key(inputs: Sequence[Tensor]) -> Hashable:
    if len(inputs) == 1:
        tensor = inputs[0]
        return (tensor.name, tensor.datatype, tensor.shape[1:])
    return tuple(sorted([(tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in inputs]))


def _outputs_key(outputs: Sequence[RequestedOutput]) -> Hashable:
    if len(outputs) == 1:
        output = outputs[0]
        return (output.name, _parameters_key(output.parameters) if output.parameters else None)
    # A frozenset rather than a sorted tuple: parameter values of different types have no order.
    return frozenset([(output.name, _parameters_key(output.parameters)) for output in outputs])


def _parameters_key(parameters: Parameters) -> Hashable:
    # With the type, for `1`, `1.0` and `True` are equal in Python and not in V2.
    return frozenset([(name, type(value), value) for name, value in parameters.items()])
