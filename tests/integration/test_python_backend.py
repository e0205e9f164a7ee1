"""Python models on the real server and the numpy at hand: every datatype and shape comes back as it went in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.triton_server import python_config, running_triton, write_model

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

HAS_NUMPY_1 = np.__version__.startswith("1.")
SHAPES = ((3, 2, 4), (1, 0, 2), (8, 1, 1), (1, 300, 300))
NUMBERS = {
    "BOOL": "?",
    "INT8": "i1",
    "INT16": "i2",
    "INT32": "i4",
    "INT64": "i8",
    "UINT8": "u1",
    "UINT16": "u2",
    "UINT32": "u4",
    "UINT64": "u8",
    "FP16": "f2",
    "FP32": "f4",
    "FP64": "f8",
}

LENGTHS_PY = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            lengths = np.array([sum(text) for text in texts.ravel()], dtype=np.int64).reshape(texts.shape)
            view = np.stack([lengths, lengths], axis=-1)[..., 0]  # Not contiguous.
            view.flags.writeable = False
            answer = pb_utils.Tensor("SUM", view)
            assert isinstance(answer, pb_utils.Tensor)
            answers.append(pb_utils.InferenceResponse([answer]))
        return answers
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """A raw gRPC stub of one server with a model per datatype."""
    repository: Path = tmp_path_factory.mktemp("datatypes")
    for kind in [*NUMBERS, "STRING"]:
        write_model(repository, kind.lower(), config=python_config(datatype=f"TYPE_{kind}", dims="-1,-1"))
    config = (
        'backend: "python" max_batch_size: 8 input { name: "TEXT" data_type: TYPE_STRING dims: [-1] } '
        'output { name: "SUM" data_type: TYPE_INT64 dims: [-1] }'
    )
    write_model(repository, "lengths", config=config, files={"1/model.py": LENGTHS_PY})
    async with running_triton(repository) as supervisor:
        assert supervisor.endpoint is not None
        assert supervisor.statistics()["reasons"] == {}
        async with grpc.aio.insecure_channel(supervisor.endpoint.address) as channel:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def request(model: str, name: str, datatype: str, shape: tuple[int, ...], raw: bytes) -> service_pb2.ModelInferRequest:
    """One input tensor."""
    message = service_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    message.raw_input_contents.append(raw)
    return message


def raw_strings(texts: list[bytes]) -> bytes:
    """BYTES on the wire."""
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("datatype", NUMBERS)
async def test_numbers_come_back_bit_for_bit(stub: Any, datatype: str, shape: tuple[int, ...]) -> None:
    """An identity model returns the bytes and the shape that it was given, empty and large tensors too."""
    values: NDArray[Any] = np.random.default_rng(3).integers(0, 100, shape).astype(NUMBERS[datatype])
    answer = await stub.ModelInfer(request(datatype.lower(), "INPUT0", datatype, shape, values.tobytes()), timeout=10)
    assert tuple(answer.outputs[0].shape) == shape
    assert answer.raw_output_contents[0] == values.tobytes()


async def test_strings_arrive(stub: Any) -> None:
    """Text of any length, and none, reaches a model, and views and read-only arrays leave it."""
    texts = [b"", b"a", "Zürich".encode(), b"\xff\x00\xff", b"x" * 5000, b"end"]
    answer = await stub.ModelInfer(request("lengths", "TEXT", "BYTES", (2, 3), raw_strings(texts)), timeout=10)
    assert np.frombuffer(answer.raw_output_contents[0], "i8").tolist() == [sum(text) for text in texts]


async def test_strings_leave_or_say_why_not(stub: Any) -> None:
    """With numpy 1 text comes back; with numpy 2, where this Triton would lose it, the model's error says so."""
    raw = raw_strings([b"", b"a", b"bc", "ü".encode()])
    call = stub.ModelInfer(request("string", "INPUT0", "BYTES", (1, 2, 2), raw), timeout=10)
    if HAS_NUMPY_1:
        assert (await call).raw_output_contents[0] == raw
    else:
        with pytest.raises(grpc.aio.AioRpcError, match="numpy 1 only"):
            await call
