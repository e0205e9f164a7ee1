"""The channels to one Triton server: their life, and the calls on them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any

from serve_app.clock import Clock, MonotonicClock
from serve_app.endpoint import Endpoint
from serve_app.errors import DeadlineExceeded, PoolClosed, PoolTimeout, ServeAppError, Unsupported
from serve_app.protocol.grpc_codec import (
    decode_infer_response,
    encode_infer_request,
    large_infer_request,
    output_regions,
)
from serve_app.protocol.messages import InferRequest, InferResponse
from serve_app.settings import ChannelSettings
from serve_app.triton.assignment import Assignment
from serve_app.triton.channel import Channel
from serve_app.triton.channel_set import ChannelSet
from serve_app.triton.closing import finish
from serve_app.triton.pool_statistics import PoolState, PoolStatistics
from serve_app.triton.status import CallContext
from serve_app.triton.tls import CertificateFiles

CLOSE_GRACE_S = 5.0
"""How long `aclose` lets calls finish when it is not told otherwise."""

Build = Callable[[float], Any]
"""Makes a request message, given the budget in seconds that is left for the call."""

LEAVE_TIMEOUT_S = 1.0
"""How long `aclose` waits for callers whose calls it has just cut off; they need a tick or two."""


class ChannelPool:
    """Distinct connections to one Triton server, with the least busy one for each call.

    Who gets which channel is decided in `Assignment`; here are the life of the pool, the calls and the counts. May be
    made outside an event loop. It belongs to the loop in which it is opened; once closed it may be opened again, in
    another loop too.

    ```python
    async with ChannelPool(Endpoint.static("127.0.0.1:8001"), ChannelSettings()) as pool:
        response = await pool.infer(request, timeout_s=1.0)
    ```

    Args:
        endpoint: The server.
        settings: How many channels, how many calls on each, and how each connects.
        clock: Tells how much of a budget the wait for a channel took.
        files: Certificates for TLS, as they are when a channel is made; read from the settings' files when not given.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: ChannelSettings,
        *,
        clock: Clock | None = None,
        files: CertificateFiles | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or MonotonicClock()
        self._state = PoolState.NEW
        self._channels = ChannelSet(endpoint, settings, files)
        self._num_done = self._num_failed = self._num_cancelled = self._num_timed_out = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    # --- life ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the channels, which connect when first used. Needs a running event loop; does nothing when open.

        A pool that was left open in a loop that has ended starts afresh in the running one.

        Raises:
            PoolClosed: The pool is being closed.
            Unsupported: The pool is open in another loop.
        """
        loop = asyncio.get_running_loop()
        if self._state in (PoolState.READY, PoolState.CLOSING) and self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise Unsupported(f"using {self!r} from a second event loop", "make a pool for each loop")
            self._channels.restart()
        elif self._state is PoolState.READY:
            return
        elif self._state is PoolState.CLOSING:
            raise PoolClosed(repr(self))
        self._loop, self._closing, self._wake = loop, None, asyncio.Event()
        self._channels.renew(self._assignment.generation)
        self._state = PoolState.READY

    async def warm_up(self, *, timeout_s: float | None = None, wait_for_ready: bool = False) -> None:
        """Open the pool and connect every channel: one first, so that errors surface early, then the others together.

        Args:
            timeout_s: Budget in seconds; `connect_timeout_s` of the settings when not given.
            wait_for_ready: Whether to go on trying until the budget ends when the server cannot be reached.

        Raises:
            EndpointUnavailable: A channel could not be connected, or the server is not live.
        """
        self.open()
        budget_s = self._settings.connect_timeout_s if timeout_s is None else timeout_s
        await self._channels.connect(timeout_s=budget_s, wait_for_ready=wait_for_ready)

    async def __aenter__(self) -> ChannelPool:
        try:
            await self.warm_up()
        except BaseException:
            await self.aclose(grace_s=0.0)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def expire_connections(self) -> None:
        """Use new connections from the next call on; old ones are closed when their last call ends."""
        if self._state is PoolState.READY:
            self._channels.renew(self._assignment.generation + 1)

    async def aclose(self, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """Refuse new calls, let the running ones finish, then cut off what is left and close the connections.

        Waiting callers get `PoolClosed` at once; calls that are cut off end with `EndpointUnavailable`. A caller that
        is cancelled here cuts the wait short; the connections are closed before this returns in any case. Idempotent.

        Args:
            grace_s: How long running calls may go on, in seconds.
        """
        if self._closing is None:
            if self._state is not PoolState.READY:
                self._state = PoolState.CLOSED
                return
            self._state = PoolState.CLOSING
            self._assignment.expire_all(PoolClosed(repr(self)))
            self._wake.clear()
            self._closing = asyncio.ensure_future(self._close(grace_s))
        await finish(self._closing, self.hasten)

    def hasten(self) -> None:
        """Make an `aclose` that waits for running calls cut them off now."""
        if self._state is PoolState.CLOSING:
            self._wake.set()

    async def _close(self, grace_s: float) -> None:
        if self._assignment.num_active and grace_s > 0:
            await self._wait_for_wake(grace_s)
        await self._channels.aclose()
        if self._assignment.num_active:
            self._wake.clear()
            await self._wait_for_wake(LEAVE_TIMEOUT_S)
        self._state = PoolState.CLOSED

    async def _wait_for_wake(self, timeout_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout_s)

    # --- calls --------------------------------------------------------------------------------------------

    async def infer(self, request: InferRequest, *, timeout_s: float) -> InferResponse:
        """Run one request on the least busy channel.

        Args:
            request: Tensors are borrowed, not copied; do not change them until this returns.
            timeout_s: Whole budget in seconds, the wait for a channel included.

        Raises:
            PoolTimeout: No channel became free within the budget.
            PoolClosed: The pool is not open, or was closed while the caller waited.
            ServeAppError: See `status.translate`.
        """
        answer = await self.call(
            "ModelInfer",
            lambda left_s: large_infer_request(request) or encode_infer_request(request),
            timeout_s=timeout_s,
            model_name=request.model_name,
            model_version=request.model_version,
        )
        return decode_infer_response(answer, output_regions(request) if request.regions else None)

    async def call(
        self,
        rpc_name: str,
        build: Build,
        *,
        timeout_s: float,
        model_name: str = "",
        model_version: str = "",
        is_repeatable: bool = False,
    ) -> Any:
        """Carry one unary call of `GRPCInferenceService` on the least busy channel.

        If the caller is cancelled, the call is cancelled on the server, and the channel is free again when this ends.

        Args:
            rpc_name: For example `ModelMetadata`.
            build: Makes the request message once there is a channel for it, so that callers who wait for one do not
                each hold an encoded copy of their tensors.
            timeout_s: Whole budget in seconds, the wait for a channel included.
            model_name: The model it is about, for error texts.
            model_version: The version it is about, for error texts.
            is_repeatable: Whether `abandon_calls` ends it.

        Returns:
            The response message.

        Raises:
            ServeAppError: As for `infer`.
        """
        channel, left_s = await self._take(timeout_s)
        try:
            context = CallContext(self.endpoint.address, model_name, model_version, timeout_s)
            answer = await channel.call(rpc_name, build(left_s), context, timeout_s=left_s, is_repeatable=is_repeatable)
        except asyncio.CancelledError:
            self._num_cancelled += 1
            raise
        except BaseException:
            self._num_failed += 1
            raise
        else:
            self._num_done += 1
            return answer
        finally:
            self._give_back(channel)

    async def stream(
        self,
        build: Build,
        *,
        response_timeout_s: float,
        timeout_s: float | None,
        model_name: str,
        model_version: str = "",
        is_repeatable: bool = False,
    ) -> AsyncGenerator[Any, None]:
        """Carry one request by a `ModelStreamInfer` call of its own, which holds its channel to the end.

        Closing the generator, or cancelling who waits in it, cancels the request on the server. Iterate it inside
        `contextlib.aclosing`.

        Args:
            build: Makes the `ModelInferRequest` once there is a channel for it.
            response_timeout_s: How long one response, and the wait for a channel, may take, in seconds.
            timeout_s: How long all of it may take, in seconds; `None` for any time.
            model_name: The model.
            model_version: Its version.
            is_repeatable: Whether `abandon_calls` ends it before the first response.

        Yields:
            Each `ModelInferResponse`.

        Raises:
            ServeAppError: As for `infer`.
        """
        first_s = response_timeout_s if timeout_s is None else min(response_timeout_s, timeout_s)
        arrived_at = self._clock.now()
        channel, left_s = await self._take(first_s)
        try:
            if timeout_s is not None:
                timeout_s = max(timeout_s - (self._clock.now() - arrived_at), 0.001)
            budget_s = response_timeout_s if timeout_s is None else timeout_s
            context = CallContext(self.endpoint.address, model_name, model_version, budget_s)
            async with contextlib.aclosing(
                channel.stream(
                    build(left_s),
                    context,
                    response_timeout_s=response_timeout_s,
                    timeout_s=timeout_s,
                    is_repeatable=is_repeatable,
                )
            ) as answers:
                async for answer in answers:
                    yield answer
        except (asyncio.CancelledError, GeneratorExit):
            self._num_cancelled += 1
            raise
        except BaseException:
            self._num_failed += 1
            raise
        else:
            self._num_done += 1
        finally:
            self._give_back(channel)

    async def _take(self, timeout_s: float) -> tuple[Channel, float]:
        """A channel that is the caller's until `_give_back`, and what is left of the budget."""
        if self._state is not PoolState.READY:
            raise PoolClosed(repr(self))
        if self._loop is not asyncio.get_running_loop():
            self.open()
        if timeout_s <= 0:
            raise DeadlineExceeded(f"sending to Triton at {self.endpoint.address}", timeout_s)
        taken = self._assignment.take()
        if isinstance(taken, Channel):
            return taken, timeout_s
        arrived_at = self._clock.now()
        channel = await self._wait(taken, timeout_s)
        return channel, max(timeout_s - (self._clock.now() - arrived_at), 0.001)

    async def _wait(self, place: asyncio.Future[Channel], timeout_s: float) -> Channel:
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, place, timeout_s)
        try:
            return await place
        except asyncio.CancelledError:
            self._num_cancelled += 1
            self._channels.close_all(self._assignment.leave(place))
            raise
        finally:
            timer.cancel()

    def _expire(self, place: asyncio.Future[Channel], timeout_s: float) -> None:
        error = PoolTimeout(f"waiting for a channel to {self.endpoint.address}", timeout_s)
        self._num_timed_out += self._assignment.expire(place, error)

    def _give_back(self, channel: Channel) -> None:
        self._channels.close_all(self._assignment.give_back(channel))
        if self._state is PoolState.CLOSING and self._assignment.num_active == 0:
            self._wake.set()

    def abandon_calls(self, error: ServeAppError) -> None:
        """End every call that may be sent again elsewhere with a copy of `error`; the others go on."""
        self._channels.abandon_calls(error)

    async def ask_apart(self, *, timeout_s: float) -> None:
        """Ask the server whether it is alive, over a connection of its own, which waits for nothing else.

        Raises:
            EndpointUnavailable: It is not, or there was no answer within the budget.
        """
        await self._channels.ask_apart(timeout_s=timeout_s)

    def fail_waiting(self, error: ServeAppError) -> None:
        """End the wait of every caller that has no channel yet with `error`; running calls go on."""
        self._assignment.expire_all(error)

    # --- looking at it ------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> Endpoint:
        """The server."""
        return self._channels.endpoint

    @endpoint.setter
    def endpoint(self, endpoint: Endpoint) -> None:
        self._channels.endpoint = endpoint

    @property
    def _assignment(self) -> Assignment:
        return self._channels.assignment

    @property
    def num_in_flight(self) -> int:
        """Calls that hold a channel or wait for one."""
        return self._assignment.num_active + self._assignment.num_waiting

    def is_full(self) -> bool:
        """Whether the next call would have to wait for a channel."""
        return self._assignment.is_full()

    def statistics(self) -> PoolStatistics:
        """Counts of now and since the pool was made."""
        return PoolStatistics(
            address=self.endpoint.address,
            state=self._state,
            num_channels=len(self._assignment.channels),
            num_active=self._assignment.num_active,
            num_waiting=self._assignment.num_waiting,
            num_done=self._num_done,
            num_failed=self._num_failed,
            num_cancelled=self._num_cancelled,
            num_timed_out=self._num_timed_out,
        )

    def __repr__(self) -> str:
        return f"<ChannelPool {self.endpoint.address} [{self._state.value}] {self._assignment!r}>"
