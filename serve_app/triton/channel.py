"""One gRPC channel that is one connection of its own, and the predicates by which a pool chooses among channels."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from enum import Enum
from operator import methodcaller
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.endpoint import secret_metadata
from serve_app.errors import (
    AnswerMalformed,
    DeadlineExceeded,
    EndpointUnavailable,
    EndpointUnreachable,
    PoolClosed,
    ServeAppError,
)
from serve_app.protocol.wire import LargeMessage, read_infer_response
from serve_app.settings import ChannelSettings
from serve_app.triton.cancellation import is_task_cancelled
from serve_app.triton.status import CallContext, translate
from serve_app.triton.stream import responses
from serve_app.triton.tls import Certificates, read_certificates

KEEPALIVE_TIMEOUT_S = 20.0
"""How long a ping may stay unanswered; grpc's own default."""


STREAM_ABOVE_BYTES = 8 * 1024 * 1024
"""Requests from this size on are written to their call, which costs a little more than handing them to it."""

_MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"


class ChannelState(Enum):
    """Life of a channel."""

    OPEN = "open"
    CLOSED = "closed"


def channel_options(settings: ChannelSettings) -> list[tuple[str, int]]:
    """grpc's channel arguments for these settings.

    `grpc.use_local_subchannel_pool` is what makes a channel a connection of its own: grpc otherwise shares one
    among all channels to the same address. `grpc.min_reconnect_backoff_ms` is also how long one attempt to connect
    may take.
    """
    initial_ms = round(settings.initial_reconnect_backoff_s * 1000)
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", initial_ms),
        ("grpc.min_reconnect_backoff_ms", max(initial_ms, round(settings.connect_timeout_s * 1000))),
        ("grpc.max_reconnect_backoff_ms", max(initial_ms, round(settings.max_reconnect_backoff_s * 1000))),
        ("grpc.keepalive_time_ms", round(settings.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
    ]


def open_channel(address: str, settings: ChannelSettings, certificates: Certificates | None = None) -> Any:
    """A channel of grpc, with TLS where the settings have it.

    Raises:
        PreflightFailed: The certificates are not given, and their files are not what they must be.
    """
    options: list[tuple[str, int | str]] = [*channel_options(settings)]
    if settings.tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if settings.tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", settings.tls.server_name))
    certificates = certificates or read_certificates(settings.tls)
    return grpc.aio.secure_channel(address, certificates.credentials(), options=options)


class Channel:
    """One connection to one Triton server.

    Connects by itself, when it is first used and whenever the connection was lost. Belongs to the event loop it was
    made in. Whoever takes it from a pool counts itself in `num_calls`; the channel only carries calls.

    Args:
        address: gRPC target.
        settings: Message limits, reconnect backoff, keepalive.
        generation: Which generation of its pool's channels this one is of.
        certificates: For TLS; read from the files that the settings name when not given.
        secret: What the server wants to be shown for `endpoint.ADMIN_RPCS`.
    """

    __slots__ = (
        "_abandoned",
        "_address",
        "_channel",
        "_infer_large",
        "_repeatable",
        "_secret",
        "_state",
        "_stub",
        "generation",
        "num_calls",
    )

    def __init__(
        self,
        address: str,
        settings: ChannelSettings,
        *,
        generation: int = 0,
        certificates: Certificates | None = None,
        secret: str = "",
    ) -> None:
        self._address = address
        self._secret = secret
        self._channel = open_channel(address, settings, certificates)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._stub.ModelInfer = self._channel.unary_unary(
            _MODEL_INFER,
            request_serializer=methodcaller("SerializeToString"),  # of a `LargeMessage` too
            response_deserializer=read_infer_response,
        )
        # On the wire the same call. A unary one keeps its request twice until the response is there; one that is
        # written to lets go of it as soon as it is sent.
        self._infer_large = self._channel.stream_unary(_MODEL_INFER, response_deserializer=read_infer_response)
        self._state = ChannelState.OPEN
        self._repeatable: set[Any] = set()
        self._abandoned: ServeAppError | None = None
        self.generation = generation
        self.num_calls = 0

    # --- what a pool asks -----------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Whether `aclose` was called."""
        return self._state is ChannelState.CLOSED

    def is_idle(self) -> bool:
        """Whether nobody holds it."""
        return self.num_calls == 0

    def has_expired(self, generation: int) -> bool:
        """Whether it is of an older generation than its pool's."""
        return self.generation < generation

    def is_available(self, generation: int) -> bool:
        """Whether new calls may be given to it at all."""
        return self._state is ChannelState.OPEN and self.generation == generation

    def can_handle_request(self, max_calls: int, generation: int) -> bool:
        """Whether one more call may be given to it now."""
        return self.num_calls < max_calls and self.is_available(generation)

    # --- calls ----------------------------------------------------------------------------------------------

    async def call(
        self,
        rpc_name: str,
        message: Any,
        context: CallContext,
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
        is_repeatable: bool = False,
    ) -> Any:
        """Carry one unary call.

        If the caller is cancelled, the call is cancelled on the server too.

        Args:
            rpc_name: Method of `GRPCInferenceService`, for example `ModelInfer`.
            message: Its request message; for `ModelInfer` a `LargeMessage` too.
            context: What the call is, for error texts.
            timeout_s: Budget of the call in seconds.
            wait_for_ready: Whether to wait for a connection until the budget ends, rather than to fail at once.
            is_repeatable: Whether `abandon_calls` ends it.

        Returns:
            The response message; of `ModelInfer` what `wire.read_infer_response` makes of it.

        Raises:
            ServeAppError: See `status.translate`.
            PoolClosed: The channel was closed before the call.
        """
        if self.is_closed():
            raise PoolClosed(repr(self))
        if isinstance(message, LargeMessage) and message.size_bytes >= STREAM_ABOVE_BYTES:
            call = self._infer_large(_serialized(message), timeout=timeout_s, wait_for_ready=wait_for_ready)
        else:
            call = getattr(self._stub, rpc_name)(
                message,
                timeout=timeout_s,
                wait_for_ready=wait_for_ready,
                metadata=secret_metadata(self._secret, rpc_name),
            )
        if is_repeatable:
            self._repeatable.add(call)
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.OK:  # the caller was cancelled in the tick in which the answer came
                raise asyncio.CancelledError from None
            raise translate(error.code(), error.details(), context) from None
        except grpc.aio.BaseError as error:
            raise EndpointUnavailable(context.endpoint, f"grpc could not carry the call: {error}") from None
        except asyncio.CancelledError:
            self._raise_reason(call, context)
            raise
        else:
            if answer is None:  # grpc's word for bytes that are no such message
                raise AnswerMalformed(context.model_name or "Triton", f"its answer to {rpc_name} cannot be read")
            return answer
        finally:
            self._repeatable.discard(call)

    def abandon_calls(self, error: ServeAppError) -> None:
        """End every repeatable call with a copy of `error`; the server is told, should it still listen."""
        self._abandoned = error
        for call in self._repeatable:
            call.cancel()

    def _raise_reason(self, call: Any, context: CallContext) -> None:
        """Raise what a cancelled call ended of, if that was not its caller."""
        if is_task_cancelled():
            return
        if self._abandoned is not None and call in self._repeatable and call.cancelled():
            raise type(self._abandoned)(*self._abandoned.args) from None
        if self.is_closed():
            raise EndpointUnavailable(context.endpoint, "the channel was closed during the call") from None

    async def stream(
        self,
        message: Any,
        context: CallContext,
        *,
        response_timeout_s: float,
        timeout_s: float | None,
        is_repeatable: bool = False,
    ) -> AsyncGenerator[Any, None]:
        """Carry one request by `ModelStreamInfer`; see `stream.responses`.

        Args:
            message: The `ModelInferRequest`.
            context: What the call is, for error texts.
            response_timeout_s: How long one response may take, in seconds.
            timeout_s: How long all of them may take, in seconds; `None` for any time.
            is_repeatable: Whether `abandon_calls` ends it before the first response.

        Yields:
            Each `ModelInferResponse`.

        Raises:
            ServeAppError: See `status.translate`.
            PoolClosed: The channel was closed before the call.
        """
        if self.is_closed():
            raise PoolClosed(repr(self))
        call = self._stub.ModelStreamInfer(timeout=timeout_s)
        if is_repeatable:
            self._repeatable.add(call)
        try:
            async with contextlib.aclosing(
                responses(call, message, context, response_timeout_s=response_timeout_s)
            ) as answers:
                async for answer in answers:
                    self._repeatable.discard(call)
                    yield answer
        except asyncio.CancelledError:
            self._raise_reason(call, context)
            raise
        finally:
            self._repeatable.discard(call)

    async def ping(self, *, timeout_s: float, wait_for_ready: bool = False) -> None:
        """Connect if need be, and ask the server whether it is alive.

        Args:
            timeout_s: Budget in seconds, connecting included.
            wait_for_ready: Whether to go on trying to connect until the budget ends.

        Raises:
            EndpointUnavailable: It is not, or there was no answer within the budget.
        """
        context = CallContext(self._address, timeout_s=timeout_s)
        message = service_pb2.ServerLiveRequest()
        try:
            response = await self.call(
                "ServerLive", message, context, timeout_s=timeout_s, wait_for_ready=wait_for_ready
            )
        except DeadlineExceeded:
            raise EndpointUnreachable(context.endpoint, f"no answer within {timeout_s:.3g} s") from None
        if not response.live:
            raise EndpointUnavailable(context.endpoint, "the server says that it is not live")

    async def aclose(self) -> None:
        """Close the connection; calls still under way end with `EndpointUnavailable`. Idempotent."""
        self._state = ChannelState.CLOSED
        await self._channel.close()

    def __repr__(self) -> str:
        return f"<Channel {self._address} [{self._state.value}] {self.num_calls} calls>"


async def _serialized(message: LargeMessage) -> AsyncIterator[bytes]:
    """The message's wire form, made when grpc is ready to send it and kept by nobody else."""
    yield message.SerializeToString()
