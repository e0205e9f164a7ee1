"""System shared memory of clients: which regions are registered, on which machine, and whether that is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol

from tritonclient.grpc import service_pb2

from serve_app.auth.decision import check_caller
from serve_app.auth.scopes import Operation
from serve_app.errors import BackendFailed, InvalidRequest, Unsupported
from serve_app.protocol.messages import InferRequest
from serve_app.protocol.parameters import RESERVED_REGION_PREFIX, check_region_name
from serve_app.protocol.server_answers import ServerAnswer, accepted_by_all, messages_of

Message = Any

NO_SHARED_MEMORY = "memory of a client is not mapped by this server; send tensors in the request"
"""Why everything about shared memory is refused unless it is allowed."""

RESERVED_KEYS = ("serve_app_", "triton_python_backend_shm_region_")
"""What the names of shared memory begin with in which Triton and its python models talk to each other."""

REGISTER, UNREGISTER = "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"

# A request that has been answered may hold its regions a moment longer (seen with tritonserver 2.51).
_NUM_TRIES, _PAUSE_S = 10, 0.02


class Servers(Protocol):
    """Calls to each server. `triton.Router` is one."""

    async def call_each(
        self,
        rpc_name: str,
        message: Message,
        *,
        timeout_s: float,
        model_name: str = "",
        without: Collection[str] = (),
    ) -> list[ServerAnswer]:
        """Ask every server but those with these ids; errors are answers too."""
        ...


class RegionLog(Protocol):
    """Where registrations are kept, for servers that join later and for other replicas."""

    def check_region(self, name: str) -> None:
        """Raise `RequestTooLarge` when one more region would not fit."""
        ...

    async def record_region(
        self, rpc_name: str, message: Message, answers: Sequence[ServerAnswer], *, place: str
    ) -> None:
        """Keep what was made of a region at a place; it replaces what was kept of it before."""
        ...


Finish = Callable[[Callable[[], Coroutine[Any, Any, Message]]], Coroutine[Any, Any, Message]]
"""Makes a change to its end even if its caller leaves."""


class SharedMemory:
    """Regions that clients have registered, each at one place: the machine whose servers could map it.

    Every server is asked to map a region, and those that can have it. A region is of one machine, so a request that
    uses it runs there and nowhere else; when servers of several machines find something under its key, nobody can
    say whose it is, and it is refused.

    Args:
        servers: How the servers are asked; borrowed.
        is_allowed: Whether clients may have servers map memory; everything is refused if not.
        finish: See `Finish`.
        log: Where registrations are kept; nowhere when `None`.
        timeout_s: Budget of each call in seconds.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        is_allowed: bool,
        finish: Finish,
        log: RegionLog | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self._servers = servers
        self.is_allowed = is_allowed
        self._finish = finish
        self._log = log
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._places: dict[str, str] = {}

    # --- requests -----------------------------------------------------------------------------------------

    def place_of(self, request: InferRequest) -> str:
        """Where a request has to run that uses regions.

        A region that is not known may be so new that only the servers know it: they say what is wrong if not.

        Returns:
            An `Endpoint.place`, or an empty string for anywhere.

        Raises:
            Unsupported: Shared memory is not allowed.
            PermissionDenied: The caller's key is not good for it: a region may be of another's.
            InvalidRequest: Its regions are on several machines.
        """
        self.check_allowed()
        check_caller(Operation.SHARED_MEMORY)
        places = {self._places[name] for name in request.regions if name in self._places}
        if len(places) > 1:
            names = ", ".join(sorted(set(request.regions)))
            raise InvalidRequest(
                "shared memory regions", f"{names}, on {len(places)} machines", "regions of one machine"
            )
        return next(iter(places), "")

    def learn(self, name: str, place: str | None) -> None:
        """What was made of a region through another replica; `None`: it was unregistered."""
        if place is None:
            self._places.pop(name, None)
        else:
            self._places[name] = place

    # --- calls --------------------------------------------------------------------------------------------

    async def status(self, request: Message) -> Message:
        """`SystemSharedMemoryStatusResponse`: one region or all, of all servers together.

        Raises:
            SharedMemoryNotFound: No server has the region.
            ServeAppError: Not allowed, or no server could be asked.
        """
        self.check_allowed()
        check_region_name(request.name, field="region name")
        answers = await self._servers.call_each("SystemSharedMemoryStatus", request, timeout_s=self._timeout_s)
        merged = service_pb2.SystemSharedMemoryStatusResponse()
        for message in messages_of(answers):
            for name, region in message.regions.items():
                if not name.startswith(RESERVED_REGION_PREFIX):
                    merged.regions[name].CopyFrom(region)
        return merged

    async def register(self, request: Message) -> Message:
        """`SystemSharedMemoryRegisterResponse`, once the servers of one machine have mapped the region.

        Raises:
            InvalidRequest: A name or key that is reserved or empty; a region that is registered already; a key that
                no server can open, or servers of several machines.
            RequestTooLarge: There are too many regions.
            ServeAppError: Not allowed, or no server could be asked.
        """
        self.check_allowed()
        if not request.name:
            raise InvalidRequest("region name", "an empty string", "the name of the region")
        check_region_name(request.name, field="region name")
        if request.key.lstrip("/").startswith(RESERVED_KEYS):
            raise InvalidRequest("key", "the key of memory that Triton uses itself", "memory of the client")
        if self._log is not None:
            self._log.check_region(request.name)
        return await self._finish(lambda: self._register(request))

    async def _register(self, request: Message) -> Message:
        async with self._lock:
            return await self._register_in_turn(request)

    async def _register_in_turn(self, request: Message) -> Message:
        await self._check_key(request)
        answers = await self._servers.call_each(REGISTER, request, timeout_s=self._timeout_s)
        mapped = [answer for answer in answers if answer.error is None]
        places = {answer.endpoint.place for answer in mapped}
        known = self._places.get(request.name)
        if known is not None:
            places.add(known)
        refused = [a for a in answers if a.error is not None and not a.is_missed and a.endpoint.place in places]
        if len(places) == 1 and not refused:
            (place,) = places
            if self._log is not None:
                await self._log.record_region(REGISTER, request, answers, place=place)
            self._places[request.name] = place
            return mapped[0].message
        await self._undo(request.name, mapped, answers)
        if refused and refused[0].error is not None:
            raise refused[0].error
        if not mapped:
            return accepted_by_all(answers)  # raises the first server's error
        raise InvalidRequest("key", f"memory that {len(places)} machines have", "a key of one machine alone")

    async def _check_key(self, request: Message) -> None:
        """Refuse a key that is registered under another name.

        Triton 2.51 takes it for a file that it has closed since, which by now may be one of its connections: it is told
        that the key is invalid, and closes that.
        """
        message = service_pb2.SystemSharedMemoryStatusRequest()
        answers = await self._servers.call_each("SystemSharedMemoryStatus", message, timeout_s=self._timeout_s)
        for answer in answers:
            for name, region in answer.message.regions.items() if answer.error is None else ():
                if region.key == request.key and name != request.name:
                    raise InvalidRequest(
                        "key", "memory that is registered under another name", "memory that is registered once"
                    )

    async def _undo(self, name: str, mapped: Sequence[ServerAnswer], answers: Sequence[ServerAnswer]) -> None:
        others = {a.endpoint.server_id for a in answers} - {a.endpoint.server_id for a in mapped}
        if mapped:
            message = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
            await self._servers.call_each(UNREGISTER, message, timeout_s=self._timeout_s, without=others)

    async def unregister(self, request: Message) -> Message:
        """`SystemSharedMemoryUnregisterResponse`: one region, or with an empty name all that clients have registered.

        As in Triton, a name that nobody has is fine.

        Raises:
            BackendFailed: A server still uses the region; ask again.
            ServeAppError: Not allowed, or no server could be asked.
        """
        self.check_allowed()
        check_region_name(request.name, field="region name")
        return await self._finish(lambda: self._unregister(request.name))

    async def _unregister(self, name: str) -> Message:
        async with self._lock:
            for each in [name] if name else await self._all_names():
                await self._unregister_one(each)
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    async def _all_names(self) -> list[str]:
        """One by one and never all at once on a server: regions that are not clients' stay."""
        status = await self.status(service_pb2.SystemSharedMemoryStatusRequest())
        return sorted({*status.regions, *self._places} - {""})

    async def _unregister_one(self, name: str) -> None:
        message = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        for num_left in reversed(range(_NUM_TRIES)):
            answers = await self._servers.call_each(UNREGISTER, message, timeout_s=self._timeout_s)
            if num_left and any(isinstance(answer.error, BackendFailed) for answer in answers):
                await asyncio.sleep(_PAUSE_S)
                continue
            break
        accepted_by_all(answers)
        place = self._places.get(name)
        if place is not None and self._log is not None:
            await self._log.record_region(UNREGISTER, message, answers, place=place)
        self._places.pop(name, None)

    def check_allowed(self) -> None:
        """Raise `Unsupported` unless clients may use shared memory."""
        if not self.is_allowed:
            raise Unsupported("shared memory", NO_SHARED_MEMORY)

    # --- looking at it ------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Regions that this replica knows to be registered."""
        return {"num_regions": len(self._places)}

    def __repr__(self) -> str:
        state = f"{len(self._places)} regions" if self.is_allowed else "not allowed"
        return f"<SharedMemory {state}>"
