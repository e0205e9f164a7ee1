"""The ways a request can reach a model, each as one function with arrays in and arrays out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from serve_app.protocol.datatypes import DATATYPES
from serve_app.protocol.tensor import Tensor
from tests.support.stack import Stack

Arrays = Mapping[str, npt.NDArray[Any]]
WayIn = Callable[..., Arrays]

TIMEOUT_S = 60.0


def http_json(stack: Stack, model: str, inputs: Arrays, *, outputs: Sequence[str] = ()) -> Arrays:
    """Plain JSON, as curl would send it."""
    document: dict[str, Any] = {"inputs": [_json_input(name, array) for name, array in inputs.items()]}
    if outputs:
        document["outputs"] = [{"name": name} for name in outputs]
    answer = requests.post(f"http://{stack.http}/v2/models/{model}/infer", json=document, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return {output["name"]: _json_output(output) for output in answer.json()["outputs"]}


def _json_input(name: str, array: npt.NDArray[Any]) -> dict[str, Any]:
    tensor = Tensor.from_numpy(name, array)
    data = array.reshape(-1).tolist()
    if tensor.datatype == "BYTES":
        data = [item.decode() if isinstance(item, bytes) else item for item in data]
    return {"name": name, "datatype": tensor.datatype, "shape": list(array.shape), "data": data}


def _json_output(output: Mapping[str, Any]) -> npt.NDArray[Any]:
    array = np.array(output["data"], dtype=DATATYPES[output["datatype"]].numpy_dtype)
    return array.reshape(output["shape"])


def http_binary(stack: Stack, model: str, inputs: Arrays, *, outputs: Sequence[str] = ()) -> Arrays:
    """An unchanged `tritonclient.http`."""
    with triton_http.InferenceServerClient(stack.http, network_timeout=TIMEOUT_S) as client:
        wanted = [triton_http.InferRequestedOutput(name, binary_data=True) for name in outputs]
        answer = client.infer(model, client_inputs(triton_http, inputs), outputs=wanted or None)
        return {output["name"]: answer.as_numpy(output["name"]) for output in answer.get_response()["outputs"]}


def grpc(stack: Stack, model: str, inputs: Arrays, *, outputs: Sequence[str] = ()) -> Arrays:
    """An unchanged `tritonclient.grpc`."""
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        wanted = [triton_grpc.InferRequestedOutput(name) for name in outputs]
        answer = client.infer(
            model, client_inputs(triton_grpc, inputs), outputs=wanted or None, client_timeout=TIMEOUT_S
        )
        return {output.name: answer.as_numpy(output.name) for output in answer.get_response().outputs}


def client_inputs(library: Any, inputs: Arrays) -> list[Any]:
    """The `InferInput`s of one of Triton's client libraries."""
    result = []
    for name, array in inputs.items():
        tensor = library.InferInput(name, list(array.shape), Tensor.from_numpy(name, array).datatype)
        tensor.set_data_from_numpy(array)
        result.append(tensor)
    return result


def handle(stack: Stack, model: str, inputs: Arrays, *, outputs: Sequence[str] = ()) -> Arrays:
    """Ray Serve's handle, as it is."""
    answer: Arrays = stack.handle.infer.remote(model, dict(inputs), outputs=list(outputs) or None).result(
        timeout_s=TIMEOUT_S
    )
    return answer


def client(stack: Stack, model: str, inputs: Arrays, *, outputs: Sequence[str] = ()) -> Arrays:
    """Our own client over the handle."""
    answer: Arrays = stack.client.infer(model, inputs, outputs=list(outputs) or None, timeout_s=TIMEOUT_S)
    return answer


WAYS_IN: tuple[WayIn, ...] = (http_json, http_binary, grpc, handle, client)
