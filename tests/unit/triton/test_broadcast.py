"""Calls to every server, and what is done on a server before it is asked for anything."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from tritonclient.grpc import service_pb2

from serve_app.endpoint import Endpoint
from serve_app.errors import EndpointUnavailable, PoolClosed, RequestRejected
from serve_app.protocol.server_answers import accepted_by_all, messages_of
from serve_app.settings import ChannelSettings
from serve_app.triton.fake import Failure, FakeTriton
from serve_app.triton.membership import Call
from serve_app.triton.router import Router
from tests.support.waiting import wait_until

LOAD = service_pb2.RepositoryModelLoadRequest(model_name="identity")


async def test_every_server_answers_for_itself() -> None:
    """One refuses, one is away and one is left out: three answers of three kinds, and none is raised."""
    async with FakeTriton() as good, FakeTriton() as bad, FakeTriton() as gone, Router(ChannelSettings()) as router:
        servers = (good, bad, gone)
        router.update([server.endpoint for server in servers])
        await wait_until(lambda: len(router.statistics().endpoints) == router.num_endpoints == 3, timeout_s=5.0)
        bad.control.refusals["identity"] = Failure(grpc.StatusCode.INVALID_ARGUMENT, "no")
        await gone.kill()
        answers = await router.call_each("RepositoryModelLoad", LOAD, timeout_s=5.0, model_name="identity")
        assert [answer.endpoint for answer in answers] == [server.endpoint for server in servers]
        assert [answer.is_missed for answer in answers] == [False, False, True]
        assert isinstance(answers[1].error, RequestRejected)
        assert len(messages_of(answers)) == 1
        with pytest.raises(RequestRejected, match="no"):
            accepted_by_all(answers)
        assert accepted_by_all([answers[0], answers[2]]) == answers[0].message
        with pytest.raises(EndpointUnavailable):
            accepted_by_all([answers[2]])
        (left,) = await router.call_each(
            "RepositoryModelLoad", LOAD, timeout_s=5.0, without=[bad.address, gone.address]
        )
        assert left.endpoint == good.endpoint
    with pytest.raises(PoolClosed):
        await router.call_each("RepositoryModelLoad", LOAD, timeout_s=5.0)


async def test_a_server_is_prepared_before_it_is_available_and_each_time_it_was_away() -> None:
    """Whatever preparing raises is no reason to do without the server, except that it is lost."""
    prepared: list[Endpoint] = []
    may_go_on = asyncio.Event()
    changes: list[int] = []

    async def prepare(endpoint: Endpoint, call: Call) -> None:
        prepared.append(endpoint)
        await may_go_on.wait()
        await call("RepositoryModelLoad", LOAD, 5.0)
        raise RuntimeError("not quite")

    async with (
        FakeTriton() as fake,
        Router(ChannelSettings(), prepare=prepare, on_change=lambda: changes.append(1)) as router,
    ):
        router.update([fake.endpoint])
        await wait_until(lambda: len(prepared) == 1, timeout_s=5.0)
        assert "connecting" in repr(router)
        may_go_on.set()
        await wait_until(lambda: "available 0 active" in repr(router), timeout_s=5.0)
        assert fake.control.changes == [("RepositoryModelLoad", "identity")]
        await fake.kill()
        assert not await router.is_ready(timeout_s=5.0)
        await fake.restart()
        await wait_until(lambda: len(fake.control.changes) == 2, timeout_s=10.0)
        await wait_until(lambda: "available 0 active" in repr(router), timeout_s=5.0)
    assert prepared == [fake.endpoint] * len(prepared)
