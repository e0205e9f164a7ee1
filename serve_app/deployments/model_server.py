"""The ModelServer deployment: V2 over HTTP and gRPC and the Python handle, in front of a fleet of Triton servers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import ray
from pydantic import ValidationError
from starlette.types import ASGIApp

from serve_app.auth.gate import open_gate
from serve_app.batching.replica_load import Share
from serve_app.clock import MonotonicClock
from serve_app.dataplane import DataPlane
from serve_app.deployments.change_log import FleetChanges, registry_of_static
from serve_app.deployments.collector import ServeBatchCollector
from serve_app.deployments.health import Pulse
from serve_app.deployments.registry import RegistryWatch, record_change
from serve_app.errors import PoolClosed, ReplicaUnhealthy
from serve_app.ingress.grpc_health import SERVER_SERVICES
from serve_app.ingress.grpc_servicer import GrpcServicer, name_generated_modules
from serve_app.ingress.guard import RpcGuard
from serve_app.ingress.http_app import http_app
from serve_app.protocol.arrays import request_of_arrays
from serve_app.protocol.messages import Arrays, InferRequest, ModelSpec, ParameterValue
from serve_app.runner import ModelRunner
from serve_app.settings import ModelServerArgs, ModelServerConfig, ModelSettings
from serve_app.triton.resolver import EndpointResolver
from serve_app.triton.router import Router

logger = logging.getLogger(__name__)

# How long a starting replica waits for a first endpoint before it is up without one. The front starts beside the
# fleet, and a replica that is up a moment too early would answer its first requests with errors.
_FIRST_ENDPOINT_S = 20.0


class ModelServer(GrpcServicer):
    """One replica: a router to all Triton servers, and a data plane over it.

    Serve's ingress wraps this class and asks it for its ASGI app; gRPC calls and handle calls reach its methods.

    Args:
        args: `ModelServerArgs` as JSON-like data, since it crosses processes.
    """

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        name_generated_modules()
        self._args = ModelServerArgs.model_validate(args)
        self._stack = contextlib.AsyncExitStack()
        self._clock = MonotonicClock()
        self._gate = open_gate(self._args.auth, clock=self._clock)
        if self._gate is not None:
            self._guard = RpcGuard(self._gate, server_names=SERVER_SERVICES)
        elif not self._args.auth.allow_anonymous:
            logger.warning("no keys are set (args.auth): whoever reaches this server may run, load and unload models")
        self._has_endpoint = asyncio.Event()
        self._pulse = Pulse()
        self._is_up, self._refused_config = False, ""
        self._refreshing: set[asyncio.Task[None]] = set()
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _open(self) -> None:
        registry = self._args.registry
        if self._args.endpoints:
            registry = registry_of_static(registry, self._args.endpoints)
        self._changes = FleetChanges(
            functools.partial(record_change, registry),
            lambda: self._router,
            is_static=bool(self._args.endpoints),
            on_change=self._on_model_change,
            on_region=lambda name, place: self._plane.shared_memory.learn(name, place),
        )
        self._router = await self._stack.enter_async_context(
            Router(
                self._args.channels,
                clock=self._clock,
                local_node_id=ray.get_runtime_context().get_node_id(),
                on_change=self._on_endpoints,
                prepare=self._changes.prepare,
            )
        )
        self._plane = await self._stack.enter_async_context(
            DataPlane(
                self._router,
                self._open_runner,
                config=ModelServerConfig(),
                models=self._args.models,
                clock=self._clock,
                change_log=self._changes,
                allow_client_shm=self._args.allow_client_shm,
            )
        )
        if self._args.endpoints:
            await self._stack.enter_async_context(RegistryWatch(registry, lambda _: None, changes=self._changes))
            self._source: EndpointResolver | RegistryWatch = EndpointResolver(
                self._args.endpoints,
                interval_s=self._args.resolve_interval_s,
                on_change=self._router.update,
            )
        else:
            self._source = RegistryWatch(registry, self._router.update, changes=self._changes)
        await self._stack.enter_async_context(self._source)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._has_endpoint.wait(), _FIRST_ENDPOINT_S)

    def _on_model_change(self, model_name: str) -> None:
        """Another replica has loaded or unloaded a model: look at it now rather than at the next comparison."""
        self._router.unblock(model_name)
        task = asyncio.ensure_future(self._plane.refresh(model_name))
        self._refreshing.add(task)
        task.add_done_callback(self._refreshing.discard)

    def _on_endpoints(self) -> None:
        if self._router.num_endpoints:
            self._has_endpoint.set()
        self._plane.wake()

    def _open_runner(self, spec: ModelSpec, settings: ModelSettings) -> ModelRunner:
        return ModelRunner(
            spec,
            settings,
            send=lambda request, timeout_s: self._router.infer(
                request,
                timeout_s=timeout_s,
                spec=spec,
                hedge_after_s=self._plane.config.for_model(spec.name).hedge_after_s,
            ),
            num_endpoints=lambda: self._router.num_endpoints,
            limits=self._args.limits,
            clock=self._clock,
            collect=ServeBatchCollector,
            open_stream=lambda request, response_timeout_s, timeout_s: self._router.stream(
                request, response_timeout_s=response_timeout_s, timeout_s=timeout_s
            ),
        )

    # --- called by Ray Serve ------------------------------------------------------------------------------

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The replica's ASGI app."""
        return http_app(self._plane, self._args.limits, gate=self._gate)

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Apply a new `user_config` in place; a coroutine, for Ray Serve calls plain methods in another thread.

        A running replica refuses settings that are wrong by keeping those it has: Ray Serve would stop every replica
        that raises here, so one slip in a file would end the service. The refusal is logged, and `statistics` has it.

        Raises:
            pydantic.ValidationError: A key is unknown or a value out of range, and the replica is only starting.
        """
        try:
            settings = ModelServerConfig.model_validate(config)
        except ValidationError as problem:
            if not self._is_up:
                raise
            self._refused_config = str(problem)
            logger.error("user_config refused, the settings in force stay: %s", problem)
            return
        self._is_up, self._refused_config = True, ""
        self._plane.reconfigure(settings)

    async def check_health(self) -> None:
        """Raises when this replica cannot work; that no Triton is there is not this replica's fault.

        It runs on the loop that answers requests, so that Serve's own bound on this call looks at the loop.
        """
        if not self._plane.is_live():
            raise PoolClosed("this replica")
        faults = self._pulse.faults(self._plane.statistics().models, self._router.statistics(), now=self._clock.now())
        if not self._source.is_running:
            faults.append("nothing follows which servers there are")
        if faults:
            logger.error("this replica is to be replaced: %s", "; ".join(faults))
            raise ReplicaUnhealthy(faults)
        self._is_up = True  # Serve asks once the replica has started, with or without settings

    async def __del__(self) -> None:
        """Ray Serve awaits this when it stops a replica, after its last request; no garbage collector is involved."""
        if hasattr(self, "_stack"):
            await self._stack.aclose()

    # --- handle calls -------------------------------------------------------------------------------------

    async def infer(
        self,
        model_name: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        model_version: str = "",
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Arrays:
        """Run a model on arrays; what `handle.infer.remote(...)` calls.

        Args:
            model_name: The model.
            inputs: Arrays by input name, rows first where the model batches.
            model_version: Empty for the server's choice.
            outputs: Names wanted, all when `None`.
            parameters: V2 request parameters.
            request_id: Passed on to Triton.
            timeout_s: Whole budget in seconds; the model's setting when `None`.

        Returns:
            Arrays by output name, in the order asked for.

        Raises:
            ServeAppError: As the HTTP and gRPC ingress would answer it.
        """
        request = request_of_arrays(
            model_name,
            inputs,
            model_version=model_version,
            outputs=outputs,
            parameters=parameters,
            request_id=request_id,
        )
        with self._admitted(request, timeout_s):
            answer = await self._plane.infer(request, timeout_s=timeout_s)
        return {tensor.name: tensor.to_numpy() for tensor in answer.outputs}

    async def stream(
        self,
        model_name: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        model_version: str = "",
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Arrays, None]:
        """Run a model and give each of its responses; what `handle.options(stream=True).stream.remote(...)` calls.

        A decoupled model gives zero to many responses, every other model one. Cancelling the call cancels the model's
        work.

        Args:
            model_name: The model.
            inputs: As for `infer`, and so are the other arguments.
            model_version: Empty for the server's choice.
            outputs: Names wanted, all when `None`.
            parameters: V2 request parameters.
            request_id: Passed on to Triton.
            timeout_s: Whole budget in seconds. When `None`, each response has the model's `timeout_s` setting.

        Yields:
            Arrays by output name.

        Raises:
            ServeAppError: As `infer`, at any time.
        """
        request = request_of_arrays(
            model_name,
            inputs,
            model_version=model_version,
            outputs=outputs,
            parameters=parameters,
            request_id=request_id,
        )
        with self._admitted(request, timeout_s):
            async with contextlib.aclosing(self._plane.stream(request, timeout_s=timeout_s)) as responses:
                async for response in responses:
                    if response.outputs:
                        yield {tensor.name: tensor.to_numpy() for tensor in response.outputs}

    def _admitted(self, request: InferRequest, timeout_s: float | None) -> Share:
        return self._plane.admission.admit(
            request.model_name,
            request.model_version,
            size_bytes=request.size_bytes,
            timeout_s=timeout_s,
            asked_priority=int(request.parameters.get("priority") or 0),
        )

    async def statistics(self) -> dict[str, Any]:
        """This replica's counts and its settings in force, for tests and tools."""
        return {
            "plane": self._plane.statistics(),
            "router": self._router.statistics(),
            "config": self._plane.config,
            "refused_config": self._refused_config,
            "gate": None if self._gate is None else self._gate.statistics(),
            "repr": repr(self._plane),
        }
