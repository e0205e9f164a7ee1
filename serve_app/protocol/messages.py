"""What every way in decodes to and every way out encodes from: one request, one response."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt

from serve_app.protocol.tensor import Tensor

ParameterValue = bool | int | float | str
Parameters = dict[str, ParameterValue]
REGION = "shared_memory_region"
"""Parameter of an input or output: its data is in that region."""
REGION_SIZE, REGION_OFFSET = "shared_memory_byte_size", "shared_memory_offset"
"""Parameters beside it: how many bytes, and where in the region they begin."""
Arrays = dict[str, npt.NDArray[Any]]
"""Tensors as handle calls carry them: arrays by name."""


@dataclass(slots=True)
class RequestedOutput:
    """One entry of a request's `outputs`.

    Attributes:
        name: The output's name.
        parameters: As sent, for example `{"classification": 3}`; how the answer is to be written
            (`binary_data`) is the ingress's matter and not in here.
    """

    name: str
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class InferRequest:
    """One inference request.

    Attributes:
        model_name: Which model.
        model_version: Which version; empty means the server's choice (its version policy).
        id: The caller's id, echoed in the response; empty when none was given.
        inputs: Tensors, in the caller's order; with a batching model each has the rows first.
        outputs: Which outputs are wanted, in that order; empty means all.
        parameters: The request's V2 parameters, as sent.
        regions: Names of the shared memory regions that inputs and outputs are in (see `regions_of`).
        place: Where it has to run (`Endpoint.place`); empty for anywhere.
        num_callers: Requests whose rows are merged in it.
        num_losses: Times it was lost with a server or a model's process; one that was is sent alone, and only once.
        priority: How urgent it is here if `parameters` name no `priority`; 0: as the model's settings say.
    """

    model_name: str
    inputs: list[Tensor]
    model_version: str = ""
    id: str = ""
    outputs: list[RequestedOutput] = field(default_factory=list)
    parameters: Parameters = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    place: str = ""
    num_callers: int = 1
    num_losses: int = 0
    priority: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of tensor data in all inputs."""
        return sum(tensor.size_bytes for tensor in self.inputs)


def regions_of(inputs: Iterable[Tensor], outputs: Iterable[RequestedOutput]) -> tuple[str, ...]:
    """Names of the shared memory regions that these are in; for whoever makes a request that may have some."""
    names = [tensor.region.name for tensor in inputs if tensor.region is not None]
    names += [f"{output.parameters[REGION]}" for output in outputs if REGION in output.parameters]
    return tuple(names)


@dataclass(slots=True)
class InferResponse:
    """One inference response; `outputs` are in the order the request asked for (or the server's order)."""

    model_name: str
    outputs: list[Tensor]
    model_version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of tensor data in all outputs."""
        return sum([tensor.size_bytes for tensor in self.outputs])

    def with_id(self, request_id: str) -> InferResponse:
        """The same response under another request id; tensors are shared, not copied."""
        return replace(self, id=request_id)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a model says of one input or output.

    Attributes:
        name: Its name.
        datatype: V2 datatype.
        shape: As in V2 metadata: -1 is any size, and the batch dimension is included where there is one.
        is_optional: Whether a request may leave the input out.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What we know of one model version, read from Triton's metadata and config.

    Attributes:
        name: The model.
        version: The version described; empty when the server's default was asked for.
        versions: All versions the server has.
        platform: Triton's platform text, for example `onnxruntime_onnx`.
        inputs: Inputs by name, in the model's order.
        outputs: Outputs by name, in the model's order.
        max_batch_size: Largest number of rows Triton takes in one request; 0 means that tensors have no
            batch dimension and requests are never merged.
        num_instances: Model instances over all instance groups of one server, at least 1.
        is_decoupled: The model may answer one request zero to many times.
        is_sequence: The model has a sequence batcher.
        can_merge: Whether rows of several requests may be put into one: `max_batch_size > 0`, and neither
            decoupled nor sequence.
    """

    name: str
    version: str
    versions: tuple[str, ...]
    platform: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    max_batch_size: int
    num_instances: int = 1
    is_decoupled: bool = False
    is_sequence: bool = False

    @property
    def can_merge(self) -> bool:
        """See the class."""
        return self.max_batch_size > 0 and not self.is_decoupled and not self.is_sequence
