"""What the supervisor asks its own server over gRPC. The only file of the fleet that talks to a server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.clock import Clock
from serve_app.endpoint import secret_metadata
from serve_app.errors import BackendFailed, DeadlineExceeded, EndpointUnavailable, ServeAppError

_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
]
"""A channel of its own that looks for a starting server every 50-200 ms."""

READY = "READY"
"""State of a loaded model version in the repository index."""

MAX_REASON = 500
"""Characters kept of a reason that Triton gives; stack traces follow the first line."""


PROBE_PAUSE_S = 1.0
"""Between two probes of a running server."""

MAX_PROBE_S = 5.0
"""How long a probe may take; a server under full load answers in milliseconds."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """One line of the repository index.

    Attributes:
        name: Model.
        version: Version; empty for a model that was never loaded.
        state: `READY`, `LOADING`, `UNLOADING`, `UNAVAILABLE`, or empty when never loaded.
        reason: Why it is in that state, one line.
    """

    name: str
    version: str
    state: str
    reason: str


class ServerProbe:
    """Calls to one server, each with a timeout; use with `async with`.

    Args:
        target: gRPC target.
        secret: What the server wants to be shown for `endpoint.ADMIN_RPCS`.
    """

    def __init__(self, target: str, *, secret: str = "") -> None:
        self.target = target
        self._secret = secret
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __repr__(self) -> str:
        return f"<ServerProbe of {self.target}>"

    async def __aenter__(self) -> ServerProbe:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the channel; calls under way are cancelled."""
        await asyncio.shield(self._channel.close(None))

    async def server_name(self, *, timeout_s: float) -> tuple[str, str]:
        """Name (the `--id`) and release of the server that answers.

        Raises:
            EndpointUnavailable: Nothing answers there.
            DeadlineExceeded: It did not answer in time.
        """
        metadata = await self._call("ServerMetadata", service_pb2.ServerMetadataRequest(), timeout_s=timeout_s)
        return metadata.name, metadata.version

    async def is_ready(self, *, timeout_s: float) -> bool:
        """Whether the server says that it is ready; errors as in `server_name`."""
        answer = await self._call("ServerReady", service_pb2.ServerReadyRequest(), timeout_s=timeout_s)
        return bool(answer.ready)

    async def models(self, *, timeout_s: float) -> list[ModelState]:
        """The repository index; errors as in `server_name`."""
        index = await self._call("RepositoryIndex", service_pb2.RepositoryIndexRequest(), timeout_s=timeout_s)
        return [ModelState(m.name, m.version, m.state, first_line(m.reason)) for m in index.models]

    async def model_config(self, name: str, *, timeout_s: float) -> Any:
        """A loaded model's `ModelConfig` protobuf message; errors as in `server_name`."""
        request = service_pb2.ModelConfigRequest(name=name)
        return (await self._call("ModelConfig", request, timeout_s=timeout_s, model_name=name)).config

    async def load(self, name: str, *, config: str | None = None, timeout_s: float) -> None:
        """Load a model.

        Args:
            name: Model.
            config: JSON of a whole config that replaces the repository's; not merged with it.
            timeout_s: Budget; loading goes on in the server when it runs out.

        Raises:
            BackendFailed: It did not load; the reason is Triton's. An old version goes on serving.
            EndpointUnavailable: Nothing answers there.
            DeadlineExceeded: It did not load in time.
        """
        request = service_pb2.RepositoryModelLoadRequest(model_name=name)
        if config is not None:
            request.parameters["config"].string_param = config
        await self._call("RepositoryModelLoad", request, timeout_s=timeout_s, model_name=name)

    async def unload(self, name: str, *, timeout_s: float) -> None:
        """Unload a model; calls under way end first. An unknown model is no error. Errors as in `load`."""
        request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
        await self._call("RepositoryModelUnload", request, timeout_s=timeout_s, model_name=name)

    async def watch(self, limit_s: float, *, clock: Clock) -> str:
        """Probe the server until it has not answered for `limit_s`, and say so.

        Only probes that failed count, at least three in a row: time in which this process did not run is no fault
        of the server.
        """
        failing_since, num_failed = clock.now(), 0
        while True:
            started_at = clock.now()
            try:
                is_ready = await self.is_ready(timeout_s=min(MAX_PROBE_S, limit_s / 3))
            except ServeAppError:
                is_ready = False
            if is_ready:
                num_failed = 0
            else:
                num_failed += 1
                if num_failed == 1:
                    failing_since = started_at
                if num_failed >= 3 and clock.now() - failing_since >= limit_s:
                    return f"it has answered no probe for {limit_s:.3g} s"
            await asyncio.sleep(min(PROBE_PAUSE_S, limit_s / 4))

    async def _call(self, method: str, request: Any, *, timeout_s: float, model_name: str = "") -> Any:
        try:
            return await getattr(self._stub, method)(
                request, timeout=timeout_s, metadata=secret_metadata(self._secret, method)
            )
        except grpc.aio.AioRpcError as error:
            raise self._translate(method, error, timeout_s=timeout_s, model_name=model_name) from None

    def _translate(
        self, method: str, error: grpc.aio.AioRpcError, *, timeout_s: float, model_name: str
    ) -> ServeAppError:
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"waiting for {method} of {self.target}", timeout_s)
        if code is grpc.StatusCode.UNAVAILABLE or not model_name:
            return EndpointUnavailable(self.target, f"{code.name}: {first_line(error.details() or '')}")
        return BackendFailed(model_name, first_line(error.details() or ""))


def first_line(reason: str) -> str:
    """The part of Triton's reason that comes before a stack trace."""
    return reason.strip().partition("\n")[0][:MAX_REASON]
