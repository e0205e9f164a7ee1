"""Statistics, loads, unloads and settings through the front's own code, with two fake servers behind it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import orjson
import pytest
from starlette.types import ASGIApp
from tritonclient.grpc import service_pb2

from serve_app.dataplane import DataPlane
from serve_app.errors import InvalidRequest, RequestTooLarge
from serve_app.ingress.http_app import http_app
from serve_app.protocol import control_codec
from serve_app.protocol.server_answers import ServerAnswer
from serve_app.settings import LimitSettings
from serve_app.triton.fake import Failure, FakeModel, FakeTriton
from tests.support.asgi import Answer, request
from tests.support.front import running_plane
from tests.support.waiting import wait_until

LIMITS = LimitSettings()
LOAD, UNLOAD = "/v2/repository/models/identity/load", "/v2/repository/models/identity/unload"


class Log:
    """A change log that keeps what it was given."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, list[str]]] = []
        self.max_bytes = 1000

    def check(self, model_name: str, size_bytes: int) -> None:
        if size_bytes > self.max_bytes:
            raise RequestTooLarge("change", size_bytes, self.max_bytes)

    async def record(self, rpc_name: str, message: Any, answers: Sequence[ServerAnswer]) -> None:
        missed = [answer.endpoint.address for answer in answers if answer.is_missed]
        self.entries.append((rpc_name, message.model_name, missed))

    def check_region(self, name: str) -> None:
        raise AssertionError(name)

    async def record_region(self, rpc_name: str, message: Any, answers: Sequence[ServerAnswer], *, place: str) -> None:
        raise AssertionError(rpc_name)


@dataclass
class Front:
    """An application and what is behind it."""

    app: ASGIApp
    plane: DataPlane
    fakes: tuple[FakeTriton, FakeTriton]
    log: Log

    async def post(self, path: str, document: object = None) -> Answer:
        return await request(self.app, "POST", path, b"" if document is None else orjson.dumps(document), {})

    async def get(self, path: str) -> Answer:
        return await request(self.app, "GET", path)

    async def infer(self, rows: int = 1) -> Answer:
        tensor = {"name": "INPUT0", "shape": [rows, 1], "datatype": "FP32", "data": [1.0] * rows}
        return await self.post("/v2/models/identity/infer", {"inputs": [tensor]})


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    """One replica's insides, without Ray."""
    log = Log()
    async with (
        FakeTriton(FakeModel(), FakeModel(name="other")) as one,
        FakeTriton(FakeModel(), FakeModel(name="other")) as two,
        running_plane(one.endpoint, two.endpoint, limits=LIMITS, names=["identity"], change_log=log) as (plane, _),
    ):
        yield Front(http_app(plane, LIMITS), plane, (one, two), log)


async def test_statistics_are_the_sum_over_the_servers(front: Front) -> None:
    """Of one model, of a version and of all that are served here; an unknown one is 404, and so is one of others."""
    for _ in range(6):
        assert (await front.infer()).status == 200
    for path in ("/v2/models/identity/stats", "/v2/models/identity/versions/1/stats"):
        (model,) = (await front.get(path)).json["model_stats"]
        assert (model["inference_count"], model["batch_stats"][0]["compute_infer"]["count"]) == (6, 6)
    names = [model["name"] for model in (await front.get("/v2/models/stats")).json["model_stats"]]
    assert names == ["identity"]
    for name in ("nobody", "other"):
        assert (await front.get(f"/v2/models/{name}/stats")).status == 404


async def test_an_unloaded_model_is_gone_at_once_and_a_loaded_one_is_back(front: Front) -> None:
    """On every server, and in the front's own table; both are kept for servers that join later."""
    assert (await front.infer()).status == 200
    answer = await front.post(UNLOAD)
    assert (answer.status, answer.body) == (200, b"")
    assert (await front.infer()).status == 503
    assert (await front.get("/v2/models/identity/ready")).status == 503
    assert (await front.post(LOAD, {})).status == 200
    assert (await front.infer()).status == 200
    changes = [("RepositoryModelUnload", "identity"), ("RepositoryModelLoad", "identity")]
    assert [fake.control.changes for fake in front.fakes] == [changes, changes]
    assert front.log.entries == [(*change, []) for change in changes]


async def test_a_config_override_is_in_force_with_the_next_request(front: Front) -> None:
    """The spec is read again before the load is answered, so that batches are cut to the new size."""
    assert (await front.infer(8)).status == 200
    await front.post(LOAD, {"parameters": {"config": '{"max_batch_size": 2}'}})
    assert (await front.plane.model_spec("identity")).max_batch_size == 2
    for fake in front.fakes:
        fake.calls.clear()
    assert (await front.infer(8)).status == 200
    assert {call.rows for fake in front.fakes for call in fake.calls} == {2}


async def test_one_servers_refusal_is_the_answer(front: Front) -> None:
    """With the server's own text; nothing is kept for later servers."""
    refusal = Failure(grpc.StatusCode.INVALID_ARGUMENT, "load failed for model 'identity': no weights")
    front.fakes[1].control.refusals["identity"] = refusal
    answer = await front.post(LOAD)
    assert (answer.status, answer.json["error"]) == (400, refusal.text)
    assert not front.log.entries


