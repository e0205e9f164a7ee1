"""Every server makes every change once, whenever it joins and whoever was told first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from serve_app.clock import ManualClock
from serve_app.deployments import registry as registry_module
from serve_app.deployments.change_log import FleetChanges, registry_of_static, replay
from serve_app.deployments.registry import EndpointRegistry, Lease, RegistryWatch, Snapshot
from serve_app.endpoint import Endpoint
from serve_app.errors import BackendFailed, EndpointUnavailable, Unavailable
from serve_app.fleet.changes import Change
from serve_app.protocol.server_answers import ServerAnswer
from tests.support.waiting import wait_until

A, B = Endpoint("127.0.0.1:1", "a"), Endpoint("127.0.0.1:2", "b")
LOAD, UNLOAD = "RepositoryModelLoad", "RepositoryModelUnload"


def load(name: str) -> Any:
    return service_pb2.RepositoryModelLoadRequest(model_name=name)


def unload(name: str) -> Any:
    return service_pb2.RepositoryModelUnloadRequest(model_name=name)


class Servers:
    """The servers a replica knows, as ids; notes who was asked late."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self.endpoints = endpoints
        self.asked: list[tuple[str, str]] = []

    async def call_each(
        self, rpc_name: str, message: Any, *, timeout_s: float, model_name: str = "", without: Collection[str] = ()
    ) -> list[ServerAnswer]:
        late = [endpoint for endpoint in self.endpoints if endpoint.server_id not in without]
        self.asked += [(endpoint.server_id, model_name) for endpoint in late]
        return [ServerAnswer(endpoint, message) for endpoint in late]

    async def repository_index(self, *, is_ready: bool = False, timeout_s: float) -> list[Any]:
        return [service_pb2.RepositoryIndexResponse.ModelIndex(name="m")]


