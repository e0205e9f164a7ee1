"""The EndpointRegistry actor and how replicas reach it: leases in, versioned snapshots out.

Its state is soft. When the actor restarts, the fleet's heartbeats fill it again; while it is away, every
ModelServer replica goes on with the last snapshot it has seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from serve_app.clock import Clock, MonotonicClock
from serve_app.endpoint import Endpoint
from serve_app.fleet.changes import Change, ChangeTable
from serve_app.fleet.leases import LeaseTable

logger = logging.getLogger(__name__)

NAMESPACE = "serve_app"

# Between a failed call to the actor and the next try.
_RETRY_S = 0.5
# How soon a watcher sees that a lease ran out, for want of an event that says so.
_EXPIRY_TICK_S = 0.25
# Longest time one `watch` call stays open; only bounds how long a dead caller's call lingers.
_WATCH_S = 10.0
# How long a call may take that carries changes, which can be whole models.
_RECORD_S = 30.0
# How much later than that its answer may come before it counts as lost, as it is when a network falls apart.
_LATE_S = 5.0


SnapshotKey = tuple[str, int, bool, int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the registry knows at one moment.

    Attributes:
        epoch: One life of the actor; versions of different epochs do not compare.
        version: Grows with every change.
        is_settled: False while the actor is so young that servers may be missing from it.
        endpoints: All endpoints whose lease has not run out.
        change_number: Number of the last load or unload by a client.
    """

    epoch: str
    version: int
    is_settled: bool
    endpoints: tuple[Endpoint, ...]
    change_number: int = 0

    @property
    def key(self) -> SnapshotKey:
        """What tells this snapshot from others."""
        return self.epoch, self.version, self.is_settled, self.change_number


def known_endpoints(known: Sequence[Endpoint], snapshot: Snapshot) -> tuple[Endpoint, ...]:
    """The endpoints to use after a snapshot.

    A registry that has just restarted knows only the servers whose heartbeat came since. Until it has settled,
    nothing that was known before is taken away.
    """
    if snapshot.is_settled:
        return snapshot.endpoints
    return snapshot.endpoints + tuple(endpoint for endpoint in known if endpoint not in snapshot.endpoints)