async def test_a_server_that_is_away_is_noted(front: Front) -> None:
    """It stops nobody from loading a model on the others."""
    await front.infer()
    await front.fakes[1].kill()
    assert (await front.post(LOAD)).status == 200
    assert front.log.entries == [("RepositoryModelLoad", "identity", [front.fakes[1].address])]
    await front.fakes[0].kill()
    assert (await front.post(LOAD)).status == 503


async def test_what_cannot_be_kept_is_refused_before_anything_is_done(front: Front) -> None:
    """An upload beyond the bound would be missing on the next server."""
    file = base64.b64encode(bytes(2000)).decode()
    answer = await front.post(LOAD, {"parameters": {"config": "{}", "file:1/model.onnx": file}})
    assert answer.status == 413
    assert not front.fakes[0].control.changes


async def test_names_that_are_not_served_here_are_not_loaded(front: Front) -> None:
    """An app that serves one model is no way to change the others."""
    assert (await front.post("/v2/repository/models/other/load")).status == 404
    assert (await front.post("/v2/repository/models/other/unload")).status == 404
    assert (await front.get("/v2/models/other/trace/setting")).status == 404
    assert not front.fakes[0].control.changes


async def test_settings_are_read_from_one_server_and_changed_on_all(front: Front) -> None:
    """Trace and log settings, in Triton's JSON."""
    assert (await front.get("/v2/trace/setting")).json == {"trace_level": ["OFF"], "trace_rate": "1000"}
    assert (await front.post("/v2/trace/setting", {"trace_rate": "5"})).json["trace_rate"] == "5"
    assert (await front.get("/v2/models/identity/trace/setting")).json["trace_rate"] == "5"
    assert (await front.get("/v2/logging")).json == {"log_info": True, "log_verbose_level": 0}
    assert (await front.post("/v2/logging", {"log_verbose_level": 1, "nobody": 2})).json["log_verbose_level"] == 1
    for fake in front.fakes:
        assert (fake.control.trace["trace_rate"], fake.control.log["log_verbose_level"]) == (["5"], 1)


@pytest.mark.parametrize(
    ("path", "document"),
    [
        (LOAD, {"parameters": {"config": 5}}),
        (LOAD, {"parameters": {"nobody": "x"}}),
        (LOAD, {"parameters": {"file:1/model.onnx": "not base64!"}}),
        (LOAD, {"parameters": []}),
        (LOAD, []),
        (UNLOAD, {"parameters": {"unload_dependents": "yes"}}),
        ("/v2/trace/setting", {"trace_rate": 5}),
        ("/v2/logging", {"log_info": 1}),
        ("/v2/logging", {"log_verbose_level": True}),
        ("/v2/logging", {"log_verbose_level": -1}),
    ],
)
async def test_a_body_of_another_form_is_the_callers_fault(front: Front, path: str, document: object) -> None:
    """400 with what was expected, and no server is asked."""
    answer = await front.post(path, document)
    assert answer.status == 400
    assert "expected" in answer.json["error"]
    assert not front.fakes[0].control.changes


@pytest.mark.parametrize("kind", ["system", "cuda"])
async def test_shared_memory_is_refused_in_a_sentence(front: Front, kind: str) -> None:
    """Every path of the extension says 501 and why."""
    root = f"/v2/{kind}sharedmemory"
    answers = [await front.get(f"{path}/status") for path in (root, f"{root}/region/r")]
    answers += [await front.post(f"{root}/region/r/register", {}), await front.post(f"{root}/unregister")]
    assert {answer.status for answer in answers} == {501}
    assert all("send tensors in the request" in answer.json["error"] for answer in answers)


async def test_a_caller_that_leaves_does_not_stop_a_load(front: Front) -> None:
    """Servers go on loading anyway: what they were told is recorded all the same."""
    front.fakes[1].control.latency_s = 0.3
    load = asyncio.ensure_future(front.post(LOAD))
    await wait_until(lambda: bool(front.fakes[0].control.changes), timeout_s=5.0)
    load.cancel()
    await wait_until(lambda: bool(front.log.entries), timeout_s=5.0)
    assert front.plane.control.statistics() == {"num_changes": 1, "num_changing": 0}


async def test_a_load_ends_with_the_replica(front: Front) -> None:
    """Who waits for it learns that the replica is going; later ones are refused."""
    for fake in front.fakes:
        fake.control.latency_s = 60.0
    load = asyncio.ensure_future(front.post(LOAD))
    await wait_until(lambda: bool(front.fakes[0].control.changes), timeout_s=5.0)
    await front.plane.aclose()
    assert (await load).status == 503
    assert (await front.post(LOAD)).status == 503


def test_uploads_and_overrides_become_the_same_message_as_over_grpc() -> None:
    """`config` is text, files are bytes, `unload_dependents` a boolean."""
    body = orjson.dumps({"parameters": {"config": "{}", "file:1/a": base64.b64encode(b"\x00\xff").decode()}})
    message = control_codec.decode_load(body, "m")
    assert message.parameters["config"].string_param == "{}"
    assert message.parameters["file:1/a"].bytes_param == b"\x00\xff"
    assert (
        control_codec.decode_unload(b'{"parameters":{"unload_dependents":true}}', "m")
        .parameters["unload_dependents"]
        .bool_param
    )
    assert control_codec.decode_trace_setting(b'{"trace_rate": null}') == service_pb2.TraceSettingRequest(
        settings={"trace_rate": service_pb2.TraceSettingRequest.SettingValue()}
    )
    with pytest.raises(InvalidRequest):
        control_codec.parse_object(b"{")
