"""V2 over gRPC: protobuf messages to ours and back, for callers on one side and Triton on the other.

Messages are built anew each time: one that is reused keeps the memory of every payload it ever held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from serve_app.errors import BackendFailed, InvalidRequest, TensorDatatypeMismatch, TensorShapeMismatch
from serve_app.protocol.datatypes import DATATYPES, Datatype
from serve_app.protocol.json_tensor import pack_numbers
from serve_app.protocol.messages import (
    REGION,
    REGION_OFFSET,
    REGION_SIZE,
    InferRequest,
    InferResponse,
    Parameters,
    ParameterValue,
    RequestedOutput,
    regions_of,
)
from serve_app.protocol.parameters import (
    INT64_MAX,
    INT64_MIN,
    UINT64_MAX,
    check_output_parameters,
    check_request_parameters,
    parameter_field,
    region_of,
)
from serve_app.protocol.tensor import Buffer, Region, Tensor, pack_bytes
from serve_app.protocol.wire import LARGE_BYTES, RAW_INPUT_FIELD, RAW_OUTPUT_FIELD, LargeMessage, LargeRequest, parse

# Which field of InferTensorContents carries a datatype; FP16 and BF16 have none.
_CONTENTS: dict[str, str] = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def decode_infer_request(message: Any) -> InferRequest:
    """The request in a `ModelInferRequest`.

    Tensors come from `raw_input_contents` or from each input's typed `contents`, not from a mix of both. Names and
    shapes are not compared with the model here, nor is the inside of raw `BYTES` tensors looked at;
    `validation.check_request` does both. Parameters of inputs other than those of shared memory are dropped, as in
    Triton; raw contents leave out the inputs that are there.

    Args:
        message: The message, out of which protobuf copies raw contents once, or a `LargeRequest`, which tensors
            borrow; see `wire.read_infer_request`.

    Raises:
        InvalidRequest: No such message, mixed contents, a wrong number of raw contents, or an invalid parameter.
        TensorDatatypeMismatch: An unknown datatype, contents of another datatype, or a value out of its range.
        TensorShapeMismatch: Data that does not fill its shape, or a negative dimension.
    """
    if isinstance(message, LargeRequest):
        try:
            pb, raw = message.parse()
        except DecodeError:
            raise _no_message() from None
    else:
        pb, raw = message, message.raw_input_contents
    regions = [
        _region_of(entry, f"inputs[{index}]") if entry.parameters else None for index, entry in enumerate(pb.inputs)
    ]
    num_raw = regions.count(None)
    if raw and len(raw) != num_raw:
        raise InvalidRequest("raw_input_contents", f"{len(raw)} entries", f"{num_raw}, one for each input")
    contents = iter(raw)
    inputs: list[Tensor] = []
    for index, entry in enumerate(pb.inputs):
        field = f"inputs[{index}]"
        datatype = DATATYPES.get(entry.datatype)
        if datatype is None:
            raise TensorDatatypeMismatch(
                f"{field}.datatype", repr(entry.datatype[:16]), f"one of {', '.join(DATATYPES)}"
            )
        shape = tuple(entry.shape)
        if shape and min(shape) < 0:
            raise TensorShapeMismatch(f"{field}.shape", f"{list(shape)}", "non-negative dimensions")
        region = regions[index]
        if region is not None:
            if entry.HasField("contents"):
                raise InvalidRequest(f"{field}.contents", f"contents beside {REGION}", "one of them")
            inputs.append(Tensor(entry.name, datatype.name, shape, b"", region))
            continue
        if not raw:
            data: Buffer = _typed_data(entry, datatype, field)
        elif entry.HasField("contents"):
            raise InvalidRequest(f"{field}.contents", "contents beside raw_input_contents", "one of them")
        else:
            data = next(contents)
        tensor = Tensor(entry.name, datatype.name, shape, data)
        _check_size(tensor, datatype, field)
        inputs.append(tensor)
    parameters = _parameters_of(pb.parameters, "parameters") if pb.parameters else {}
    check_request_parameters(parameters, is_grpc=True)
    outputs = [_requested_output(entry, f"outputs[{index}]") for index, entry in enumerate(pb.outputs)]
    names = regions_of(inputs, outputs)
    return InferRequest(pb.model_name, inputs, pb.model_version, pb.id, outputs, parameters, names)


@dataclass(frozen=True, slots=True)
class Heading:
    """What is seen of a `ModelInferRequest` before its tensors are looked at.

    Attributes:
        model_name: The model.
        model_version: Its version.
        size_bytes: Bytes of the message.
        asks_priority: Whether it has a parameter `priority`.
    """

    model_name: str
    model_version: str
    size_bytes: int
    asks_priority: bool


def heading_of(message: Any) -> Heading:
    """The heading of a message, or of a `LargeRequest`.

    Raises:
        InvalidRequest: No such message.
    """
    if isinstance(message, LargeRequest):
        try:
            pb, size_bytes = message.parse()[0], len(message.data)
        except DecodeError:
            raise _no_message() from None
    else:
        pb, size_bytes = message, message.ByteSize()
    return Heading(pb.model_name, pb.model_version, size_bytes, "priority" in pb.parameters)


def _no_message() -> InvalidRequest:
    return InvalidRequest("request", "bytes that are no such message", "a ModelInferRequest")


def _region_of(entry: Any, field: str) -> Region | None:
    chosen = {key: value for key, value in entry.parameters.items() if key in (REGION, REGION_SIZE, REGION_OFFSET)}
    return region_of(_parameters_of(chosen, f"{field}.parameters"), field=f"{field}.parameters") if chosen else None


def _requested_output(entry: Any, field: str) -> RequestedOutput:
    if not entry.parameters:
        return RequestedOutput(entry.name)
    parameters = _parameters_of(entry.parameters, f"{field}.parameters")
    parameters.pop("binary_data", None)  # means something over HTTP only
    check_output_parameters(parameters, field=f"{field}.parameters")
    return RequestedOutput(entry.name, parameters)


def _typed_data(entry: Any, datatype: Datatype, field: str) -> bytes:
    filled = [descriptor.name for descriptor, _ in entry.contents.ListFields()]
    if not filled:
        return b""
    expected = _CONTENTS.get(datatype.name, "raw_input_contents")
    if filled != [expected]:
        raise TensorDatatypeMismatch(f"{field}.contents", " and ".join(filled), f"{expected} for {datatype.name}")
    values = getattr(entry.contents, expected)
    if expected == "bytes_contents":
        return pack_bytes(values, name=entry.name)
    return pack_numbers(values, datatype=datatype, field=f"{field}.contents.{expected}")


def _check_size(tensor: Tensor, datatype: Datatype, field: str) -> None:
    if datatype.size_bytes is not None and tensor.size_bytes != tensor.num_elements * datatype.size_bytes:
        raise TensorShapeMismatch(
            field,
            f"{tensor.size_bytes} bytes of data",
            f"{tensor.num_elements * datatype.size_bytes} for {datatype.name}{list(tensor.shape)}",
        )


def encode_infer_request(request: InferRequest) -> Any:
    """The `ModelInferRequest` of a request, with `raw_input_contents`.

    `bytes` go in as they are; other buffers are copied once, since protobuf takes nothing else.

    Raises:
        InvalidRequest: A parameter is of no V2 type, or its integer has more than 64 bits.
    """
    return _request_message(request, [_bytes_of(t.data) for t in request.inputs if t.region is None])


def large_infer_request(request: InferRequest) -> LargeMessage | None:
    """The same for a large request, whose tensors are borrowed until it is serialized; `None` for any other one.

    Raises:
        InvalidRequest: As for `encode_infer_request`.
    """
    if request.size_bytes < LARGE_BYTES:
        return None
    return LargeMessage(
        _request_message(request, ()), RAW_INPUT_FIELD, [t.data for t in request.inputs if t.region is None]
    )


def _request_message(request: InferRequest, contents: Sequence[bytes]) -> Any:
    pb = service_pb2.ModelInferRequest(
        model_name=request.model_name,
        model_version=request.model_version,
        id=request.id,
        inputs=[
            service_pb2.ModelInferRequest.InferInputTensor(name=t.name, datatype=t.datatype, shape=t.shape)
            for t in request.inputs
        ],
        raw_input_contents=contents,
    )
    for entry, tensor in zip(pb.inputs, request.inputs, strict=True) if request.regions else ():
        if tensor.region is not None:
            _set_parameters(entry.parameters, _region_parameters(tensor.region), "inputs")
    if request.parameters:
        _set_parameters(pb.parameters, request.parameters, "parameters")
    for index, output in enumerate(request.outputs):
        entry = pb.outputs.add(name=output.name)
        if output.parameters:
            _set_parameters(entry.parameters, output.parameters, f"outputs[{index}].parameters")
    return pb


def _region_parameters(region: Region) -> Parameters:
    return {REGION: region.name, REGION_SIZE: region.size_bytes, REGION_OFFSET: region.offset}


def output_regions(request: InferRequest) -> dict[str, Region]:
    """The regions of the outputs that Triton is to write to shared memory."""
    found = ((output.name, region_of(output.parameters, field="outputs")) for output in request.outputs)
    return {name: region for name, region in found if region is not None} if request.regions else {}


def decode_infer_response(message: Any, regions: Mapping[str, Region] | None = None) -> InferResponse:
    """The response in a `ModelInferResponse`, with raw or typed contents.

    Args:
        message: The message, or its wire form in `bytes`, which tensors borrow; see `wire.read_infer_response`.
        regions: The outputs whose data went to shared memory; see `output_regions`.

    Raises:
        BackendFailed: The message makes no sense: an unknown datatype, or data that does not fill its shape.
    """
    if isinstance(message, bytes):
        try:
            pb, raw = parse(message, service_pb2.ModelInferResponse, RAW_OUTPUT_FIELD)
        except DecodeError:
            raise BackendFailed("", "its answer is no ModelInferResponse") from None
    else:
        pb, raw = message, message.raw_output_contents
    if raw and len(raw) != len(pb.outputs):
        raise BackendFailed(pb.model_name, f"{len(raw)} raw contents for {len(pb.outputs)} outputs")
    outputs: list[Tensor] = []
    for index, entry in enumerate(pb.outputs):
        datatype = DATATYPES.get(entry.datatype)
        if datatype is None:
            raise BackendFailed(pb.model_name, f"output {entry.name!r} has unknown datatype {entry.datatype!r}")
        if regions and (region := regions.get(entry.name)) is not None:
            outputs.append(Tensor(entry.name, datatype.name, tuple(entry.shape), b"", region))
            continue
        try:
            data = raw[index] if raw else _typed_data(entry, datatype, f"outputs[{index}]")
            tensor = Tensor(entry.name, datatype.name, tuple(entry.shape), data)
            _check_size(tensor, datatype, f"output {entry.name!r}")
        except InvalidRequest as error:
            raise BackendFailed(pb.model_name, str(error)) from None
        outputs.append(tensor)
    parameters = _parameters_of(pb.parameters, "parameters") if pb.parameters else {}
    return InferResponse(pb.model_name, outputs, pb.model_version, pb.id, parameters)


def encode_infer_response(response: InferResponse) -> Any:
    """The `ModelInferResponse` of a response, with `raw_output_contents`, as Triton always answers.

    Raises:
        InvalidRequest: As for `encode_infer_request`.
    """
    return _response_message(response, [_bytes_of(t.data) for t in response.outputs])


def large_infer_response(response: InferResponse) -> LargeMessage | None:
    """The same for a large response, whose tensors are borrowed until it is serialized; `None` for any other one.

    Raises:
        InvalidRequest: As for `encode_infer_request`.
    """
    if response.size_bytes < LARGE_BYTES:
        return None
    return LargeMessage(_response_message(response, ()), RAW_OUTPUT_FIELD, [t.data for t in response.outputs])


def _response_message(response: InferResponse, contents: Sequence[bytes]) -> Any:
    pb = service_pb2.ModelInferResponse(
        model_name=response.model_name,
        model_version=response.model_version,
        id=response.id,
        outputs=[
            service_pb2.ModelInferResponse.InferOutputTensor(name=t.name, datatype=t.datatype, shape=t.shape)
            for t in response.outputs
        ],
        raw_output_contents=contents,
    )
    if response.parameters:
        _set_parameters(pb.parameters, response.parameters, "parameters")
    return pb


def _bytes_of(data: Buffer) -> bytes:
    return data if isinstance(data, bytes) else bytes(data)


def _parameters_of(pb: Mapping[str, Any], field: str) -> Parameters:
    parameters: Parameters = {}
    for key, parameter in pb.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(parameter_field(field, key), "no value", f"one of {', '.join(_choices(parameter))}")
        parameters[key] = getattr(parameter, choice)
    return parameters


def _choices(parameter: Any) -> Iterable[str]:
    return (descriptor.name for descriptor in parameter.DESCRIPTOR.fields)


def _set_parameters(pb: Any, parameters: Parameters, field: str) -> None:
    for key, value in parameters.items():
        if key == "sequence_id" and type(value) is int and value > INT64_MAX:
            value -= 2**64  # Triton reads its `int64_param` as an unsigned one, and takes no other
        setattr(pb[key], _choice_of(key, value, field), value)


def _choice_of(key: str, value: ParameterValue, field: str) -> str:
    if isinstance(value, bool):
        return "bool_param"
    if isinstance(value, str):
        return "string_param"
    if isinstance(value, float):
        return "double_param"
    if isinstance(value, int):
        # Triton takes `uint64_param` for `priority` alone, and for that `int64_param` too where the value fits.
        if INT64_MIN <= value <= INT64_MAX:
            return "int64_param"
        if 0 <= value <= UINT64_MAX:
            return "uint64_param"
        raise InvalidRequest(parameter_field(field, key), "an integer of more than 64 bits", "one of at most 64 bits")
    raise InvalidRequest(parameter_field(field, key), type(value).__name__, "a bool, int, float or str")
