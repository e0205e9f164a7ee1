"""The models of `FakeTriton`: they return their inputs, check requests as Triton does, and lie when told to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2

from serve_app.protocol.datatypes import DATATYPES


class Lie(str, Enum):
    """How a model's answers are wrong while the call itself succeeds."""

    NONE = "none"
    """Not at all."""
    ROW_COUNT = "row_count"
    """One row fewer than asked for, shape and data agreeing with each other."""
    DATATYPE = "datatype"
    """Outputs claim to be of another datatype with elements of the same size (INT32 for FP32, else UINT8)."""
    NAMES = "names"
    """Outputs have names that the metadata does not have."""
    SHAPE = "shape"
    """Outputs have one dimension more than the metadata has."""
    SHORT_DATA = "short_data"
    """The last byte of every output is missing."""


@dataclass(frozen=True)
class Failure:
    """A gRPC status that a call ends with.

    Attributes:
        code: The status.
        text: Its details, as the client sees them.
    """

    code: grpc.StatusCode
    text: str


def unknown_model(name: str) -> Failure:
    """How any call that names a model the server does not have ends."""
    return Failure(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")


@dataclass
class FakeModel:
    """A model that answers each output with the input at the same position, unchanged.

    Every attribute may be changed while the server runs; the next call sees it.

    Attributes:
        name: The model's name.
        max_batch_size: Most rows in a call; 0 for tensors without a batch dimension.
        datatype: V2 datatype of all tensors.
        dims: Shape of all tensors without the batch dimension; -1 is any size.
        inputs: Input names.
        outputs: Output names, as many as inputs.
        versions: Versions it has; an empty version in a request means the last.
        num_instances: `count` of its instance group; calls are not limited to it.
        latency_s: How long a call takes.
        is_ready: Whether it is loaded; if not, calls end as in a server that is stopping.
        is_stub_dead: Whether calls end as if the model's Python process had died.
        lie: What is wrong with its answers.
        is_decoupled: Whether it answers in streams only, each request `num_responses` times.
        num_responses: Responses to one request of a decoupled model; each takes `latency_s`.
        fail_after: Responses after which a decoupled model's request fails; `None` for never.
        is_sequence: Whether its configuration has a sequence batcher.
    """

    name: str = "identity"
    max_batch_size: int = 8
    datatype: str = "FP32"
    dims: tuple[int, ...] = (-1,)
    inputs: tuple[str, ...] = ("INPUT0",)
    outputs: tuple[str, ...] = ("OUTPUT0",)
    versions: tuple[str, ...] = ("1",)
    num_instances: int = 1
    latency_s: float = 0.0
    is_ready: bool = True
    is_stub_dead: bool = False
    lie: Lie = Lie.NONE
    is_decoupled: bool = False
    num_responses: int = 1
    fail_after: int | None = None
    is_sequence: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all tensors as V2 metadata gives it, the batch dimension included."""
        return (-1, *self.dims) if self.max_batch_size else self.dims

    def find_failure(self, version: str) -> Failure | None:
        """Why the model (or that version of it) cannot be asked now; `None` when it can."""
        if not self.is_ready:
            text = f"Request for unknown model: '{self.name}' has no available versions"
            return Failure(grpc.StatusCode.NOT_FOUND, text)
        if version and version not in self.versions:
            text = f"Request for unknown model: '{self.name}' version {version} is not found"
            return Failure(grpc.StatusCode.NOT_FOUND, text)
        return None

    def metadata(self) -> Any:
        """`ModelMetadataResponse` as Triton would answer."""
        tensor = service_pb2.ModelMetadataResponse.TensorMetadata
        return service_pb2.ModelMetadataResponse(
            name=self.name,
            versions=self.versions,
            platform="python",
            inputs=[tensor(name=name, datatype=self.datatype, shape=self.shape) for name in self.inputs],
            outputs=[tensor(name=name, datatype=self.datatype, shape=self.shape) for name in self.outputs],
        )

    def config(self) -> Any:
        """`ModelConfigResponse` as Triton would answer."""
        tensor = {"data_type": DATATYPES[self.datatype].config_name, "dims": self.dims}
        group = model_config_pb2.ModelInstanceGroup(name=f"{self.name}_0", count=self.num_instances, kind="KIND_CPU")
        config = model_config_pb2.ModelConfig(
            name=self.name,
            backend="python",
            max_batch_size=self.max_batch_size,
            input=[model_config_pb2.ModelInput(name=name, **tensor) for name in self.inputs],
            output=[model_config_pb2.ModelOutput(name=name, **tensor) for name in self.outputs],
            instance_group=[group],
            model_transaction_policy=model_config_pb2.ModelTransactionPolicy(decoupled=self.is_decoupled),
        )
        if self.is_sequence:
            config.sequence_batching.max_sequence_idle_microseconds = 1_000_000
        return service_pb2.ModelConfigResponse(config=config)

    def rows_of(self, request: Any) -> int:
        """Rows of a `ModelInferRequest`; 1 for a model without a batch dimension."""
        if not self.max_batch_size or not request.inputs or not request.inputs[0].shape:
            return 1
        return int(request.inputs[0].shape[0])

    def check(self, request: Any) -> Failure | None:
        """What Triton's core would refuse in a `ModelInferRequest`; `None` when nothing."""
        if self.is_stub_dead:
            return Failure(grpc.StatusCode.INTERNAL, f"Stub process '{self.name}_0_0' is not healthy.")
        text = self._find_fault(request)
        return Failure(grpc.StatusCode.INVALID_ARGUMENT, text) if text else None

    def _find_fault(self, request: Any) -> str:
        prefix = f"[request id: {request.id or '<id_unknown>'}] "
        for tensor in request.inputs:
            if tensor.name not in self.inputs:
                return f"unexpected inference input '{tensor.name}' for model '{self.name}'"
        for output in request.outputs:
            if output.name not in self.outputs:
                return f"unexpected inference output '{output.name}' for model '{self.name}'"
        if len(request.inputs) != len(self.inputs):
            return f"{prefix}expected {len(self.inputs)} inputs but got {len(request.inputs)} for '{self.name}'"
        if len(request.raw_input_contents) != len(request.inputs):
            return f"{prefix}expected raw_input_contents for every input of '{self.name}'"
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            if fault := self._find_tensor_fault(tensor, len(raw)):
                return prefix + fault
        if self.max_batch_size and self.rows_of(request) > self.max_batch_size:
            return f"{prefix}inference request batch-size must be <= {self.max_batch_size} for '{self.name}'"
        return ""

    def _find_tensor_fault(self, tensor: Any, size_bytes: int) -> str:
        of = f"for input '{tensor.name}' for model '{self.name}'"
        if tensor.datatype != self.datatype:
            return (
                f"inference input '{tensor.name}' data-type is '{tensor.datatype}', "
                f"but model '{self.name}' expects '{self.datatype}'"
            )
        if len(tensor.shape) != len(self.shape) or any(
            want not in (-1, got) for want, got in zip(self.shape, tensor.shape, strict=False)
        ):
            want_text, got_text = (",".join(map(str, shape)) for shape in (self.shape, tensor.shape))
            return f"unexpected shape {of}. Expected [{want_text}], got [{got_text}]."
        element_bytes = DATATYPES[self.datatype].size_bytes
        expected = size_bytes if element_bytes is None else element_bytes
        if element_bytes is not None:
            for size in tensor.shape:
                expected *= size
        return "" if size_bytes == expected else f"input byte size mismatch {of}. Expected {expected}, got {size_bytes}"

    def answer(self, request: Any) -> Any:
        """The `ModelInferResponse` to a request that `check` found nothing in."""
        response = service_pb2.ModelInferResponse(
            model_name=self.name, model_version=request.model_version or self.versions[-1], id=request.id
        )
        position = {tensor.name: index for index, tensor in enumerate(request.inputs)}
        for name in [output.name for output in request.outputs] or self.outputs:
            index = position[self.inputs[self.outputs.index(name)]]
            shape, raw = list(request.inputs[index].shape), request.raw_input_contents[index]
            datatype = self.datatype
            if self.lie is Lie.ROW_COUNT and shape and shape[0]:
                raw = raw[: len(raw) - len(raw) // shape[0]]
                shape[0] -= 1
            elif self.lie is Lie.DATATYPE:
                datatype = "INT32" if datatype == "FP32" else "UINT8"
            elif self.lie is Lie.NAMES:
                name = f"not_{name}"
            elif self.lie is Lie.SHAPE:
                shape.append(1)
            elif self.lie is Lie.SHORT_DATA:
                raw = raw[:-1]
            response.outputs.add(name=name, datatype=datatype, shape=shape)
            response.raw_output_contents.append(raw)
        return response
