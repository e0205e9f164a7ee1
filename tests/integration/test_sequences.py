"""Sequences over two real servers: each keeps its server whichever way its requests come, and is not moved."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2

from serve_app.dataplane import DataPlane
from serve_app.errors import RequestRejected, RequestTooLarge, Unavailable
from serve_app.fleet.supervisor import TritonSupervisor
from serve_app.ingress.grpc_servicer import GrpcServicer
from serve_app.ingress.http_app import http_app
from serve_app.protocol.messages import InferRequest, Parameters
from serve_app.protocol.tensor import Tensor
from serve_app.triton.member import MemberState
from tests.support.asgi import request
from tests.support.front import LIMITS, running_plane
from tests.support.stack import ROOT
from tests.support.triton_server import running_triton

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

MODELS = ("accumulate", "accumulate_oldest")


class Servicer(GrpcServicer):
    """The RPCs, called as Ray Serve calls them."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane


@dataclass(frozen=True)
class Pair:
    """Two servers and a front over both."""

    plane: DataPlane
    servers: tuple[TritonSupervisor, ...]

    async def step(self, way: str, model: str, value: int, parameters: Parameters) -> tuple[int, int]:
        """One request of a sequence: the sum, and the process that keeps it."""
        if way == "http":
            tensor = {"name": "VALUE", "datatype": "INT32", "shape": [1, 1], "data": [value]}
            body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
            app = http_app(self.plane, LIMITS)
            answer = await request(app, "POST", f"/v2/models/{model}/infer", body, leave=asyncio.Event())
            assert answer.status == 200, answer.body
            values = {output["name"]: output["data"][0] for output in answer.json["outputs"]}
            return values["SUM"], values["PROCESS"]
        if way == "grpc":
            message = service_pb2.ModelInferRequest(model_name=model)
            message.inputs.add(name="VALUE", datatype="INT32", shape=[1, 1])
            message.raw_input_contents.append(np.int32(value).tobytes())
            for key, item in parameters.items():
                kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(item)]
                setattr(message.parameters[key], kind, item)
            pb = await Servicer(self.plane).ModelInfer(message, None)
            return tuple(int(np.frombuffer(raw, np.int32)[0]) for raw in pb.raw_output_contents)  # type: ignore[return-value]  # two outputs
        answer_of = await self.plane.infer(make_request(model, value, parameters))
        return tuple(int(tensor.to_numpy()[0, 0]) for tensor in answer_of.outputs)  # type: ignore[return-value]


def make_request(model: str, value: int, parameters: Parameters, *, rows: int = 1) -> InferRequest:
    return InferRequest(model, [Tensor.from_numpy("VALUE", np.full((rows, 1), value, np.int32))], parameters=parameters)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Two servers of one repository."""
    repository: Path = tmp_path_factory.mktemp("sequences")
    for model in MODELS:
        shutil.copytree(ROOT / "tests" / "support" / "model_repository" / model, repository / model)
    async with contextlib.AsyncExitStack() as stack:
        servers = await asyncio.gather(*(stack.enter_async_context(running_triton(repository)) for _ in range(2)))
        endpoints = [server.endpoint for server in servers if server.endpoint is not None]
        plane, router = await stack.enter_async_context(running_plane(*endpoints))
        while not all(entry.state is MemberState.AVAILABLE for entry in router.statistics().endpoints):
            await router.repository_index(timeout_s=5.0)
        yield Pair(plane, tuple(servers))


def flags(sequence_id: int | str, index: int, count: int) -> Parameters:
    found: Parameters = {"sequence_id": sequence_id}
    if index == 0:
        found["sequence_start"] = True
    if index == count - 1:
        found["sequence_end"] = True
    return found


async def run(pair: Pair, model: str, sequence_id: int | str, ways: list[str]) -> set[int]:
    """A whole sequence, one request by each of `ways`; the processes that answered."""
    total, processes = 0, set()
    for index, way in enumerate(ways):
        total += index + 1
        found, process = await pair.step(way, model, index + 1, flags(sequence_id, index, len(ways)))
        assert found == total
        processes.add(process)
    return processes


@pytest.mark.parametrize("model", MODELS)
async def test_each_sequence_keeps_its_server(pair: Pair, model: str) -> None:
    """Integer and string ids, many at once, by HTTP, gRPC and handle in turn; both servers have their share."""
    ways = ["http", "grpc", "handle"] * 3
    ids: list[Any] = [*range(1, 5), *(f"name-{number}" for number in range(4))]
    all_processes: set[int] = set()
    for some in (ids[:4], ids[4:]):  # the direct strategy has a slot for each of a model's four rows
        for processes in await asyncio.gather(*(run(pair, model, sequence_id, ways) for sequence_id in some)):
            assert len(processes) == 1
            all_processes |= processes
    assert len(all_processes) == 2


async def test_rows_of_a_sequence_are_not_cut(pair: Pair) -> None:
    """More than Triton takes in one request are refused, since they could not stay one request."""
    with pytest.raises(RequestTooLarge):
        await pair.plane.infer(make_request("accumulate", 1, flags(9, 0, 2), rows=5))


@pytest.mark.parametrize("model", MODELS)
async def test_a_replica_finds_sequences_that_it_has_not_begun(pair: Pair, model: str) -> None:
    """Begun by one replica while there was one server, gone on by another that knows two: none begins anew."""
    first, second = [server.endpoint for server in pair.servers]
    assert first is not None
    assert second is not None
    ids = range(40, 44)
    async with running_plane(first) as (plane, _):
        began = {}
        for number in ids:
            answer = await plane.infer(make_request(model, 1, flags(number, 0, 3)))
            began[number] = int(answer.outputs[1].to_numpy()[0, 0])
    async with running_plane(second, first) as (plane, router):
        while not all(entry.state is MemberState.AVAILABLE for entry in router.statistics().endpoints):
            await router.repository_index(timeout_s=5.0)
        for index in (1, 2):
            for number in ids:
                answer = await plane.infer(make_request(model, 2, flags(number, index, 3)))
                total, process = (int(tensor.to_numpy()[0, 0]) for tensor in answer.outputs)
                assert (total, process) == (1 + 2 * index, began[number])


async def test_a_lost_server_ends_its_sequences_with_an_error(pair: Pair) -> None:
    """Never a sum that started from nothing elsewhere; the other server's sequences go on."""
    started = {}
    for number in range(20, 28):
        _, started[number] = await pair.step("handle", "accumulate_oldest", 1, flags(number, 0, 3))
    assert len(set(started.values())) == 2
    server = pair.servers[0].statistics()["pid"]
    lost = {process for process in started.values() if _is_child(process, server)}
    assert len(lost) == 1
    os.kill(server, signal.SIGKILL)
    for number, process in started.items():
        step = pair.step("handle", "accumulate_oldest", 5, flags(number, 1, 3))
        if process in lost:
            # The first one meets the loss; by the next ones the other server is asked, which knows no such sequence.
            with pytest.raises((Unavailable, RequestRejected)) as error:
                await step
            assert isinstance(error.value, Unavailable) or "START" in str(error.value)
        else:
            assert (await step)[0] == 6


def _is_child(process: int, parent: int) -> bool:
    return any(ancestor.pid == parent for ancestor in psutil.Process(process).parents())
