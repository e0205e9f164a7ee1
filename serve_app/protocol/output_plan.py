"""How each output of an HTTP answer is written: as JSON or as binary data behind the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.errors import InvalidRequest
from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.messages import InferRequest, ModelSpec


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
        """Refuse a request for JSON of an output that JSON cannot carry, before the model runs for nothing.

        Raises:
            InvalidRequest: An FP16 or BF16 output would have to be written as JSON.
        """
        if request.outputs:
            for index, output in enumerate(request.outputs):
                tensor = spec.outputs.get(output.name)
                if tensor is not None and "classification" not in output.parameters:
                    self._check_one(output.name, tensor.datatype, f"outputs[{index}].parameters.binary_data")
        else:
            for tensor in spec.outputs.values():
                self._check_one(tensor.name, tensor.datatype, "parameters.binary_data_output")

    def _check_one(self, name: str, datatype: str, field_name: str) -> None:
        row = DATATYPES.get(datatype)
        if row is not None and not row.has_json and not self.is_binary(name):
            raise InvalidRequest(
                field_name,
                f"JSON asked for output {name!r} of datatype {datatype}",
                "true: it travels only as binary data",
            )


JSON_ONLY = OutputPlan()
"""Every output as JSON: what a request that says nothing gets."""

BINARY_ONLY = OutputPlan(is_binary_default=True)
"""Every output as binary data."""
