"""The TritonServer deployment: each replica supervises one tritonserver on the node Ray put it on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import ray

from serve_app.deployments.change_log import replay
from serve_app.deployments.registry import Lease
from serve_app.endpoint import Endpoint
from serve_app.errors import ServeAppError
from serve_app.fleet.changes import Change
from serve_app.fleet.supervisor import TritonSupervisor
from serve_app.settings import ChannelSettings, TritonServerArgs, state_dir
from serve_app.triton.pool import ChannelPool

logger = logging.getLogger(__name__)


class TritonServer:
    """One tritonserver and its lease in the EndpointRegistry.

    The endpoint is in the registry only while the server is ready, and leaves it before the server stops. Ray
    Serve's health check fails once the supervisor has given up, so that Serve replaces the replica.

    Args:
        args: As JSON-like data, since it crosses processes.
    """

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._args = TritonServerArgs.model_validate(args)
        self._stack = contextlib.AsyncExitStack()
        try:
            self._lease = await self._stack.enter_async_context(
                Lease(self._args.registry, lease_s=self._args.lease_s, catch_up=self._catch_up)
            )
            self._supervisor = await self._stack.enter_async_context(
                TritonSupervisor(
                    self._args,
                    state_dir=state_dir(),
                    host=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]  # Ray's
                    node_id=ray.get_runtime_context().get_node_id(),
                    on_endpoint=self._on_endpoint,
                )
            )
        except BaseException:
            await self._stack.aclose()
            raise

    async def _catch_up(self, endpoint: Endpoint, changes: Sequence[Change]) -> None:
        """Load and unload what clients have loaded and unloaded before this server started."""

        async def call(rpc_name: str, message: Any, timeout_s: float) -> Any:
            return await pool.call(rpc_name, lambda left_s: message, timeout_s=timeout_s)

        try:
            async with ChannelPool(endpoint, ChannelSettings(num_channels=1)) as pool:
                await replay(endpoint, changes, call, timeout_s=self._args.start_timeout_s)
        except ServeAppError as error:  # a server that is lost has a supervisor that starts it again
            logger.error("changes of models could not be made: %s", error)

    def _on_endpoint(self, endpoint: Endpoint | None) -> None:
        logger.info("endpoint: %s", endpoint)
        self._lease.set(endpoint)

    async def check_health(self) -> None:
        """Called by Ray Serve; raises when the supervisor has given up."""
        self._supervisor.check_health()

    async def statistics(self) -> dict[str, Any]:
        """What the supervisor counts, and where its server is."""
        return {"endpoint": self._supervisor.endpoint, "supervisor": self._supervisor.statistics()}

    async def __del__(self) -> None:
        """Ray Serve awaits this when it stops a replica; no garbage collector is involved.

        Should the process die without it, the server's guard ends the server all the same.
        """
        if hasattr(self, "_supervisor"):
            await self._stack.aclose()
