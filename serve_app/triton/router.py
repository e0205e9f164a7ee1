"""Calls to a changing set of Triton servers: each goes to the one that is best placed, and if need be to another."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from types import TracebackType
from typing import Any

from tritonclient.grpc import service_pb2

from serve_app.clock import Clock, MonotonicClock
from serve_app.endpoint import Endpoint
from serve_app.errors import PoolClosed, ServeAppError
from serve_app.protocol.grpc_codec import decode_infer_response, output_regions
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec
from serve_app.protocol.server_answers import ServerAnswer
from serve_app.settings import ChannelSettings
from serve_app.triton.broadcast import ask_each
from serve_app.triton.call import Call, inference
from serve_app.triton.choice import NEAR_CALLS
from serve_app.triton.closing import finish
from serve_app.triton.delivery import Delivery
from serve_app.triton.hedging import Hedging
from serve_app.triton.member import Member
from serve_app.triton.membership import Membership, Prepare
from serve_app.triton.pool import CLOSE_GRACE_S
from serve_app.triton.retry import RetryBudget
from serve_app.triton.router_statistics import RouterStatistics


class Router:
    """Every Triton server that this process may ask, each with a pool of channels.

    A server that a call could not reach, or that went away during one, is ejected: it is not asked until a probe finds
    every channel connected and the server live. So is one that hangs (see `stall_watch`), unless it is the last. A
    model that one server cannot serve, or serves far worse than the others (see `outliers`), is asked for elsewhere
    for a while. What is safe to send again is sent to another server (see `retry`), at most once to each.

    May be made outside an event loop; belongs to the one in which `update` is first called.

    ```python
    async with Router(ChannelSettings()) as router:
        router.update([Endpoint.static("127.0.0.1:8001"), Endpoint.static("127.0.0.1:8002")])
        response = await router.infer(request, timeout_s=1.0)
    ```

    Args:
        settings: The channels to each server.
        clock: Budgets and pauses are told by it.
        local_node_id: Ray node this process runs on; servers on it are preferred.
        local_zone: Zone of that node; taken from a server on the same node when not given.
        near_calls: Calls in flight at which a near server counts as full.
        rng: Draws among equals.
        on_change: Called, in the loop, when the servers that may be asked have changed.
        prepare: Awaited with a server that is connected, before it is asked for anything, for the first time and each
            time it has been away.
    """

    def __init__(
        self,
        settings: ChannelSettings,
        *,
        clock: Clock | None = None,
        local_node_id: str = "",
        local_zone: str = "",
        near_calls: int = NEAR_CALLS,
        rng: random.Random | None = None,
        on_change: Callable[[], None] | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._membership = Membership(
            settings,
            clock=self._clock,
            local_node_id=local_node_id,
            local_zone=local_zone,
            on_change=on_change,
            prepare=prepare,
        )
        self._delivery = Delivery(
            self._membership,
            RetryBudget.for_channels(settings),
            clock=self._clock,
            rng=rng or random.Random(),  # noqa: S311  # draws among equals, no secret
            near_calls=near_calls,
        )
        self._hedging = Hedging(self._delivery, self._clock)
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Router:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Make these the servers that are asked. Needs a running event loop; returns at once.

        A server with the same address and server id keeps its channels. New ones connect in the background and are
        asked as soon as they have; removed ones finish their calls and are closed, in the background too.

        Raises:
            PoolClosed: The router is closed.
        """
        if self._is_closed:
            raise PoolClosed(repr(self))
        self._membership.update(endpoints)

    async def aclose(self, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """Refuse new calls, let running ones finish, then cut off what is left and close everything. Idempotent.

        A caller that is cancelled here cuts the wait short; all is closed before this returns in any case.

        Args:
            grace_s: How long running calls may go on, in seconds.
        """
        self._is_closed = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(grace_s))
        await finish(self._closing, self._membership.hasten)

    async def _close(self, grace_s: float) -> None:
        await self._delivery.watch.aclose()
        await self._membership.aclose(grace_s=grace_s)

    # --- calls --------------------------------------------------------------------------------------------

    async def infer(
        self,
        request: InferRequest,
        *,
        timeout_s: float,
        spec: ModelSpec | None = None,
        hedge_after_s: float | None = None,
    ) -> InferResponse:
        """Run one request on the best placed server, and on another where that is safe and the first one fails.

        What is left of the budget goes along as Triton's `timeout` parameter, unless the request has a shorter one.
        If the caller is cancelled, the call is cancelled on the server.

        Args:
            request: Tensors are borrowed, not copied; do not change them until this returns.
            timeout_s: Whole budget in seconds, retries and the wait for a channel included.
            spec: The model; answers that it cannot have given are refused, and count against the server.
            hedge_after_s: How long an answer is waited for before a second copy goes to another server, for models
                that may run a request twice; `None` for no second copy.

        Raises:
            NoEndpoint: No server may be asked now.
            EndpointUnavailable: The server went away, and so did any other that was tried.
            ModelNotFound: No server has the model.
            ModelNotReady: No server has it loaded.
            ServeAppError: See `status.translate`.
        """
        answer: InferResponse
        if self._is_closed:
            raise PoolClosed(repr(self))
        if hedge_after_s is None or self.num_endpoints < 2:
            answer = await self._delivery.run(inference("ModelInfer", request, spec), timeout_s=timeout_s)
        else:
            answer = await self._hedging.run(
                lambda: inference("ModelInfer", request, spec), after_s=hedge_after_s, timeout_s=timeout_s
            )
        return answer

    async def stream(
        self, request: InferRequest, *, response_timeout_s: float, timeout_s: float | None = None
    ) -> AsyncGenerator[InferResponse, None]:
        """Run one request by a `ModelStreamInfer` call of its own, which gives zero to many responses.

        The server is chosen as for `infer`; another one is tried only before the first response. Responses are read
        as they are asked for. Closing the generator, or cancelling who waits in it, cancels the request on the server;
        iterate it inside `contextlib.aclosing`.

        Args:
            request: Tensors are borrowed, not copied; do not change them before the first response.
            response_timeout_s: How long one response may take, in seconds; time in which nobody asks does not count.
            timeout_s: How long all of it may take, in seconds; `None` for any time.

        Yields:
            Each response, with `triton_final_response` among its parameters, as Triton sent it.

        Raises:
            ServeAppError: As for `infer`, at any time.
        """
        if self._is_closed:
            raise PoolClosed(repr(self))
        call = inference("ModelStreamInfer", request)
        regions = output_regions(request) if request.regions else None
        async with contextlib.aclosing(
            self._delivery.stream(call, response_timeout_s=response_timeout_s, timeout_s=timeout_s)
        ) as answers:
            async for answer in answers:
                yield decode_infer_response(answer, regions)

    async def call(self, rpc_name: str, message: Any, *, timeout_s: float, model_name: str = "") -> Any:
        """Carry one unary control call of `GRPCInferenceService` to any server that may be asked.

        Args:
            rpc_name: For example `ModelMetadata`; not `ModelInfer`.
            message: The request message.
            timeout_s: Whole budget in seconds.
            model_name: The model it is about, for error texts.

        Raises:
            ServeAppError: As for `infer`.
        """
        return await self._run(Call(rpc_name, lambda left_s: message, model_name), timeout_s)

    async def call_each(
        self, rpc_name: str, message: Any, *, timeout_s: float, model_name: str = "", without: Collection[str] = ()
    ) -> list[ServerAnswer]:
        """Carry one unary control call to every server, ejected ones included; never raises for one of them.

        A model that was loaded is asked for everywhere at once, wherever it was missing before.

        Args:
            rpc_name: For example `RepositoryModelLoad`.
            message: The request message.
            timeout_s: Budget of each call in seconds.
            model_name: The model it is about, for error texts.
            without: Ids of servers that are left out.

        Raises:
            PoolClosed: The router is closed.
        """
        if self._is_closed:
            raise PoolClosed(repr(self))
        members = [m for m in self._membership.current if m.endpoint.server_id not in without]
        call = Call(rpc_name, lambda left_s: message, model_name)
        answers = await ask_each(self._delivery, members, call, clock=self._clock, timeout_s=timeout_s)
        if rpc_name == "RepositoryModelLoad":
            self.unblock(model_name)
        return answers

    def unblock(self, model_name: str) -> None:
        """Ask every server for a model again, those too that could not serve it when last asked."""
        for member in self._membership.current:
            member.unblock(model_name)

    async def _run(self, call: Call, timeout_s: float) -> Any:
        if self._is_closed:
            raise PoolClosed(repr(self))
        return await self._delivery.run(call, timeout_s=timeout_s)

    # --- control calls ------------------------------------------------------------------------------------

    async def model_metadata(self, name: str, version: str = "", *, timeout_s: float) -> Any:
        """`ModelMetadataResponse` from any server that has the model.

        Raises:
            ServeAppError: As for `infer`.
        """
        message = service_pb2.ModelMetadataRequest(name=name, version=version)
        return await self._run(Call("ModelMetadata", lambda left_s: message, name, version), timeout_s)

    async def model_config(self, name: str, version: str = "", *, timeout_s: float) -> Any:
        """`ModelConfigResponse` from any server that has the model.

        Raises:
            ServeAppError: As for `infer`.
        """
        message = service_pb2.ModelConfigRequest(name=name, version=version)
        return await self._run(Call("ModelConfig", lambda left_s: message, name, version), timeout_s)

    async def repository_index(self, *, is_ready: bool = False, timeout_s: float) -> list[Any]:
        """The `ModelIndex` entries of any one server.

        Args:
            is_ready: Whether only models that are ready are wanted.
            timeout_s: Whole budget in seconds.

        Raises:
            ServeAppError: As for `infer`.
        """
        message = service_pb2.RepositoryIndexRequest(ready=is_ready)
        return list((await self.call("RepositoryIndex", message, timeout_s=timeout_s)).models)

    async def is_model_ready(self, name: str, version: str = "", *, timeout_s: float) -> bool:
        """Whether any server says that the model is ready; false when none can be asked."""
        message = service_pb2.ModelReadyRequest(name=name, version=version)
        return await self._has_ready("ModelReady", message, timeout_s)

    async def is_ready(self, *, timeout_s: float) -> bool:
        """Whether any server says that it is ready; false when none can be asked."""
        return await self._has_ready("ServerReady", service_pb2.ServerReadyRequest(), timeout_s)

    async def _has_ready(self, rpc_name: str, message: Any, timeout_s: float) -> bool:
        async def ask(member: Member) -> bool:
            with contextlib.suppress(ServeAppError):
                call = Call(rpc_name, lambda left_s: message, getattr(message, "name", ""))
                answer = await self._delivery.attempt(member, call, now=self._clock.now(), timeout_s=timeout_s)
                return bool(answer.ready)
            return False

        asking = [asyncio.ensure_future(ask(member)) for member in self._membership.candidates]
        try:
            for answer in asyncio.as_completed(asking):
                if await answer:
                    return True
            return False
        finally:
            for task in asking:
                task.cancel()

    # --- looking at it ------------------------------------------------------------------------------------

    @property
    def num_endpoints(self) -> int:
        """Servers that may be asked, those that still connect included and ejected ones not."""
        return self._membership.num_available

    def statistics(self) -> RouterStatistics:
        """Counts of now and since the router was made."""
        endpoints = tuple(member.statistics() for member in self._membership.members)
        return RouterStatistics(
            endpoints=endpoints,
            num_available=self.num_endpoints,
            num_active=sum(endpoint.num_active for endpoint in endpoints),
            num_waiting=sum(endpoint.num_waiting for endpoint in endpoints),
            num_done=self._delivery.num_done,
            num_failed=self._delivery.num_failed,
            num_retries=self._delivery.num_retries,
            num_ejections=self._membership.num_ejections,
            num_hedges=self._hedging.num_hedges,
            num_hopeless=self._delivery.num_hopeless,
            num_sequences=len(self._delivery.selection.sequences),
            retry_tokens=self._delivery.budget.tokens,
        )

    def __repr__(self) -> str:
        members, delivery = self._membership.members, self._delivery
        state = "closed" if self._is_closed else f"{self.num_endpoints} of {len(members)} available"
        return (
            f"<Router [{state}] {'; '.join(map(repr, members)) or 'no servers'} | "
            f"Requests: {delivery.num_done} done, {delivery.num_failed} failed, {delivery.num_retries} retries>"
        )
