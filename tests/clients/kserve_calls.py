"""Every V2 call of the KServe client; run by the Python of `.venv/clients`, where kserve is.

`python kserve_calls.py http://host:port host:port` prints one JSON object: what each call gave.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput

Call = Callable[[], Awaitable[Any]]

VALUES = [[1.5, 2.0, 3.0]]
MODEL = "identity"


def request(*, is_binary: bool, **options: Any) -> InferRequest:
    """One input, as a list or as an array's bytes."""
    tensor = InferInput("INPUT0", [1, 3], "FP32")
    if is_binary:
        tensor.set_data_from_numpy(np.array(VALUES, np.float32), binary_data=True)
    else:
        tensor = InferInput("INPUT0", [1, 3], "FP32", data=VALUES[0])
    return InferRequest(MODEL, [tensor], request_id="42", **options)


def seen(response: Any) -> list[Any]:
    """What a response says."""
    output = response.get_output_by_name("OUTPUT0")
    return [response.id, response.model_name, output.datatype, output.as_numpy().tolist()]


async def outcome(call: Call) -> Any:
    """What a call gives; an error's status for one that is refused."""
    try:
        return await call()
    except httpx.HTTPStatusError as error:
        return f"{error.response.status_code} {str(error).partition(',')[0]}"
    except grpc.RpcError as error:
        return f"{error.code().name} {error.details()}"


def rest_calls(client: InferenceRESTClient, url: str) -> dict[str, Call]:
    async def infer(model: str = MODEL, **options: Any) -> list[Any]:
        return seen(await client.infer(url, request(**options), model_name=model))

    asked = [RequestedOutput("OUTPUT0", {"binary_data": True})]
    return {
        "live": lambda: client.is_server_live(url),
        "ready": lambda: client.is_server_ready(url),
        "model ready": lambda: client.is_model_ready(url, MODEL),
        "model unknown": lambda: client.is_model_ready(url, "nothing"),
        "infer JSON": lambda: infer(is_binary=False),
        "infer binary": lambda: infer(is_binary=True),
        "infer binary there and back": lambda: infer(is_binary=True, parameters={"binary_data_output": True}),
        "infer an output": lambda: infer(is_binary=False, request_outputs=asked, parameters={"priority": 1}),
        "infer unknown": lambda: infer("nothing", is_binary=False),
    }


def grpc_calls(client: InferenceGRPCClient) -> dict[str, Call]:
    async def infer(model: str = MODEL, **options: Any) -> list[Any]:
        asked = request(**options)
        asked.model_name = model
        return seen(await client.infer(asked))

    return {
        "live": client.is_server_live,
        "ready": client.is_server_ready,
        "model ready": lambda: client.is_model_ready(MODEL),
        "model unknown": lambda: client.is_model_ready("nothing"),
        "infer typed contents": lambda: infer(is_binary=False),
        "infer raw contents": lambda: infer(is_binary=True),
        "infer an output": lambda: infer(
            is_binary=True, request_outputs=[RequestedOutput("OUTPUT0")], parameters={"priority": 1}
        ),
        "infer unknown": lambda: infer("nothing", is_binary=True),
    }


async def main(url: str, address: str) -> None:
    logging.disable(logging.CRITICAL)
    async with (
        InferenceRESTClient(RESTConfig(protocol="v2")) as rest,
        InferenceGRPCClient(address) as rpc,
    ):
        calls = {
            **{f"rest {name}": call for name, call in rest_calls(rest, url).items()},
            **{f"grpc {name}": call for name, call in grpc_calls(rpc).items()},
        }
        print(json.dumps({name: await outcome(call) for name, call in calls.items()}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
