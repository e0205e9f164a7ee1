"""Inputs and outputs whose data is in shared memory, through the codecs and the checks."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from tritonclient.grpc import service_pb2

from serve_app.batching.signature import signature_of
from serve_app.errors import InvalidRequest, RequestTooLarge, TensorShapeMismatch
from serve_app.protocol import binary, grpc_codec
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec, RequestedOutput, TensorSpec
from serve_app.protocol.output_plan import BINARY_ONLY, JSON_ONLY
from serve_app.protocol.tensor import Region, Tensor
from serve_app.protocol.validation import check_request
from serve_app.settings import LimitSettings

LIMITS = LimitSettings()


def region(name: str = "r", size: object = 32, **more: object) -> dict[str, object]:
    return {"shared_memory_region": name, "shared_memory_byte_size": size, **more}


def decode_http(
    parameters: dict[str, object], *, tail: bytes = b"", place: str = "inputs", **more: Any
) -> InferRequest:
    """A request of one input and one output, one of which has these parameters."""
    tensor: dict[str, Any] = {"name": "INPUT0", "shape": [2, 4], "datatype": "FP32"}
    output: dict[str, Any] = {"name": "OUTPUT0"}
    if place == "inputs":
        tensor["parameters"] = parameters
    else:
        tensor["data"], output["parameters"] = [0.0] * 8, parameters
    body = orjson.dumps({"inputs": [{**tensor, **more}], "outputs": [output]})
    decoded = binary.decode_infer_request(
        body + tail,
        model_name="m",
        model_version="",
        header_length=len(body) if tail else None,
        limits=LIMITS,
    )
    return decoded.request


def grpc_message(
    parameters: dict[str, object], *, raw: tuple[bytes, ...] = (), place: str = "inputs", is_typed: bool = False
) -> Any:
    pb = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=raw)
    tensor = pb.inputs.add(name="INPUT0", shape=[2, 4], datatype="FP32")
    entry = tensor if place == "inputs" else pb.outputs.add(name="OUTPUT0")
    if is_typed:
        tensor.contents.fp32_contents.extend([0.0] * 8)
    for key, value in parameters.items():
        setattr(entry.parameters[key], "string_param" if isinstance(value, str) else "int64_param", value)
    return pb


def decode(way: str, parameters: dict[str, object], place: str) -> InferRequest:
    if way == "http":
        return decode_http(parameters, place=place)
    return grpc_codec.decode_infer_request(
        grpc_message(parameters, place=place, raw=() if place == "inputs" else (b"\0" * 32,))
    )


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_a_region_takes_the_place_of_data(way: str) -> None:
    """Both ways in know where the data is, and Triton is told in its own words."""
    request = decode(way, region("a", 32, shared_memory_offset=64), "inputs")
    assert request.inputs[0].region == Region("a", 32, 64)
    assert (request.inputs[0].size_bytes, request.regions) == (0, ("a",))
    pb = grpc_codec.encode_infer_request(request)
    assert not pb.raw_input_contents
    assert pb.inputs[0].parameters["shared_memory_region"].string_param == "a"
    assert pb.inputs[0].parameters["shared_memory_byte_size"].int64_param == 32
    assert pb.inputs[0].parameters["shared_memory_offset"].int64_param == 64
    assert grpc_codec.decode_infer_request(pb).inputs[0].region == Region("a", 32, 64)


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_an_output_in_a_region_comes_back_without_data(way: str) -> None:
    """As Triton answers: name, datatype and shape; over gRPC with an empty entry for it."""
    request = decode(way, region("b", 64), "outputs")
    assert request.regions == ("b",)
    assert grpc_codec.output_regions(request) == {"OUTPUT0": Region("b", 64)}
    pb = service_pb2.ModelInferResponse(model_name="m", model_version="1", raw_output_contents=[b""])
    pb.outputs.add(name="OUTPUT0", datatype="FP32", shape=[2, 4])
    answer = grpc_codec.decode_infer_response(pb, grpc_codec.output_regions(request))
    assert grpc_codec.encode_infer_response(answer) == pb
    for plan in (JSON_ONLY, BINARY_ONLY):
        body = binary.encode_infer_response(answer, plan)
        assert body.header_length is None
        assert orjson.loads(body.body)["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [2, 4]}]


def test_inputs_with_and_without_regions_in_one_request() -> None:
    """Raw contents are those of the inputs that carry their own, in their order."""
    inputs = [
        Tensor("a", "FP32", (1,), b"aaaa"),
        Tensor("b", "FP32", (1,), b"", Region("r", 4)),
        Tensor("c", "FP32", (1,), b"cccc"),
    ]
    pb = grpc_codec.encode_infer_request(InferRequest("m", inputs, regions=("r",)))
    assert list(pb.raw_input_contents) == [b"aaaa", b"cccc"]
    back = grpc_codec.decode_infer_request(pb)
    assert [(tensor.data, tensor.region) for tensor in back.inputs] == [
        (b"aaaa", None),
        (b"", Region("r", 4)),
        (b"cccc", None),
    ]
    pb.raw_input_contents.append(b"dddd")
    with pytest.raises(InvalidRequest, match="got 3 entries, expected 2"):
        grpc_codec.decode_infer_request(pb)


@pytest.mark.parametrize("place", ["inputs", "outputs"])
@pytest.mark.parametrize("way", ["http", "grpc"])
@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"shared_memory_region": "r"}, "shared_memory_byte_size: got nothing"),
        (region(size=0), "shared_memory_byte_size: got 0"),
        (region(size=-1), "shared_memory_byte_size: got an integer out of range"),
        (region(size="4"), "shared_memory_byte_size: got a string"),
        (region(shared_memory_offset=-1), "shared_memory_offset: got an integer out of range"),
        (region(""), "shared_memory_region: got an empty string"),
        (region("serve_app.x"), "shared_memory_region: got a reserved name"),
        ({"shared_memory_byte_size": 4}, "shared_memory_region: got nothing"),
        ({"shared_memory_offset": 4}, "shared_memory_region: got nothing"),
        ({"shared_memory_region": 5, "shared_memory_byte_size": 4}, "shared_memory_region: got an integer"),
    ],
)
def test_what_makes_no_sense_is_refused(way: str, place: str, parameters: dict[str, object], text: str) -> None:
    """With the path of what is wrong, whichever way it comes."""
    with pytest.raises(InvalidRequest) as caught:
        decode(way, parameters, place)
    assert f"{place}[0].parameters.{text}" in str(caught.value)


def test_a_region_beside_data_is_refused() -> None:
    """Nobody could say which of the two is meant."""
    with pytest.raises(InvalidRequest, match="expected one of them"):
        decode_http(region(), data=[0.0] * 8)
    with pytest.raises(InvalidRequest, match="expected one of them"):
        decode_http(region(binary_data_size=32), tail=b"\0" * 32)
    with pytest.raises(InvalidRequest, match="contents beside shared_memory_region"):
        grpc_codec.decode_infer_request(grpc_message(region(), is_typed=True))
    for other in ({"binary_data": True}, {"classification": 2}):
        with pytest.raises(InvalidRequest, match=f"both shared_memory_region and {next(iter(other))}"):
            decode_http(region(**other), place="outputs")


SPEC = ModelSpec(
    "m",
    "1",
    ("1",),
    "python",
    {"INPUT0": TensorSpec("INPUT0", "FP32", (-1, 4))},
    {"OUTPUT0": TensorSpec("OUTPUT0", "FP16", (-1, 4))},
    max_batch_size=4,
)


def in_region(rows: int, size_bytes: int) -> InferRequest:
    return InferRequest("m", [Tensor("INPUT0", "FP32", (rows, 4), b"", Region("r", size_bytes))], regions=("r",))


def test_the_size_has_to_be_that_of_the_shape() -> None:
    """As in Triton, more is as wrong as less; and what is in a region cannot be cut into batches."""
    assert check_request(in_region(4, 64), SPEC, LIMITS) == 4
    for size_bytes in (32, 128):
        with pytest.raises(TensorShapeMismatch, match=f"got {size_bytes} bytes of data, expected 64"):
            check_request(in_region(4, size_bytes), SPEC, LIMITS)
    with pytest.raises(RequestTooLarge, match="8 rows, the limit is 4 rows"):
        check_request(in_region(8, 128), SPEC, LIMITS)


def test_an_output_in_a_region_needs_no_json() -> None:
    """FP16 has none, and none is written."""
    request = InferRequest("m", [], outputs=[RequestedOutput("OUTPUT0", {"shared_memory_region": "r"})])
    JSON_ONLY.check(request, SPEC)
    request.outputs[0].parameters.clear()
    with pytest.raises(InvalidRequest, match="travels only as binary"):
        JSON_ONLY.check(request, SPEC)


def test_nothing_is_merged_with_it() -> None:
    """Not even the same request once more."""
    assert signature_of(in_region(1, 16)) != signature_of(in_region(1, 16))


def test_an_answer_that_nobody_asked_into_a_region_still_has_to_fill_its_shape() -> None:
    """Only outputs of that request may come without data."""
    answer = InferResponse("m", [Tensor("OUTPUT0", "FP32", (1,), b"", Region("r", 4))])
    assert answer.outputs[0].size_bytes == 0
    assert "Region" in repr(answer.outputs[0])
    pb = service_pb2.ModelInferResponse(model_name="m", raw_output_contents=[b""])
    pb.outputs.add(name="OUTPUT1", datatype="FP32", shape=[1])
    with pytest.raises(Exception, match="0 bytes of data"):
        grpc_codec.decode_infer_response(pb, {"OUTPUT0": Region("r", 4)})
