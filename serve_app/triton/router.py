"""Calls to a changing set of Triton servers: each goes to the one that is best placed, and if need be to another."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tritonclient.grpc import service_pb2

from serve_app.clock import Clock, MonotonicClock
from serve_app.endpoint import Endpoint
from serve_app.errors import PoolClosed, ServeAppError
from serve_app.protocol.grpc_codec import decode_infer_response, encode_infer_request
from serve_app.protocol.messages import InferRequest, InferResponse
from serve_app.protocol.server_answers import ServerAnswer
from serve_app.settings import ChannelSettings
from serve_app.triton.broadcast import ask_each
from serve_app.triton.choice import NEAR_CALLS
from serve_app.triton.closing import finish
from serve_app.triton.delivery import Call, Delivery
from serve_app.triton.member import EndpointStatistics, Member
from serve_app.triton.membership import Membership, Prepare
from serve_app.triton.pool import CLOSE_GRACE_S
from serve_app.triton.retry import RetryBudget


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    """Counts of one router.

    Attributes:
        endpoints: Each server, removed ones that still drain included.
        num_available: Servers that may be asked.
        num_active: Calls that hold a channel, over all servers.
        num_waiting: Callers that wait for a channel, over all servers.
        num_done: Requests and control calls that were answered.
        num_failed: Those that ended with an error.
        num_retries: Tries after the first.
        num_ejections: Ejections, those of servers since removed included.
        retry_tokens: Retries that the budget allows now.
    """

    endpoints: tuple[EndpointStatistics, ...]
    num_available: int
    num_active: int
    num_waiting: int
    num_done: int
    num_failed: int
    num_retries: int
    num_ejections: int
    retry_tokens: float


class Router:
    """Every Triton server that this process may ask, each with a pool of channels.

    A server that a call could not reach, or that went away during one, is ejected: it is not asked until a probe finds
    every channel connected and the server live. A model that one server cannot serve is asked for elsewhere for a
    while. What is safe to send again is sent to another server (see `retry`), at most once to each.

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
            self._closing = asyncio.ensure_future(self._membership.aclose(grace_s=grace_s))
        await finish(self._closing, self._membership.hasten)

    # --- calls --------------------------------------------------------------------------------------------

    async def infer(self, request: InferRequest, *, timeout_s: float) -> InferResponse:
        """Run one request on the best placed server, and on another where that is safe and the first one fails.

        What is left of the budget goes along as Triton's `timeout` parameter, unless the request has a shorter one.
        If the caller is cancelled, the call is cancelled on the server.

        Args:
            request: Tensors are borrowed, not copied; do not change them until this returns.
            timeout_s: Whole budget in seconds, retries and the wait for a channel included.

        Raises:
            NoEndpoint: No server may be asked now.
            EndpointUnavailable: The server went away, and so did any other that was tried.
            ModelNotFound: No server has the model.
            ModelNotReady: No server has it loaded.
            ServeAppError: See `status.translate`.
        """

        return decode_infer_response(await self._run(_inference("ModelInfer", request), timeout_s))

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
        call = _inference("ModelStreamInfer", request)
        async with contextlib.aclosing(
            self._delivery.stream(call, response_timeout_s=response_timeout_s, timeout_s=timeout_s)
        ) as answers:
            async for answer in answers:
                yield decode_infer_response(answer)

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
            retry_tokens=self._delivery.budget.tokens,
        )

    def __repr__(self) -> str:
        members, delivery = self._membership.members, self._delivery
        state = "closed" if self._is_closed else f"{self.num_endpoints} of {len(members)} available"
        return (
            f"<Router [{state}] {'; '.join(map(repr, members)) or 'no servers'} | "
            f"Requests: {delivery.num_done} done, {delivery.num_failed} failed, {delivery.num_retries} retries>"
        )


def _inference(rpc_name: str, request: InferRequest) -> Call:
    """The call that carries a request, to its sequence's server where it has one."""

    def build(left_s: float) -> Any:
        message = encode_infer_request(request)
        _set_timeout(message, left_s)
        return message

    sequence_id = request.parameters.get("sequence_id") if request.parameters else None
    return Call(
        rpc_name,
        build,
        request.model_name,
        request.model_version,
        "" if sequence_id in (None, 0, "") else str(sequence_id),
    )


def _set_timeout(message: Any, timeout_s: float) -> None:
    """Tell Triton the budget in microseconds, for models whose queue policy lets a request's timeout count."""
    parameter, timeout_us = message.parameters["timeout"], max(int(timeout_s * 1e6), 1)
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None or (kind == "int64_param" and not 0 < parameter.int64_param < timeout_us):
        parameter.int64_param = timeout_us
