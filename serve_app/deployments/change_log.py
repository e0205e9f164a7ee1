"""The front's side of loads and unloads by clients: recorded at the registry, made good on servers that missed them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from tritonclient.grpc import service_pb2

from serve_app.endpoint import Endpoint
from serve_app.errors import EndpointUnavailable, ServeAppError, Unavailable
from serve_app.fleet.changes import REGION_PREFIX, Change, ChangeTable
from serve_app.fleet_control import LOAD_TIMEOUT_S
from serve_app.protocol.server_answers import ServerAnswer
from serve_app.shared_memory import UNREGISTER

logger = logging.getLogger(__name__)

# Ids of servers with missed changes that are remembered; those that never come back are the oldest.
_MAX_MISSED = 1024

Call = Callable[[str, Any, float], Awaitable[Any]]
"""Carries a control call to one server: RPC name, message, budget in seconds."""

Record = Callable[[str, str, bytes, int, str], Awaitable[tuple[Change, Sequence[Endpoint]]]]
"""The registry's `record`."""


class Servers(Protocol):
    """The servers this replica knows. `triton.Router` is one."""

    async def call_each(
        self, rpc_name: str, message: Any, *, timeout_s: float, model_name: str = "", without: Collection[str] = ()
    ) -> list[ServerAnswer]:
        """Ask every server but some."""
        ...

    async def repository_index(self, *, is_ready: bool = False, timeout_s: float) -> list[Any]:
        """The models that a server knows."""
        ...


async def replay(endpoint: Endpoint, changes: Sequence[Change], call: Call, *, timeout_s: float) -> None:
    """Make changes on one server, oldest first; one that it refuses is logged, and the next one is made.

    Regions of other machines are left out, and so is what the server has done already.

    Raises:
        EndpointUnavailable: The server was lost.
    """
    regions: Mapping[str, Any] | None = None
    for change in changes:
        if change.place not in ("", endpoint.place):
            continue
        steps = [(change.rpc_name, getattr(service_pb2, f"{change.rpc_name}Request").FromString(change.message))]
        if change.region:
            regions = await _regions_of(call, timeout_s) if regions is None else regions
            steps = region_steps(*steps[0], regions.get(change.region))
        for rpc_name, message in steps:
            try:
                await call(rpc_name, message, timeout_s)
            except EndpointUnavailable:
                raise
            except ServeAppError as error:
                logger.error("%s of %r at %s: %s", rpc_name, change.model_name, endpoint.address, error)


