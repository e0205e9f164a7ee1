"""The registry's snapshots: news at once, no news held back, and a restart that takes nobody's endpoints away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from ray.exceptions import RayError

from serve_app.clock import ManualClock
from serve_app.deployments import registry as registry_module
from serve_app.deployments.registry import EndpointRegistry, Lease, RegistryWatch, Snapshot, known_endpoints
from serve_app.endpoint import Endpoint
from tests.support.waiting import wait_until

A, B = Endpoint("127.0.0.1:1", "a"), Endpoint("127.0.0.1:2", "b")
LONG_S = 100.0


async def settled_registry() -> tuple[EndpointRegistry, ManualClock]:
    clock = ManualClock()
    registry = EndpointRegistry(clock)
    clock.advance(60.0)
    return registry, clock


async def test_a_watcher_without_a_snapshot_gets_one_at_once() -> None:
    """Even an empty one: it says that there is nothing yet."""
    registry, _ = await settled_registry()
    snapshot = await registry.watch(None, LONG_S)
    assert snapshot.endpoints == ()
    assert snapshot.is_settled


async def test_a_watcher_hears_of_a_new_endpoint_and_of_one_that_left() -> None:
    """Each change answers the open calls, with everything in it."""
    registry, _ = await settled_registry()
    seen = await registry.watch(None, LONG_S)
    watch = asyncio.create_task(registry.watch(seen.key, LONG_S))
    await asyncio.sleep(0)
    assert not watch.done()
    await registry.renew(A, 3.0)
    seen = await watch
    assert seen.endpoints == (A,)
    watch = asyncio.create_task(registry.watch(seen.key, LONG_S))
    await asyncio.sleep(0)
    await registry.release("a")
    assert (await watch).endpoints == ()


async def test_a_heartbeat_is_no_news() -> None:
    """Renewing a lease wakes nobody up for nothing; at the end of its time the call returns the same snapshot."""
    registry, clock = await settled_registry()
    await registry.renew(A, 3.0)
    seen = await registry.watch(None, LONG_S)
    watch = asyncio.create_task(registry.watch(seen.key, 5.0))
    await asyncio.sleep(0)
    await registry.renew(A, 3.0)
    await asyncio.sleep(0)
    assert not watch.done()
    clock.advance(2.0)
    await registry.renew(A, 30.0)
    clock.advance(4.0)
    assert (await watch).key == seen.key


async def test_a_lease_that_runs_out_is_news() -> None:
    """A server that died with its node leaves without a word."""
    registry, clock = await settled_registry()
    await registry.renew(A, 3.0)
    seen = await registry.watch(None, LONG_S)
    watch = asyncio.create_task(registry.watch(seen.key, LONG_S))
    await asyncio.sleep(0)
    clock.advance(3.1)
    assert (await watch).endpoints == ()


async def test_a_young_registry_says_that_it_has_not_settled() -> None:
    """And tells its watchers when it has."""
    clock = ManualClock()
    registry = EndpointRegistry(clock)
    seen = await registry.watch(None, LONG_S)
    assert not seen.is_settled
    watch = asyncio.create_task(registry.watch(seen.key, LONG_S))
    await asyncio.sleep(0)
    clock.advance(10.0)
    assert (await watch).is_settled


@pytest.mark.parametrize(
    ("known", "snapshot", "expected"),
    [
        ((A,), Snapshot("e", 1, True, (B,)), {B}),
        ((A,), Snapshot("e", 1, False, (B,)), {A, B}),
        ((A,), Snapshot("e", 0, False, ()), {A}),
        ((A,), Snapshot("e", 0, True, ()), set()),
        ((A,), Snapshot("e", 1, False, (A,)), {A}),
    ],
)
def test_what_is_known_after_a_snapshot(
    known: tuple[Endpoint, ...], snapshot: Snapshot, expected: set[Endpoint]
) -> None:
    """Only a settled registry can take an endpoint away."""
    result = known_endpoints(known, snapshot)
    assert set(result) == expected
    assert len(result) == len(expected)


class ActorHandle:
    """A registry as Ray hands it out: each method behind `.remote`."""

    def __init__(self, registry: EndpointRegistry) -> None:
        self.watch = RemoteMethod(registry.watch)
        self.renew = RemoteMethod(registry.renew)
        self.release = RemoteMethod(registry.release)


class RemoteMethod:
    """What `.remote` calls."""

    def __init__(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.remote = method


@pytest.mark.parametrize("error", [RayError("gone"), ValueError("Failed to look up actor"), OSError("broken")])
async def test_no_error_of_a_lookup_ends_a_watch_or_a_lease(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Whatever Ray raises while the actor comes back, replicas hear of servers again and servers keep their leases."""
    actor = ActorHandle(EndpointRegistry(ManualClock()))
    failing: list[Exception] = []

    def look_up(name: str) -> ActorHandle:
        if failing:
            raise failing.pop()
        return actor

    monkeypatch.setattr(registry_module, "registry_actor", look_up)
    monkeypatch.setattr(registry_module, "_RETRY_S", 0.0)
    heard: list[Sequence[Endpoint]] = []
    failing.append(error)
    async with Lease("registry", lease_s=0.3) as lease:
        lease.set(A)
        await wait_until(lambda: not failing, timeout_s=5.0)
        failing.append(error)
        async with RegistryWatch("registry", heard.append):
            await wait_until(lambda: heard[-1:] == [(A,)], timeout_s=5.0)
    assert not failing


