"""The same fault has the same meaning on every way in: one table, HTTP in JSON and binary, gRPC, and the handle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from serve_app import errors
from serve_app.ingress.grpc_errors import grpc_status_of
from serve_app.ingress.http_errors import http_status_of
from tests.support.stack import Stack
from tests.support.ways_in import client_inputs

pytestmark = pytest.mark.integration

FP32 = np.float32


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        model: Asked for.
        inputs: What it is given.
        error: The class that says what is wrong.
        says: Words that the text must have.
        version: Of the model.
        outputs: Wanted.
        timeout_s: Budget, where the fault is that it is too short.
    """

    model: str
    inputs: Mapping[str, Any]
    error: type[errors.ServeAppError]
    says: tuple[str, ...]
    version: str = ""
    outputs: tuple[str, ...] = ()
    timeout_s: float | None = None


IDENTITY = {"INPUT0": np.ones((1, 2), FP32)}
CASES: dict[str, Case] = {
    "unknown model": Case("nothing", IDENTITY, errors.ModelNotFound, ("nothing",)),
    "unknown version": Case("identity", IDENTITY, errors.ModelNotFound, ("identity", "7"), version="7"),
    "unknown input": Case("identity", {"INPUT9": np.ones((1, 2), FP32)}, errors.TensorNameMismatch, ("INPUT0",)),
    "missing input": Case(
        "minilm", {"input_ids": np.ones((1, 4), np.int64)}, errors.TensorNameMismatch, ("attention_mask",)
    ),
    "wrong datatype": Case(
        "identity", {"INPUT0": np.ones((1, 2), np.int64)}, errors.TensorDatatypeMismatch, ("INT64", "FP32")
    ),
    "wrong rank": Case("identity", {"INPUT0": np.ones((2,), FP32)}, errors.TensorShapeMismatch, ("[2]", "[-1, -1]")),
    "wrong length": Case(
        "digits", {"pixels": np.ones((2, 63), FP32)}, errors.TensorShapeMismatch, ("[2, 63]", "[-1, 64]")
    ),
    "no rows": Case("identity", {"INPUT0": np.ones((0, 2), FP32)}, errors.TensorShapeMismatch, ("[0, 2]",)),
    "rows differ": Case(
        "minilm",
        {"input_ids": np.ones((2, 4), np.int64), "attention_mask": np.ones((3, 4), np.int64)},
        errors.TensorShapeMismatch,
        ("attention_mask",),
    ),
    "unknown output": Case("digits", {"pixels": np.ones((1, 64), FP32)}, errors.InvalidRequest, ("x",), outputs=("x",)),
    "backend raises": Case("picky", {"INPUT0": np.full((1, 2), 666.0, FP32)}, errors.BackendFailed, ("666",)),
    "deadline": Case(
        "slow", {"INPUT0": np.full((1, 2), 3000.0, FP32)}, errors.DeadlineExceeded, ("deadline",), timeout_s=0.3
    ),
}

Outcome = tuple[object, str]


def over_http(stack: Stack, case: Case) -> Outcome:
    """The status and text of V2 JSON."""
    inputs = [
        {"name": t.name(), "shape": t.shape(), "datatype": t.datatype(), "data": case.inputs[t.name()].ravel().tolist()}
        for t in client_inputs(triton_http, case.inputs)
    ]
    version = f"/versions/{case.version}" if case.version else ""
    document = {"inputs": inputs, **({"outputs": [{"name": name} for name in case.outputs]} if case.outputs else {})}
    headers = {"x-request-timeout-seconds": str(case.timeout_s)} if case.timeout_s else {}
    url = f"http://{stack.http}/v2/models/{case.model}{version}/infer"
    answer = requests.post(url, json=document, headers=headers, timeout=30)
    assert list(answer.json()) == ["error"]
    return answer.status_code, answer.json()["error"]


def over_http_binary(stack: Stack, case: Case) -> Outcome:
    """What an unchanged `tritonclient.http` raises."""
    with triton_http.InferenceServerClient(stack.http) as client, pytest.raises(InferenceServerException) as raised:
        client.infer(
            case.model,
            client_inputs(triton_http, case.inputs),
            model_version=case.version,
            outputs=[triton_http.InferRequestedOutput(name) for name in case.outputs] or None,
            headers={"x-request-timeout-seconds": str(case.timeout_s)} if case.timeout_s else None,
        )
    return int(raised.value.status() or 0), raised.value.message()


def over_grpc(stack: Stack, case: Case) -> Outcome:
    """What an unchanged `tritonclient.grpc` raises."""
    with triton_grpc.InferenceServerClient(stack.grpc) as client, pytest.raises(InferenceServerException) as raised:
        client.infer(
            case.model,
            client_inputs(triton_grpc, case.inputs),
            model_version=case.version,
            outputs=[triton_grpc.InferRequestedOutput(name) for name in case.outputs] or None,
            client_timeout=case.timeout_s,
        )
    return str(raised.value.status()).removeprefix("StatusCode."), raised.value.message()


def over_handle(stack: Stack, case: Case) -> Outcome:
    """What our client raises."""
    with pytest.raises(errors.ServeAppError) as raised:
        stack.client.infer(
            case.model,
            case.inputs,
            model_version=case.version,
            outputs=list(case.outputs) or None,
            timeout_s=case.timeout_s,
        )
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize("way", [over_http, over_http_binary, over_grpc, over_handle], ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_means_the_same_everywhere(stack: Stack, way: Callable[[Stack, Case], Outcome], name: str) -> None:
    """The right status for the error's class, and a text of one line that says what was wrong."""
    case = CASES[name]
    status, text = way(stack, case)
    example = case.error.__new__(case.error)
    if way is over_handle:
        assert isinstance(status, type)
        assert issubclass(status, case.error)
    elif way is over_grpc:
        assert grpc.StatusCode[str(status)] is grpc_status_of(example)
    elif status:  # tritonclient.http keeps the status of most errors only
        assert status == http_status_of(example)
    assert "\n" not in text
    assert "Traceback" not in text
    is_the_clients_own = way is over_grpc and case.error is errors.DeadlineExceeded  # grpc ends the call by itself
    for word in () if is_the_clients_own else case.says:
        assert word in text