class EndpointRegistry:
    """The actor's class; plain, so that tests need no Ray.

    Args:
        clock: The clock that leases are on.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._table = LeaseTable(started_at=self._clock.now())
        self._changes = ChangeTable()
        self._changed = asyncio.Event()

    async def renew(self, endpoint: Endpoint, lease_s: float) -> None:
        """Enter an endpoint, or keep it for another `lease_s` seconds."""
        self._table.renew(endpoint, lease_s=lease_s, now=self._clock.now())
        self._notice()

    async def release(self, server_id: str) -> None:
        """Take an endpoint out at once; unknown ids are fine."""
        self._table.release(server_id)
        self._notice()

    async def join(self, endpoint: Endpoint, lease_s: float, seen: int) -> tuple[Change, ...]:
        """Lease the endpoint of a server that has made every change; else the changes with a number above `seen`."""
        outstanding = self._changes.after(seen)
        if not outstanding:
            await self.renew(endpoint, lease_s)
        return outstanding

    async def record(
        self, rpc_name: str, model_name: str, message: bytes, after: int, place: str = ""
    ) -> tuple[Change, tuple[Endpoint, ...]]:
        """Keep a change that was made on all servers, with a number above `after`.

        Returns:
            The change, and the endpoints leased now: every server that joins later makes the change first.
        """
        change = self._changes.record(rpc_name, model_name, message, after=after, place=place)
        self._notice()
        return change, self._snapshot(self._clock.now()).endpoints

    async def changes_after(self, number: int) -> tuple[Change, ...]:
        """The changes with a higher number."""
        return self._changes.after(number)

    async def restore(self, changes: Sequence[Change]) -> None:
        """Changes from before this actor was started anew."""
        self._changes.take(changes)
        self._notice()

    async def watch(self, seen: SnapshotKey | None, timeout_s: float) -> Snapshot:
        """The current snapshot, as soon as its key differs from `seen`, at most `timeout_s` later."""
        deadline = self._clock.now() + timeout_s
        while True:
            now = self._clock.now()
            current = self._snapshot(now)
            if current.key != seen or now >= deadline:
                return current
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(deadline - now, _EXPIRY_TICK_S))

    def _snapshot(self, now: float) -> Snapshot:
        self._table.expire(now)
        epoch, version, endpoints = self._table.snapshot()
        is_settled = not self._table.is_rebuilding(now)
        return Snapshot(epoch, version, is_settled, tuple(endpoints), self._changes.number)

    def _notice(self) -> None:
        """Wake every watcher; those for whom nothing changed go back to waiting."""
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def __repr__(self) -> str:
        return f"<EndpointRegistry {self._table!r} {self._changes!r}>"


def registry_actor(name: str) -> Any:
    """A handle to the registry actor, which is created if there is none."""
    return (
        ray.remote(EndpointRegistry)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=10_000,
        )
        .remote()
    )


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


async def record_change(
    name: str, rpc_name: str, model_name: str, message: bytes, after: int, place: str = ""
) -> tuple[Change, Sequence[Endpoint]]:
    """`EndpointRegistry.record` of the actor of that name; raises what Ray raises."""
    actor = await asyncio.to_thread(registry_actor, name)
    answer: tuple[Change, Sequence[Endpoint]] = await asyncio.wait_for(
        actor.record.remote(rpc_name, model_name, message, after, place), _RECORD_S
    )
    return answer


class Changes(Protocol):
    """Where changes that the registry knows are taken to; `FleetChanges` is one."""

    @property
    def number(self) -> int:
        """Number of the last change known."""
        ...

    def all(self) -> Sequence[Change]:
        """All changes."""
        ...

    def take(self, changes: Sequence[Change]) -> None:
        """Changes that were not known."""
        ...


class RegistryWatch:
    """Follows the registry and reports every new set of endpoints; `async with`.

    Args:
        name: The actor's name.
        on_change: Called in the event loop with the endpoints, first as soon as a snapshot was read.
        changes: Told of loads and unloads by clients; its own are given to a registry that has lost them.
    """

    def __init__(
        self, name: str, on_change: Callable[[Sequence[Endpoint]], None], *, changes: Changes | None = None
    ) -> None:
        self._name = name
        self._on_change = on_change
        self._changes = changes
        self._epoch = ""
        self._known: tuple[Endpoint, ...] | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RegistryWatch:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def is_running(self) -> bool:
        """Whether it follows the registry; it goes on while that cannot be reached."""
        return self._task is not None and not self._task.done()

    async def _run(self) -> None:
        is_reachable = True
        while True:
            try:
                actor = await asyncio.to_thread(registry_actor, self._name)
                seen: SnapshotKey | None = None
                while True:
                    snapshot = await asyncio.wait_for(actor.watch.remote(seen, _WATCH_S), _WATCH_S + _LATE_S)
                    is_reachable, seen = True, snapshot.key
                    await self._exchange_changes(actor, snapshot)
                    self._take(snapshot)
            # Ray has more than its own errors for this (a ValueError for an actor that dies while it is looked up),
            # and a watch that ended would leave this replica with the servers of that day.
            except Exception as error:  # noqa: BLE001
                if is_reachable:
                    logger.warning(
                        "the endpoint registry cannot be reached, going on with what is known: %s", _described(error)
                    )
                is_reachable = False
                await asyncio.sleep(_RETRY_S)

    async def _exchange_changes(self, actor: Any, snapshot: Snapshot) -> None:
        """Learn the changes that this replica has not seen; give a new life of the actor those that it has."""
        if self._changes is None:
            return
        if self._changes.number and snapshot.epoch != self._epoch:
            await asyncio.wait_for(actor.restore.remote(self._changes.all()), _RECORD_S)
        if snapshot.change_number > self._changes.number:
            changes = await asyncio.wait_for(actor.changes_after.remote(self._changes.number), _RECORD_S)
            self._changes.take(changes)
        self._epoch = snapshot.epoch

    def _take(self, snapshot: Snapshot) -> None:
        known = known_endpoints(self._known or (), snapshot)
        if self._known is None or set(known) != set(self._known):
            self._on_change(known)
        self._known = known

    def __repr__(self) -> str:
        return f"<RegistryWatch {self._name!r} {len(self._known or ())} endpoints>"


class Lease:
    """Keeps one server's endpoint in the registry; `async with`.

    Args:
        name: The actor's name.
        lease_s: How long the endpoint stays without a heartbeat; heartbeats go out three times as often.
        catch_up: Makes on a server what clients have loaded and unloaded before it started; awaited before the endpoint
            is leased, and raises nothing.
    """

    def __init__(
        self,
        name: str,
        *,
        lease_s: float,
        catch_up: Callable[[Endpoint, Sequence[Change]], Awaitable[None]] | None = None,
    ) -> None:
        self._name = name
        self._lease_s = lease_s
        self._catch_up = catch_up
        self._seen = 0
        self._has_joined = False
        self._endpoint: Endpoint | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._actor: Any = None

    async def __aenter__(self) -> Lease:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._release(self._endpoint)
        self._endpoint = None

    def set(self, endpoint: Endpoint | None) -> None:
        """Lease this endpoint from now on instead of the one before; `None` takes it out."""
        self._endpoint = endpoint
        self._changed.set()

    async def _run(self) -> None:
        leased: Endpoint | None = None
        while True:
            self._changed.clear()
            endpoint = self._endpoint
            if leased is not None and leased != endpoint:
                await self._release(leased)
            if leased != endpoint:
                self._seen, self._has_joined = 0, self._catch_up is None
            leased = endpoint
            if endpoint is not None and self._has_joined:
                await self._call("renew", endpoint, self._lease_s)
            elif endpoint is not None:
                await self._join(endpoint)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._lease_s / 3)

    async def _join(self, endpoint: Endpoint) -> None:
        """Have the server make every change that is known, and lease it in the moment in which there is no other."""
        while self._endpoint == endpoint and self._catch_up is not None:
            changes = await self._call("join", endpoint, self._lease_s, self._seen)
            if not changes:
                self._has_joined = changes is not None
                return
            await self._catch_up(endpoint, changes)
            self._seen = changes[-1].number

    async def _release(self, endpoint: Endpoint | None) -> None:
        if endpoint is not None:
            await self._call("release", endpoint.server_id)

    async def _call(self, method: str, *args: object) -> Any:
        """One call to the actor; any failure is logged and made good by the next heartbeat."""
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(registry_actor, self._name)
            return await asyncio.wait_for(getattr(self._actor, method).remote(*args), self._lease_s)
        except Exception as error:  # noqa: BLE001  # as for a watch: heartbeats that ended would lose a good server
            self._actor = None
            logger.warning("%s at the endpoint registry failed: %s", method, _described(error))
            return None

    def __repr__(self) -> str:
        return f"<Lease {self._name!r} {self._endpoint}>"