async def test_a_listener_that_fails_hears_of_the_endpoints_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch goes on, and hands over what could not be taken in."""
    actor = ActorHandle(EndpointRegistry(ManualClock()))
    await actor.renew.remote(A, 3.0)
    monkeypatch.setattr(registry_module, "registry_actor", lambda name: actor)
    monkeypatch.setattr(registry_module, "_RETRY_S", 0.0)
    heard: list[Sequence[Endpoint]] = []

    def listen(endpoints: Sequence[Endpoint]) -> None:
        heard.append(endpoints)
        if len(heard) == 1:
            raise RuntimeError("not now")

    async with RegistryWatch("registry", listen):
        await wait_until(lambda: len(heard) == 2, timeout_s=5.0)
    assert heard == [(A,), (A,)]


class MortalActor(ActorHandle):
    """One whose calls under way end with an error when it dies."""

    def __init__(self, registry: EndpointRegistry) -> None:
        super().__init__(registry)
        self._registry = registry
        self.died = asyncio.Event()
        self.watch = RemoteMethod(self._watch)

    async def _watch(self, *args: Any) -> Snapshot:
        watching, dying = asyncio.ensure_future(self._registry.watch(*args)), asyncio.ensure_future(self.died.wait())
        await asyncio.wait([watching, dying], return_when=asyncio.FIRST_COMPLETED)
        if self.died.is_set():
            watching.cancel()
            raise RayError("the actor died")
        dying.cancel()
        return await watching


async def test_replicas_keep_their_servers_while_the_registry_is_away_and_comes_back_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An outage takes nothing from a replica, nor does a new life of the actor until its servers had their time."""
    clock = ManualClock()
    first, second = MortalActor(EndpointRegistry(clock)), MortalActor(EndpointRegistry(clock))
    for endpoint in (A, B):
        await first.renew.remote(endpoint, 3.0)
    living, num_failed = [first], 0

    def look_up(name: str) -> ActorHandle:
        nonlocal num_failed
        if not living:
            num_failed += 1
            raise RayError("gone")
        return living[0]

    monkeypatch.setattr(registry_module, "registry_actor", look_up)
    monkeypatch.setattr(registry_module, "_RETRY_S", 0.0)
    heard: list[set[Endpoint]] = []
    async with RegistryWatch("registry", lambda endpoints: heard.append(set(endpoints))):
        await wait_until(lambda: heard == [{A, B}], timeout_s=5.0)
        living.clear()
        first.died.set()
        await wait_until(lambda: num_failed >= 5, timeout_s=5.0)
        living.append(second)
        await second.renew.remote(B, 3.0)
        seen_empty = asyncio.ensure_future(second.watch.remote(None, LONG_S))
        assert (await seen_empty).endpoints == (B,)
        assert heard == [{A, B}]
        clock.advance(10.0)
        await second.renew.remote(B, 3.0)
        await wait_until(lambda: heard == [{A, B}, {B}], timeout_s=5.0)
