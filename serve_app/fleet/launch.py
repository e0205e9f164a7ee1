"""From settings to a `tritonserver` that is ready: checks, addresses, command line, and retries on taken ports."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from serve_app.clock import Clock
from serve_app.errors import ServerStartFailed
from serve_app.fleet import life
from serve_app.fleet.command import Listen, server_command
from serve_app.fleet.preflight import check_host, check_socket_path
from serve_app.fleet.process import TritonProcess, free_ports
from serve_app.fleet.repository import can_disable_auto_complete, list_models
from serve_app.fleet.runtime import TritonRuntime
from serve_app.settings import TritonServerArgs, resolve_path

logger = logging.getLogger(__name__)

PORT_ATTEMPTS = 5
"""How often a start is tried again when somebody else took a port between choosing and binding it."""


class Launcher:
    """Starts the lives of one server.

    Args:
        args: Settings of the server.
        state_dir: Folder for logs and sockets.
        host: Address that gRPC binds with `transport: tcp`.
        runtime: Which binary; found by `prepare` when `None`.
        environ: Environment for the server.
        clock: Monotonic clock.
    """

    def __init__(
        self,
        args: TritonServerArgs,
        *,
        state_dir: Path,
        host: str,
        runtime: TritonRuntime | None,
        environ: Mapping[str, str] = os.environ,
        clock: Clock,
    ) -> None:
        self.runtime = runtime
        self.num_starts = 0
        self._args = args
        self._state_dir = state_dir
        self._host = host
        self._environ = environ
        self._clock = clock
        self._repository = resolve_path(args.model_repository, environ)

    def __repr__(self) -> str:
        return f"<Launcher of {self._repository}: {self.num_starts} starts>"

    def prepare(self) -> list[str]:
        """Check the machine and sweep what earlier servers left behind. Blocks for some milliseconds.

        Returns:
            Names of the models to load.

        Raises:
            PreflightFailed: The machine is not ready.
        """
        if self.runtime is None:
            self.runtime = TritonRuntime.find(self._args.tritonserver, environ=self._environ)
        models = check_host(
            self._args,
            runtime=self.runtime,
            repository=self._repository,
            state_dir=self._state_dir,
            environ=self._environ,
        )
        life.make_private(self._state_dir)
        for what in life.sweep(self._state_dir):
            logger.warning("removed what an earlier server left behind: %s", what)
        life.prune_logs(self._state_dir)
        return [model.name for model in models]

    async def launch(self, models: Sequence[str]) -> tuple[TritonProcess, str]:
        """Start a server and wait until it is ready; if that fails, or is cancelled, nothing is left of it.

        Args:
            models: Loaded at start.

        Returns:
            The running server, which the caller closes, and its release.

        Raises:
            ServerStartFailed: It did not become ready.
        """
        attempt = 0
        while True:
            process = await self._new_process(models)
            self.num_starts += 1
            try:
                process.start()
                return process, await process.wait_ready(self._args.start_timeout_s)
            except BaseException as problem:
                await process.aclose()
                attempt += 1
                can_retry = isinstance(problem, ServerStartFailed) and process.is_port_taken
                if not can_retry or attempt == PORT_ATTEMPTS:
                    raise
                logger.warning("tritonserver: another process took its port first; choosing another")

    async def _new_process(self, models: Sequence[str]) -> TritonProcess:
        if self.runtime is None:
            raise ServerStartFailed("tritonserver", "prepare() has not been called")
        tag = life.LifeTag.new()
        server_id = f"triton-{uuid.uuid4().hex[:12]}"
        listen = self._choose_listen(tag)
        secret = secrets.token_urlsafe(24) if self._args.restrict_admin else ""
        # All models, not only those loaded at start: the switch is for good, and more may be loaded later.
        known = await asyncio.to_thread(list_models, self._repository)
        argv = server_command(
            self._args,
            tritonserver=self.runtime.tritonserver,
            backend_directory=self.runtime.backend_directory,
            cache_directory=self.runtime.cache_directory,
            repository=self._repository,
            models=models,
            can_disable_auto_complete=can_disable_auto_complete([model for model in known if model.is_servable]),
            listen=listen,
            server_id=server_id,
            shm_prefix=tag.shm_prefix,
            secret=secret,
        )
        return TritonProcess(
            argv,
            env=self.runtime.environment(self._environ),
            listen=listen,
            server_id=server_id,
            tag=tag,
            log_path=self._state_dir / f"{tag}.log",
            max_log_bytes=self._args.max_log_bytes,
            stop_timeout_s=self._args.stop_timeout_s,
            secret=secret,
            clock=self._clock,
        )

    def _choose_listen(self, tag: life.LifeTag) -> Listen:
        metrics_port, http_port = free_ports("127.0.0.1", 2)
        ports = (metrics_port, http_port if self._args.allow_http else None)
        if self._args.transport == "unix":
            listen = Listen("", 0, str(self._state_dir / f"{tag}.sock"), *ports)
            check_socket_path(listen.bound_socket_path)
            return listen
        return Listen(self._host, free_ports(self._host, 1)[0], "", *ports)
