"""What clients read and change of the fleet as a whole: statistics, the model repository, trace and log settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol

from tritonclient.grpc import service_pb2

from serve_app.auth.principal import is_visible
from serve_app.errors import PoolClosed
from serve_app.protocol.control_codec import check_file_paths
from serve_app.protocol.server_answers import ServerAnswer, accepted_by_all, messages_of
from serve_app.protocol.statistics import merge_model_statistics

Message = Any

LOAD_TIMEOUT_S = 300.0
"""Budget of a load or unload on each server, in seconds; large models take their time."""


class FleetCalls(Protocol):
    """Calls to one server or to each. `triton.Router` is one."""

    async def call(self, rpc_name: str, message: Message, *, timeout_s: float, model_name: str = "") -> Message:
        """Ask any server."""
        ...

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


class ChangeLog(Protocol):
    """Where accepted changes of the model repository are kept, for servers that join later."""

    def check(self, model_name: str, size_bytes: int) -> None:
        """Raise `RequestTooLarge` when one more change would not fit."""
        ...

    async def record(self, rpc_name: str, message: Message, answers: Sequence[ServerAnswer]) -> None:
        """Keep a change; it replaces the one before it of the same model.

        Args:
            rpc_name: `RepositoryModelLoad` or `RepositoryModelUnload`.
            message: Its request message.
            answers: Of the servers that were asked; some may not have been there.
        """
        ...


class FleetControl:
    """The calls that concern all servers.

    Args:
        triton: How the servers are asked; borrowed.
        check_name: Raises `ModelNotFound` for a model that is not served here.
        is_served: Whether a model is served here.
        on_change: Awaited with the name of a model that was loaded or unloaded, before its caller is answered.
        log: Where changes are kept; nowhere when `None`.
        timeout_s: Budget in seconds of a call that loads nothing.
        load_timeout_s: Budget in seconds of a load or unload.
    """

    def __init__(
        self,
        triton: FleetCalls,
        *,
        check_name: Callable[[str, str], None],
        is_served: Callable[[str], bool] = lambda name: True,
        on_change: Callable[[str], Awaitable[None]],
        log: ChangeLog | None = None,
        timeout_s: float = 5.0,
        load_timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        self._triton = triton
        self._check_name = check_name
        self._is_served = is_served
        self._on_change = on_change
        self._log = log
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._is_closed = False
        self._lock = asyncio.Lock()
        self._changing: set[asyncio.Task[Message]] = set()
        self._num_changes = 0

    # --- reading ------------------------------------------------------------------------------------------

    async def model_statistics(self, name: str = "", version: str = "") -> Message:
        """`ModelStatisticsResponse` of all servers together.

        Args:
            name: A model; all models that are loaded, served here and the caller's, when empty.
            version: A version; all when empty.

        Raises:
            ModelNotFound: No server has it loaded.
            ServeAppError: No server could be asked.
        """
        if name:
            self._check_name(name, version)
        request = service_pb2.ModelStatisticsRequest(name=name, version=version)
        answers = await self._triton.call_each("ModelStatistics", request, timeout_s=self._timeout_s, model_name=name)
        merged = merge_model_statistics(messages_of(answers))
        hidden = [entry for entry in merged.model_stats if not (self._is_served(entry.name) and is_visible(entry.name))]
        for entry in hidden:
            merged.model_stats.remove(entry)
        return merged

    # --- settings -----------------------------------------------------------------------------------------

    async def trace_setting(self, request: Message) -> Message:
        """`TraceSettingResponse`: of any server when nothing is to be changed, else after the change of every one."""
        if request.model_name:
            self._check_name(request.model_name, "")
        return await self._settings("TraceSetting", request, request.model_name)

    async def log_settings(self, request: Message) -> Message:
        """`LogSettingsResponse`, as `trace_setting`."""
        return await self._settings("LogSettings", request, "")

    async def _settings(self, rpc_name: str, request: Message, model_name: str) -> Message:
        if not request.settings:
            return await self._triton.call(rpc_name, request, timeout_s=self._timeout_s, model_name=model_name)
        return accepted_by_all(
            await self._triton.call_each(rpc_name, request, timeout_s=self._timeout_s, model_name=model_name)
        )

    # --- the model repository -----------------------------------------------------------------------------

    async def load_model(self, request: Message) -> Message:
        """Load a model, or load it again, on every server; `RepositoryModelLoadResponse`.

        Changes are made one after the other. A caller that leaves does not stop one that has begun.

        Args:
            request: `RepositoryModelLoadRequest` with `config` and `file:` parameters, as Triton has them.

        Raises:
            InvalidRequest: A file that would not lie inside the model's folder.
            RequestTooLarge: More models or bytes than are kept for servers that join later.
            ServeAppError: A server refused (the first one's error; others may have loaded it), or none could be asked.
        """
        check_file_paths(request)
        return await self._change("RepositoryModelLoad", request)

    async def unload_model(self, request: Message) -> Message:
        """Unload a model on every server; `RepositoryModelUnloadResponse`. As `load_model`."""
        return await self._change("RepositoryModelUnload", request)

    async def _change(self, rpc_name: str, request: Message) -> Message:
        self._check_name(request.model_name, "")
        if self._log is not None:
            self._log.check(request.model_name, request.ByteSize())
        return await self.finish(lambda: self._change_all(rpc_name, request))

    async def finish(self, change: Callable[[], Coroutine[Any, Any, Message]]) -> Message:
        """Make a change of all servers to its end, even if the caller leaves.

        Raises:
            PoolClosed: This replica is going.
            ServeAppError: As the change.
        """
        if self._is_closed:
            raise PoolClosed("this replica")
        task = asyncio.ensure_future(change())
        self._changing.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by `aclose`, not by the caller's own caller
                raise PoolClosed("this replica") from None
            raise

    def _forget(self, task: asyncio.Task[Message]) -> None:
        self._changing.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have gone: read it, or asyncio logs it as lost

    async def _change_all(self, rpc_name: str, request: Message) -> Message:
        name = request.model_name
        async with self._lock:
            try:
                answers = await self._triton.call_each(
                    rpc_name, request, timeout_s=self._load_timeout_s, model_name=name
                )
                answer = accepted_by_all(answers)
                self._num_changes += 1
                if self._log is not None:
                    await self._log.record(rpc_name, request, answers)
            finally:
                await self._on_change(name)
        return answer

    # --- life ---------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Refuse new changes, and let go of those under way: servers finish what they were asked."""
        self._is_closed = True
        tasks = list(self._changing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def statistics(self) -> dict[str, int]:
        """Changes made, and those under way."""
        return {"num_changes": self._num_changes, "num_changing": len(self._changing)}

    def __repr__(self) -> str:
        return f"<FleetControl Changes: {self._num_changes} made, {len(self._changing)} under way>"