class Server:
    """One server that is told of changes."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []
        self.error: Exception | None = None

    async def call(self, rpc_name: str, message: Any, timeout_s: float) -> None:
        if self.error is not None:
            raise self.error
        self.made.append((rpc_name, message.model_name))


class RemoteMethod:
    """What `.remote` calls."""

    def __init__(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.remote = method


class ActorHandle:
    """A registry as Ray hands it out: each method behind `.remote`."""

    def __init__(self, registry: EndpointRegistry) -> None:
        self._registry = registry

    def __getattr__(self, name: str) -> RemoteMethod:
        return RemoteMethod(getattr(self._registry, name))


def changes_at(
    registry: EndpointRegistry, servers: Servers, *, is_static: bool = False, heard: list[str] | None = None
) -> FleetChanges:
    names = [] if heard is None else heard
    return FleetChanges(registry.record, lambda: servers, is_static=is_static, on_change=names.append)


async def test_a_server_that_joined_during_a_change_is_told_at_once_or_before_it_is_asked() -> None:
    """At once when this replica knows it by now, else when it gets to know it."""
    registry, servers = EndpointRegistry(ManualClock()), Servers(A)
    changes = changes_at(registry, servers)
    for endpoint in (A, B, Endpoint("127.0.0.1:3", "c")):
        await registry.renew(endpoint, 3.0)
    servers.endpoints = (A, B)
    await changes.record(LOAD, load("m"), [ServerAnswer(A, object())])
    assert servers.asked == [("b", "m")]
    server = Server()
    await changes.prepare(Endpoint("127.0.0.1:3", "c"), server.call)
    await changes.prepare(Endpoint("127.0.0.1:3", "c"), server.call)
    await changes.prepare(A, server.call)
    assert server.made == [(LOAD, "m")]


async def test_a_server_that_was_away_is_told_when_it_is_back() -> None:
    """Once, and again only if it is lost while it is told."""
    registry, servers, server = EndpointRegistry(ManualClock()), Servers(A, B), Server()
    changes = changes_at(registry, servers)
    away = ServerAnswer(B, error=EndpointUnavailable("Triton", "gone"))
    await changes.record(LOAD, load("m"), [ServerAnswer(A, object()), away])
    server.error = EndpointUnavailable("Triton", "gone again")
    with pytest.raises(EndpointUnavailable):
        await changes.prepare(B, server.call)
    server.error = None
    await changes.prepare(B, server.call)
    await changes.prepare(B, server.call)
    assert server.made == [(LOAD, "m")]


async def test_a_server_known_by_address_alone_is_told_everything_each_time() -> None:
    """It may have been restarted; a change that it refuses does not keep the next one away."""
    changes = changes_at(EndpointRegistry(ManualClock()), Servers(A), is_static=True)
    await changes.record(LOAD, load("m"), [ServerAnswer(A, object())])
    await changes.record(UNLOAD, unload("m"), [ServerAnswer(A, object())])
    server = Server()
    for _ in range(2):
        await changes.prepare(A, server.call)
    assert server.made == [(UNLOAD, "m")] * 2
    server.error = BackendFailed("m", "no")
    await changes.prepare(A, server.call)
    assert registry_of_static("r", ["a", "b"]) == registry_of_static("r", ["b", "a"]) != registry_of_static("r", ["a"])


class Mapping:
    """A server that maps shared memory, and notes what it is told."""

    def __init__(self, **regions: str) -> None:
        self.keys = dict(regions)
        self.told: list[str] = []

    async def call(self, rpc_name: str, message: Any, timeout_s: float) -> Any:
        if rpc_name == "SystemSharedMemoryStatus":
            answer = service_pb2.SystemSharedMemoryStatusResponse()
            for name, key in self.keys.items():
                answer.regions[name].key = key
            return answer
        self.told.append(f"{rpc_name.removeprefix('SystemSharedMemory')} {message.name}")
        if rpc_name == "SystemSharedMemoryRegister":
            assert message.name not in self.keys
            self.keys[message.name] = message.key
        else:
            del self.keys[message.name]
        return None


def register(name: str, key: str) -> Any:
    return service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=key)


async def test_regions_are_registered_on_servers_of_their_machine_that_do_not_have_them() -> None:
    """A server that was only out of reach is left as it is; one that restarted gets all; elsewhere nothing happens."""
    here, there = Endpoint("127.0.0.1:1", "a", "here"), Endpoint("127.0.0.1:2", "b", "there")
    registry, servers = EndpointRegistry(ManualClock()), Servers(here, there)
    changes = changes_at(registry, servers, is_static=True)
    answers = [ServerAnswer(endpoint, object()) for endpoint in (here, there)]
    for name, key in (("r", "/r"), ("s", "/s"), ("t", "/t")):
        await changes.record_region("SystemSharedMemoryRegister", register(name, key), answers, place="here")
    message = service_pb2.SystemSharedMemoryUnregisterRequest(name="t")
    await changes.record_region("SystemSharedMemoryUnregister", message, answers, place="here")
    for before, told in (
        ({}, ["Register r", "Register s"]),
        ({"r": "/r", "s": "/s"}, []),
        ({"r": "/old", "t": "/t"}, ["Unregister r", "Register r", "Register s", "Unregister t"]),
    ):
        server = Mapping(**before)
        await changes.prepare(here, server.call)
        assert (server.keys, server.told) == ({"r": "/r", "s": "/s"}, told)
    server = Mapping()
    await changes.prepare(there, server.call)
    assert not server.told


async def test_servers_elsewhere_are_not_told_late_of_a_region() -> None:
    """Of those that joined meanwhile only the ones on its machine are."""
    here, there = Endpoint("127.0.0.1:1", "a", "here"), Endpoint("127.0.0.1:2", "b", "there")
    late = Endpoint("127.0.0.1:3", "c", "here")
    registry = EndpointRegistry(ManualClock())
    for endpoint in (here, there, late):
        await registry.renew(endpoint, 3.0)
    servers = Servers(here, there, late)
    changes = changes_at(registry, servers)
    await changes.record_region(
        "SystemSharedMemoryRegister", register("r", "/r"), [ServerAnswer(here, object())], place="here"
    )
    assert servers.asked == [("c", "")]


async def test_replicas_learn_where_a_region_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that it is gone; no model is looked at for it."""
    registry = EndpointRegistry(ManualClock())
    monkeypatch.setattr(registry_module, "registry_actor", lambda name: ActorHandle(registry))
    heard: list[tuple[str, str | None]] = []
    changes = FleetChanges(
        registry.record,
        lambda: Servers(A),
        is_static=False,
        on_change=lambda name: heard.append((name, "model")),
        on_region=lambda name, place: heard.append((name, place)),
    )
    async with RegistryWatch("registry", lambda endpoints: None, changes=changes):
        await registry.record("SystemSharedMemoryRegister", "region/r", b"", 0, "here")
        await wait_until(lambda: heard == [("r", "here")], timeout_s=5.0)
        await registry.record("SystemSharedMemoryUnregister", "region/r", b"", 0, "here")
        await wait_until(lambda: heard == [("r", "here"), ("r", None)], timeout_s=5.0)
    changes.check_region("r")


