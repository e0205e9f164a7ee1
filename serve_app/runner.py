"""One model served by one replica, without Ray: checks requests, chooses their path and completes their answers."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from serve_app.batching.admission import Load, check_request_size, priority_of
from serve_app.batching.dispatcher import DRAIN_S, Dispatcher
from serve_app.batching.sender import Send
from serve_app.batching.statistics import DispatcherStatistics
from serve_app.batching.window import Collector, Dispatch, Pending, PendingState
from serve_app.clock import Clock, Deadline
from serve_app.errors import BackendFailed, DeadlineExceeded, Overloaded, PoolClosed, Unsupported
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec
from serve_app.protocol.parameters import EMPTY_FINAL_RESPONSE, FINAL_RESPONSE
from serve_app.protocol.validation import check_request
from serve_app.settings import BatchingMode, LimitSettings, ModelSettings

OpenStream = Callable[[InferRequest, float, "float | None"], AsyncGenerator[InferResponse, None]]
"""Runs one request by `ModelStreamInfer`, given seconds for each response and for all of them (`None` for any)."""

_LEAST = Load(1, 1, 0)
"""The smallest of requests."""


@dataclass(frozen=True, slots=True)
class RunnerStatistics:
    """A runner at one moment.

    Attributes:
        num_collecting: Requests in the collector's window.
        num_collecting_rows: Rows of these.
        dispatcher: The rest.
        num_streams: Streams under way.
    """

    num_collecting: int
    num_collecting_rows: int
    dispatcher: DispatcherStatistics
    num_streams: int = 0


class RunnerState(enum.Enum):
    """Life of a runner."""

    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


class ModelRunner:
    """One model version on one replica.

    Requests are checked before they meet any other. Those of a model that batches go through the dispatcher, in mode
    `serve_batch` by way of the collector; but not while the dispatcher is idle, nor when they fill a batch alone or
    have a budget that the window would use up: these never wait for company. Other models' requests go through the
    same dispatcher one by one.

    Made without a running loop; everything else is called on one loop.

    Args:
        spec: The model.
        settings: Its settings; see `reconfigure`.
        send: Runs one ModelInfer; see `Send`.
        num_endpoints: How many endpoints can take the model now.
        limits: Sizes beyond which requests are refused.
        clock: Time of the deadlines; the one they were made with.
        collect: Makes the collector for mode `serve_batch`, given the runner's `dispatch`. Without it that mode is
            the same as `continuous`.
        open_stream: Runs one ModelStreamInfer; without it decoupled models answer `Unsupported`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        settings: ModelSettings,
        *,
        send: Send,
        num_endpoints: Callable[[], int],
        limits: LimitSettings,
        clock: Clock,
        collect: Callable[[Dispatch], Collector] | None = None,
        open_stream: OpenStream | None = None,
    ) -> None:
        self._spec = spec
        self._limits = limits
        self._clock = clock
        self._open_stream = open_stream
        self._dispatcher = Dispatcher(spec, settings, send=send, num_endpoints=num_endpoints, clock=clock)
        self._collector = collect(self.dispatch) if collect is not None and spec.can_merge else None

        # All mutable state: settings in force, what is in the collector's window, and whether requests are taken.
        self._state = RunnerState.OPEN
        self._collecting = Load(0, 0, 0)
        self._collected: asyncio.Event | None = None
        self._num_streams = 0
        self._streamed: asyncio.Event | None = None
        self._closing: asyncio.Task[None] | None = None
        self.reconfigure(settings)

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self._spec

    @property
    def settings(self) -> ModelSettings:
        """The settings in force."""
        return self._settings

    def reconfigure(self, settings: ModelSettings) -> None:
        """Put other settings in force, for the next request, window and batch; nothing under way is lost."""
        self._settings = settings
        self._dispatcher.reconfigure(settings)
        if self._collector is not None:
            self._collector.reconfigure(
                max_batch_rows=self._dispatcher.max_batch_rows, window_s=settings.batching.window_s
            )

    def wake(self) -> None:
        """Look again at permits and deadlines; call it on the loop when endpoints have come or gone."""
        self._dispatcher.wake()

    @property
    def is_pressed(self) -> bool:
        """Whether anything waits, or a stream is under way: without that `check_more` raises nothing."""
        return self._dispatcher.has_waiting or self._collecting.num_requests > 0 or self._num_streams > 0

    def check_more(self, deadline: Deadline | None = None, *, priority: int) -> None:
        """Check that one more request may come, before anything of it has been read.

        Args:
            deadline: When it is no longer wanted, as far as that is known.
            priority: The most urgent that it can be.

        Raises:
            Overloaded: The smallest of requests would be refused now.
        """
        if self._spec.is_decoupled:
            self._check_streams()
            return
        if deadline is None:
            deadline = Deadline.after(self._settings.timeout_s, now=self._clock.now())
        self._dispatcher.check_more(_LEAST, deadline, priority=priority, gathering=self._collecting)

    def _check_streams(self) -> None:
        if self._num_streams >= self._settings.max_streams:
            raise Overloaded(f"model {self._spec.name!r}", f"{self._num_streams} streams are under way")

    async def infer(self, request: InferRequest, deadline: Deadline | None = None) -> InferResponse:
        """Answer one request.

        Cancelling the caller withdraws the request; others in its batch are unharmed, and a batch that nobody waits
        for any more is cancelled.

        Args:
            request: Borrowed, and its buffers unchanged, until this returns.
            deadline: When it is no longer wanted; by default `settings.timeout_s` from now.

        Returns:
            The answer with the request's id, the model's version, and the outputs in the order asked for. Its tensors
            may be views of the buffers of a whole batch.

        Raises:
            InvalidRequest: The request does not fit the model, or the backend refused it.
            RequestTooLarge: It is above a limit.
            Unsupported: The model answers one request with any number of responses.
            Overloaded: Too much is waiting already.
            DeadlineExceeded: The budget ran out.
            Unavailable: No endpoint could take it now.
            BackendFailed: The backend failed on it, or answered with something that makes no sense.
            PoolClosed: The runner is closed or about to be.
        """
        if self._state is not RunnerState.OPEN:
            raise PoolClosed(f"runner of model {self._spec.name!r}")
        if self._spec.is_decoupled:
            raise Unsupported(
                f"infer on decoupled model {self._spec.name!r}",
                "it may answer one request many times; use generate, generate_stream or the gRPC stream",
            )
        num_rows = check_request(request, self._spec, self._limits)
        if request.regions:
            num_rows = 1  # goes alone and whole, whatever a batch may hold
        if deadline is None:
            deadline = Deadline.after(self._settings.timeout_s, now=self._clock.now())
        collector = self._collector
        if collector is not None and not request.regions and self._waits_for_window(num_rows, deadline):
            response = await self._collect(collector, Pending(request, num_rows, deadline))
        else:
            response = await self._dispatcher.enqueue(request, num_rows, deadline)
        return self._completed(request, response)

    async def stream(
        self, request: InferRequest, deadline: Deadline | None = None
    ) -> AsyncGenerator[InferResponse, None]:
        """Answer one request with every response that the model gives: one, or with a decoupled model any number.

        A decoupled model's requests go to Triton unbatched, each in a stream of its own, and responses are read as they
        are asked for. Closing the generator, or cancelling who waits in it, cancels the model's work; iterate it inside
        `contextlib.aclosing`.

        Args:
            request: Borrowed, and its buffers unchanged, until the first response.
            deadline: When no response is wanted any more. By default each response of a decoupled model has
                `settings.timeout_s`, and there may be any number; time in which nobody asks does not count.

        Yields:
            Each response, as `infer` returns it, with `triton_final_response` among its parameters. An empty last one
            is among them only if the request's `triton_enable_empty_final_response` asks for it.

        Raises:
            Overloaded: `settings.max_streams` streams are under way.
            ServeAppError: As for `infer`, at any time.
        """
        if not self._spec.is_decoupled:
            request.parameters.pop(EMPTY_FINAL_RESPONSE, None)  # of no use here, and it would keep it from batches
            response = await self.infer(request, deadline)
            response.parameters = {**response.parameters, FINAL_RESPONSE: True}
            yield response
            return
        if self._state is not RunnerState.OPEN:
            raise PoolClosed(f"runner of model {self._spec.name!r}")
        if self._open_stream is None:
            raise Unsupported(f"streams of model {self._spec.name!r}", "nothing here opens them")
        check_request(request, self._spec, self._limits)
        self._check_streams()
        left_s = None if deadline is None else deadline.remaining_s(now=self._clock.now())
        response_timeout_s = self._settings.timeout_s if left_s is None else left_s
        self._num_streams += 1
        try:
            async with contextlib.aclosing(self._open_stream(request, response_timeout_s, left_s)) as responses:
                async for response in responses:
                    yield self._completed(request, response) if response.outputs else response
        finally:
            self._num_streams -= 1
            if self._streamed is not None and not self._num_streams:
                self._streamed.set()

    def dispatch(self, items: Sequence[Pending]) -> list[asyncio.Future[InferResponse]]:
        """Queue a window's items: what a `Collector` calls; see `Dispatch`."""
        return [self._dispatch(item) for item in items]

    def _dispatch(self, item: Pending) -> asyncio.Future[InferResponse]:
        future: asyncio.Future[InferResponse]
        if item.state is PendingState.COLLECTING:
            try:
                future = self._dispatcher.enqueue(item.request, item.num_rows, item.deadline)
            except Exception as error:  # noqa: BLE001  # one item's error is not its window's
                future = asyncio.get_running_loop().create_future()
                future.set_exception(error)
                future.exception()  # seen: its caller may leave in this very turn, and nobody is to be warned of it
            item.dispatched(future)
        else:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
        return future

    def _waits_for_window(self, num_rows: int, deadline: Deadline) -> bool:
        batching = self._settings.batching
        return (
            batching.mode is BatchingMode.SERVE_BATCH
            and not self._dispatcher.is_idle
            and num_rows < self._dispatcher.max_batch_rows
            and deadline.remaining_s(now=self._clock.now()) > batching.window_s
        )

    async def _collect(self, collector: Collector, item: Pending) -> InferResponse:
        """The answer to an item by way of the collector, within its deadline even if the collector is stuck."""
        load = Load(1, item.num_rows, item.request.size_bytes)
        check_request_size(load, self._settings.queue, what=f"model {self._spec.name!r}")
        priority = priority_of(item.request, self._settings.queue)
        self._dispatcher.check_room(load, item.deadline, priority=priority, gathering=self._collecting)
        task = asyncio.current_task()
        remaining_s = item.deadline.remaining_s(now=self._clock.now())
        timer = asyncio.get_running_loop().call_later(remaining_s, self._expire, item, task)
        self._collecting = self._collecting.plus(load)
        try:
            future = await collector.collect(item)
        except BaseException as error:
            expired = item.state is PendingState.EXPIRED
            item.withdraw()
            if expired and isinstance(error, asyncio.CancelledError) and not _is_cancelled_by_others(task):
                raise DeadlineExceeded("waiting for a batch window", item.deadline.timeout_s) from None
            raise
        finally:
            timer.cancel()
            self._collecting = self._collecting.minus(load)
            if self._collected is not None and not self._collecting.num_requests:
                self._collected.set()
        return await future

    def _expire(self, item: Pending, task: asyncio.Task[object] | None) -> None:
        item.withdraw(PendingState.EXPIRED)
        if task is not None:
            task.cancel()

    def _completed(self, request: InferRequest, response: InferResponse) -> InferResponse:
        response.id = request.id
        if not response.model_version:
            response.model_version = request.model_version or self._spec.version
        if request.outputs:
            by_name = {tensor.name: tensor for tensor in response.outputs}
            try:
                response.outputs = [by_name[output.name] for output in request.outputs]
            except KeyError as error:
                raise BackendFailed(self._spec.name, f"its answer lacks the requested output {error}") from None
        return response

    async def aclose(self, *, drain_s: float = DRAIN_S) -> None:
        """Take no more requests, let those accepted finish, then give up what is left; safe to call again.

        Goes on to its end even if the caller is cancelled.

        Args:
            drain_s: How long to wait in seconds; callers left after that get `Unavailable`.
        """
        if self._closing is None:
            self._state = RunnerState.DRAINING
            self._closing = asyncio.get_running_loop().create_task(self._close(drain_s))
        await asyncio.shield(self._closing)

    async def _close(self, drain_s: float) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + drain_s
        if self._collecting.num_requests:
            self._collected = asyncio.Event()
            timer = loop.call_later(min(self._settings.batching.window_s + 1.0, drain_s), self._collected.set)
            await self._collected.wait()
            timer.cancel()
        if self._num_streams:
            self._streamed = asyncio.Event()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._streamed.wait(), max(ends_at - loop.time(), 0.0))
        await self._dispatcher.aclose(drain_s=max(ends_at - loop.time(), 0.0))
        self._state = RunnerState.CLOSED

    async def __aenter__(self) -> ModelRunner:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def statistics(self) -> RunnerStatistics:
        """The runner at this moment."""
        collecting = self._collecting
        return RunnerStatistics(
            collecting.num_requests, collecting.num_rows, self._dispatcher.statistics(), self._num_streams
        )

    def __repr__(self) -> str:
        version = f" version {self._spec.version}" if self._spec.version else ""
        return (
            f"<ModelRunner {self._spec.name}{version} {self._settings.batching.mode.value} {self._state.value} | "
            f"{self._collecting.num_requests} collecting | {self._num_streams} streams | {self._dispatcher!r}>"
        )


def _is_cancelled_by_others(task: asyncio.Task[object] | None) -> bool:
    """Take back the runner's own cancellation of `task`; whether there was another one as well.

    Python 3.10 cannot tell: there, a caller that leaves in the very turn of its deadline gets `DeadlineExceeded`.
    """
    uncancel = getattr(task, "uncancel", None)
    return uncancel is not None and uncancel() > 0
