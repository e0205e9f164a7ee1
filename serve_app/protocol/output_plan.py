"""How each output of an HTTP answer is written: as JSON or as binary data behind the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.errors import InvalidRequest
from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.messages import REGION, InferRequest, ModelSpec, TensorSpec

# Parameters of an output by which its data does not travel as it is.
_OTHER_FORMS = frozenset(("classification", REGION))


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """Which outputs the caller wants as binary data.

    As in Triton, the request's `binary_data_output` counts only for outputs that the request does not list: a listed
    output without a `binary_data` of its own is JSON.

    Attributes:
        is_binary_default: For outputs that the request does not list.
        binary_by_name: For the outputs that it lists.
    """

    is_binary_default: bool = False
    binary_by_name: Mapping[str, bool] = field(default_factory=dict)

    def is_binary(self, name: str) -> bool:
        """Whether the output is written as binary data."""
        return self.binary_by_name.get(name, self.is_binary_default)

    def check(self, request: InferRequest, spec: ModelSpec) -> None:
        """Refuse a request whose answer JSON cannot carry, before the model runs for nothing.

        Without a list of outputs that is certain only where all outputs are FP16 or BF16: a model need not produce
        every output. `binary.encode_infer_response` refuses the rest.

        Raises:
            InvalidRequest: An FP16 or BF16 output would have to be written as JSON.
        """
        if self.is_binary_default and not request.outputs:
            return
        for index, output in enumerate(request.outputs):
            tensor = spec.outputs.get(output.name)
            if tensor is None or self.is_binary(output.name) or not _OTHER_FORMS.isdisjoint(output.parameters):
                continue
            if not _has_json(tensor):
                raise _no_json_error(f"outputs[{index}].parameters.binary_data", tensor)
        if not request.outputs and spec.outputs and not any(map(_has_json, spec.outputs.values())):
            raise _no_json_error("parameters.binary_data_output", next(iter(spec.outputs.values())))


def _has_json(tensor: TensorSpec) -> bool:
    row = DATATYPES.get(tensor.datatype)
    return row is None or row.has_json


def _no_json_error(field_name: str, tensor: TensorSpec) -> InvalidRequest:
    return InvalidRequest(
        field_name, f"JSON for output {tensor.name!r} of datatype {tensor.datatype}", "true: it travels only as binary"
    )


JSON_ONLY = OutputPlan()
"""Every output as JSON: what a request that says nothing gets."""

BINARY_ONLY = OutputPlan(is_binary_default=True)
"""Every output as binary data."""