async def test_unloads_of_invented_names_are_not_kept() -> None:
    """Triton says yes to them; a client could fill the table with them."""
    changes = changes_at(EndpointRegistry(ManualClock()), Servers(A))
    await changes.record(UNLOAD, unload("nobody"), [ServerAnswer(A, object())])
    assert changes.number == 0


async def test_a_change_that_cannot_be_recorded_is_an_error() -> None:
    """The caller learns that later servers will not know of it."""

    async def fail(*args: object) -> tuple[Change, Sequence[Endpoint]]:
        raise OSError("no actor")

    changes = FleetChanges(fail, lambda: Servers(A), is_static=False, on_change=lambda name: None)
    with pytest.raises(Unavailable, match="servers that start later"):
        await changes.record(LOAD, load("m"), [ServerAnswer(A, object())])


async def test_a_server_is_leased_when_it_has_made_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come while it makes the first ones too; a new life makes them all again."""
    registry = EndpointRegistry(ManualClock())
    monkeypatch.setattr(registry_module, "registry_actor", lambda name: ActorHandle(registry))
    await registry.record(LOAD, "m", load("m").SerializeToString(), 0)
    server, may_go_on = Server(), asyncio.Event()

    async def catch_up(endpoint: Endpoint, changes: Sequence[Change]) -> None:
        await may_go_on.wait()
        await replay(endpoint, changes, server.call, timeout_s=1.0)

    async def leased() -> tuple[Endpoint, ...]:
        return (await registry.watch(None, 0.0)).endpoints

    async with Lease("registry", lease_s=3.0, catch_up=catch_up) as lease:
        lease.set(A)
        await registry.record(UNLOAD, "n", unload("n").SerializeToString(), 0)
        assert not await leased()
        may_go_on.set()
        await wait_until(lambda: bool(registry._table.snapshot().endpoints), timeout_s=5.0)
        assert server.made == [(LOAD, "m"), (UNLOAD, "n")]
        lease.set(B)
        await wait_until(lambda: len(server.made) == 4, timeout_s=5.0)
        assert server.made[2:] == server.made[:2]


async def test_replicas_learn_of_changes_and_give_them_to_a_registry_that_lost_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another replica's models are looked at again; a restarted actor knows all changes at once."""
    registry = EndpointRegistry(ManualClock())
    actors = [ActorHandle(registry)]
    monkeypatch.setattr(registry_module, "registry_actor", lambda name: actors[0])
    monkeypatch.setattr(registry_module, "_RETRY_S", 0.0)
    monkeypatch.setattr(registry_module, "_EXPIRY_TICK_S", 0.01)
    heard: list[str] = []
    changes = changes_at(registry, Servers(A), heard=heard)
    async with RegistryWatch("registry", lambda endpoints: None, changes=changes):
        await registry.record(LOAD, "m", load("m").SerializeToString(), 0)
        await wait_until(lambda: heard == ["m"], timeout_s=5.0)
        reborn = EndpointRegistry(ManualClock())
        actors[0] = ActorHandle(reborn)

        def die(now: float) -> Snapshot:
            raise OSError("the actor died")

        monkeypatch.setattr(registry, "_snapshot", die)
        registry._notice()
        await wait_until(lambda: len(reborn._changes.after(0)) == 1, timeout_s=5.0)
    assert heard == ["m"]