async def _regions_of(call: Call, timeout_s: float) -> Mapping[str, Any]:
    """The regions that a server has registered; none when it does not say."""
    try:
        answer = await call("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest(), timeout_s)
    except EndpointUnavailable:
        raise
    except ServeAppError:
        return {}
    return dict(answer.regions)


def region_steps(rpc_name: str, message: Any, registered: Any) -> list[tuple[str, Any]]:
    """The calls that make of a server's region what a registration, or its end, would have made of it.

    Args:
        rpc_name: `SystemSharedMemoryRegister` or `SystemSharedMemoryUnregister`.
        message: Its request message.
        registered: The server's `RegionStatus`; `None` when it has no such region.
    """
    if rpc_name == UNREGISTER:
        return [] if registered is None else [(rpc_name, message)]
    if registered is None:
        return [(rpc_name, message)]
    if (registered.key, registered.offset, registered.byte_size) == (message.key, message.offset, message.byte_size):
        return []
    return [(UNREGISTER, service_pb2.SystemSharedMemoryUnregisterRequest(name=message.name)), (rpc_name, message)]


def registry_of_static(registry: str, addresses: Sequence[str]) -> str:
    """Name of the registry actor that keeps the changes of servers which are known by address and lease nothing.

    Fronts of the same servers share one; it is not the one of a fleet, whose servers would make these changes too.
    """
    digest = hashlib.blake2b("\n".join(sorted(addresses)).encode(), digest_size=6).hexdigest()
    return f"{registry}-of-{digest}"


class FleetChanges:
    """Changes of the model repository as one front replica knows them.

    A server of the fleet makes all changes before it is leased, so that here only those have to be made good which it
    could not be asked for. A server that is known by address alone may have restarted whenever it was away: it is told
    everything again each time it comes back.

    Args:
        record: Records a change at the registry; gives it with its number, and the endpoints leased at that moment.
        servers: Returns the router; called when first needed.
        is_static: Whether servers are known by address alone.
        on_change: Called with the name of a model that was changed through another replica.
        on_region: Called with the name of a region that was registered or unregistered through another replica, and
            the place it is at; `None` for nowhere.
    """

    def __init__(
        self,
        record: Record,
        servers: Callable[[], Servers],
        *,
        is_static: bool,
        on_change: Callable[[str], None],
        on_region: Callable[[str, str | None], None] = lambda name, place: None,
    ) -> None:
        self._record = record
        self._servers = servers
        self._is_static = is_static
        self._on_change = on_change
        self._on_region = on_region
        self._table = ChangeTable()
        self._missed: dict[str, int] = {}

    # --- for the control calls ----------------------------------------------------------------------------

    def check(self, model_name: str, size_bytes: int) -> None:
        """Raise `RequestTooLarge` when one more change would not fit."""
        self._table.check(model_name, size_bytes)

    async def record(self, rpc_name: str, message: Any, answers: Sequence[ServerAnswer]) -> None:
        """Record a change that these servers were asked for, and make it on those that have joined meanwhile.

        Raises:
            Unavailable: The registry cannot be reached; servers that join later will miss the change.
        """
        name = message.model_name
        if rpc_name == "RepositoryModelUnload" and not await self._is_known(name):
            return  # Triton says yes to any name; invented ones must not fill the table
        await self._keep(f"model {name!r}", name, rpc_name, message, answers)

    def check_region(self, name: str) -> None:
        """Raise `RequestTooLarge` when one more shared memory region would not fit."""
        self._table.check(f"{REGION_PREFIX}{name}", 0)

    async def record_region(self, rpc_name: str, message: Any, answers: Sequence[ServerAnswer], *, place: str) -> None:
        """Record that a region was registered or unregistered at a place; as `record`."""
        what = f"shared memory region {message.name!r}"
        await self._keep(what, f"{REGION_PREFIX}{message.name}", rpc_name, message, answers, place=place)

    async def _keep(
        self, what: str, key: str, rpc_name: str, message: Any, answers: Sequence[ServerAnswer], *, place: str = ""
    ) -> None:
        try:
            change, leased = await self._record(rpc_name, key, message.SerializeToString(), self._table.number, place)
        except Exception as error:
            logger.warning("a change of %s could not be recorded: %s", what, error)
            reason = f"{what} was changed on every server, but servers that start later will not know of it"
            raise Unavailable("the endpoint registry", reason) from error
        self._table.take([change])
        asked = {answer.endpoint.server_id for answer in answers}
        elsewhere = {endpoint.server_id for endpoint in leased if place not in ("", endpoint.place)}
        late = {endpoint.server_id for endpoint in leased} - asked - elsewhere
        answers = [
            *answers,
            *await self._servers().call_each(
                rpc_name,
                message,
                timeout_s=LOAD_TIMEOUT_S,
                model_name="" if change.region else key,
                without=asked | elsewhere,
            ),
        ]
        late -= {answer.endpoint.server_id for answer in answers}
        for server_id in (*late, *(a.endpoint.server_id for a in answers if a.is_missed)):
            self._missed.setdefault(server_id, change.number - 1)
        while len(self._missed) > _MAX_MISSED:
            del self._missed[next(iter(self._missed))]

    async def _is_known(self, name: str) -> bool:
        if self._table.has(name):
            return True
        try:
            index = await self._servers().repository_index(timeout_s=5.0)
        except ServeAppError:
            return True
        return any(entry.name == name for entry in index)

    # --- for the router -----------------------------------------------------------------------------------

    async def prepare(self, endpoint: Endpoint, call: Call) -> None:
        """Make on a server what it missed, before it is asked for anything.

        Raises:
            EndpointUnavailable: The server was lost meanwhile.
        """
        after = 0 if self._is_static else self._missed.pop(endpoint.server_id, self._table.number)
        try:
            await replay(endpoint, self._table.after(after), call, timeout_s=LOAD_TIMEOUT_S)
        except BaseException:
            self._missed[endpoint.server_id] = after
            raise

    # --- for the watch on the registry ----------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Number of the last change known."""
        return self._table.number

    def all(self) -> tuple[Change, ...]:
        """All changes, for a registry that has lost them."""
        return self._table.after(0)

    def take(self, changes: Sequence[Change]) -> None:
        """Changes that other replicas have made; the models are looked at again."""
        for change in changes:
            if change.number <= self._table.number_of(change.model_name):
                continue
            if change.region:
                self._on_region(change.region, None if change.is_end_of_region else change.place)
            else:
                self._on_change(change.model_name)
        self._table.take(changes)

    def __repr__(self) -> str:
        return f"<FleetChanges {self._table!r} Missed: by {len(self._missed)} servers>"
