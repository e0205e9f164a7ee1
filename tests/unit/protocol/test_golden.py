"""Our HTTP codec beside a real Triton's recorded answers; what was asked is in `tests.contract.table`."""

from __future__ import annotations

import orjson
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from serve_app.errors import ServeAppError, SharedMemoryNotFound
from serve_app.protocol import binary, client_codec, grpc_codec
from serve_app.protocol.messages import InferResponse, ModelSpec
from serve_app.protocol.model_spec import model_spec_from
from serve_app.protocol.validation import check_request
from serve_app.settings import LimitSettings
from tests.contract.case import Case
from tests.contract.differences import LEFT_OUT, OUTPUT_ORDER, SHARED_MEMORY
from tests.contract.table import CODEC_CASES
from tests.support import golden
from tests.support.tensors import canonical

GOLDEN = golden.load()


def spec_of(model: str) -> ModelSpec:
    recorded = GOLDEN.models[model]
    metadata = service_pb2.ModelMetadataResponse.FromString(recorded.metadata_pb)
    return model_spec_from(metadata, model_config_pb2.ModelConfig.FromString(recorded.config_pb))


def answer(case: Case) -> binary.EncodedBody:
    """What an echo model behind our codecs answers; the tensors go through protobuf as they do on the way to Triton."""
    spec = spec_of(case.model)
    decoded = binary.decode_infer_request(
        case.body,
        model_name=case.model,
        model_version="",
        header_length=case.header_length,
        limits=LimitSettings(),
        spec=spec,
    )
    check_request(decoded.request, spec, LimitSettings())
    if decoded.request.regions:
        raise SharedMemoryNotFound("nothing is registered here, as nothing was when the answers were recorded")
    decoded.wants_binary.check(decoded.request, spec)
    request = grpc_codec.decode_infer_request(grpc_codec.encode_infer_request(decoded.request))
    wanted = [output.name for output in request.outputs]
    outputs = [tensor for tensor in request.inputs if tensor.name in wanted or not wanted]
    response = InferResponse(case.model, outputs, spec.versions[-1], request.id)
    return binary.encode_infer_response(response, decoded.wants_binary)


# Those that are made behind the codecs.
NOT_OURS = ("", OUTPUT_ORDER, LEFT_OUT, SHARED_MEMORY)


@pytest.mark.parametrize("case", [c for c in CODEC_CASES if c.difference in NOT_OURS], ids=lambda case: case.name)
def test_answers_and_refuses_like_triton(case: Case) -> None:
    """Where we claim no difference, the same requests are refused and the others get the same bits in the same form."""
    recorded = GOLDEN.answers[case.name]
    if recorded.status != 200:
        with pytest.raises(ServeAppError):
            answer(case)
        return
    ours = answer(case)
    assert ours.header_length == recorded.header_length
    has_json_floats = b'"datatype":"FP' in recorded.body and b'"data":' in recorded.body
    if not has_json_floats:
        assert ours.body == recorded.body
        return
    # Triton writes a float32 as the double it is, we with the fewest digits that are that float32.
    left = client_codec.decode_infer_response(ours.body, header_length=ours.header_length)
    right = client_codec.decode_infer_response(recorded.body, header_length=recorded.header_length)
    assert [canonical(tensor) for tensor in left.outputs] == [canonical(tensor) for tensor in right.outputs]
    assert (left.id, left.model_name, left.model_version) == (right.id, right.model_name, right.model_version)


@pytest.mark.parametrize("case", [c for c in CODEC_CASES if c.difference not in NOT_OURS], ids=lambda case: case.name)
def test_answers_otherwise_where_the_table_says_so(case: Case) -> None:
    """Each difference is one: we answer what Triton refuses or reads otherwise, or refuse with one line of text."""
    recorded = GOLDEN.answers[case.name]
    if case.ours == "ok":
        assert answer(case).body != recorded.body
    else:
        assert recorded.status in (200, 404, 500)
        with pytest.raises(ServeAppError, match="got "):
            answer(case)


def test_takes_more_rows_than_one_batch() -> None:
    """More rows than `max_batch_size` are refused by Triton and taken by us, since they can be split."""
    case = next(case for case in CODEC_CASES if case.name == "too many rows")
    assert GOLDEN.answers[case.name].status == 400
    assert orjson.loads(answer(case).body)["outputs"][0]["shape"] == [5, 1]
