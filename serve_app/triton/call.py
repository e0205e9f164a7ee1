"""One call on its way through the servers: what is sent, what counts as an answer, and what has become of it so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from serve_app.protocol.answer_check import decode_answer
from serve_app.protocol.grpc_codec import encode_infer_request, large_infer_request
from serve_app.protocol.messages import InferRequest, ModelSpec, TensorSpec
from serve_app.triton.pool import Build

if TYPE_CHECKING:
    from serve_app.triton.member import Member

Accept = Callable[[Any], Any]
"""Makes the answer out of a response message; raises `AnswerMalformed` for one that is none."""

_CHANGES = frozenset(("RepositoryModelLoad", "RepositoryModelUnload"))


@dataclass(slots=True)
class Call:
    """One call on its way through the servers.

    Attributes:
        rpc_name: For example `ModelInfer`.
        build: Makes the request message.
        model_name: The model it is about; empty for calls that concern the server.
        model_version: The version it is about.
        sequence_id: Sequence it belongs to; empty for none.
        place: Where the server has to be (`Endpoint.place`); empty for anywhere.
        is_start: Whether it starts its sequence.
        is_end: Whether it ends its sequence.
        accept: Makes the answer; `None` where the response message is the answer.
        accept_as: Makes `accept` for a server whose model declares other outputs, given its `ModelMetadataResponse`.
        num_callers: Requests that are merged in it. One of several is never sent a second time as it is once it was
            lost with a server or a model's process: one of them may be what killed it.
        num_losses: Tries that ended with a lost server or model process, those before this call included.
        num_faults: Tries that ended with a malformed answer.
        tried: Servers that failed it.
        member: The server that it is at now.
    """

    rpc_name: str
    build: Build
    model_name: str = ""
    model_version: str = ""
    sequence_id: str = ""
    place: str = ""
    is_start: bool = False
    is_end: bool = False
    accept: Accept | None = None
    accept_as: Callable[[Any], Accept] | None = None
    num_callers: int = 1
    num_losses: int = 0
    num_faults: int = 0
    tried: tuple[Member, ...] = ()
    member: Member | None = None

    @property
    def is_inference(self) -> bool:
        """Whether its result tells how well a server serves the model."""
        return self.rpc_name == "ModelInfer"

    @property
    def is_repeatable(self) -> bool:
        """Whether it may be given up on one server and sent to another, although the first may have run it."""
        return not self.sequence_id and self.rpc_name not in _CHANGES


def inference(rpc_name: str, request: InferRequest, spec: ModelSpec | None = None) -> Call:
    """The call that carries a request, to its sequence's server where it has one.

    Args:
        rpc_name: `ModelInfer` or `ModelStreamInfer`.
        request: Borrowed.
        spec: The model, to compare answers with; `None` compares them with the request alone.
    """

    def build(left_s: float) -> Any:
        large = large_infer_request(request) if rpc_name == "ModelInfer" else None
        message = encode_infer_request(request) if large is None else large.head
        _set_timeout(message, left_s)
        return large or message

    def accept_as(metadata: Any) -> Accept:
        assert spec is not None
        outputs = {t.name: TensorSpec(t.name, t.datatype, tuple(t.shape)) for t in metadata.outputs}
        known = replace(spec, outputs=outputs)
        return lambda message: decode_answer(message, request, known)

    call = Call(
        rpc_name,
        build,
        request.model_name,
        request.model_version,
        place=request.place,
        num_callers=request.num_callers,
        num_losses=request.num_losses,
    )
    if rpc_name == "ModelInfer":
        call.accept = lambda message: decode_answer(message, request, spec)
        call.accept_as = None if spec is None else accept_as
    parameters = request.parameters
    if parameters and (sequence_id := parameters.get("sequence_id")) not in (None, 0, ""):
        call.sequence_id = str(sequence_id)
        call.is_start, call.is_end = bool(parameters.get("sequence_start")), bool(parameters.get("sequence_end"))
    return call


def _set_timeout(message: Any, timeout_s: float) -> None:
    """Tell Triton the budget in microseconds, for models whose queue policy lets a request's timeout count."""
    parameter, timeout_us = message.parameters["timeout"], max(int(timeout_s * 1e6), 1)
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None or (kind == "int64_param" and not 0 < parameter.int64_param < timeout_us):
        parameter.int64_param = timeout_us
