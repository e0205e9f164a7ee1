"""The permit-first dispatcher of one model: a batch is closed only when there is a permit to send it.

While all permits are taken, requests pile up and the next batch gets larger by itself; so batches are as small as the
load allows and as large as it demands, without a window.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType

from serve_app.batching.admission import NOTHING, Load, check_request_size, priority_of
from serve_app.batching.deadlines import DeadlineHeap, ExpiryTimer
from serve_app.batching.gate import Gate
from serve_app.batching.isolation import error_for_caller
from serve_app.batching.item import Batch, Item
from serve_app.batching.merge import join_responses
from serve_app.batching.plan import Slice, batch_limits_of, permits_of, plan_batch
from serve_app.batching.sender import BatchSender, Send
from serve_app.batching.signature import signature_of
from serve_app.batching.statistics import DispatcherCounters, DispatcherStatistics
from serve_app.batching.waiting import WaitingItems
from serve_app.clock import Clock, Deadline
from serve_app.errors import (
    DeadlineExceeded,
    EndpointUnavailable,
    PoolClosed,
    RequestTooLarge,
    ServeAppError,
    Unavailable,
)
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec
from serve_app.settings import ModelSettings

logger = logging.getLogger(__name__)

DRAIN_S = 30.0
"""How long `aclose` waits for what was accepted; Ray Serve gives a replica 35 s to leave."""

CANCEL_S = 5.0
"""How long `aclose` waits for calls that it has cancelled."""


class DispatcherState(enum.Enum):
    """Life of a dispatcher."""

    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


class Dispatcher:
    """Queue, batches and permits of one model version.

    Requests of one signature share a ModelInfer, first come first served; among signatures the one whose oldest
    request has waited longest goes first. Higher priorities go before lower ones, and when the queue is full they take
    the place of the newest of the lowest. A batch that fails as a whole is sent again in parts, under the same permit
    and one part after another, until the guilty request stands alone (at most `isolation.max_extra_calls` calls
    more). One task for each batch and one future for each request; no task for each request.

    Made without a running loop; everything else is called on one loop.

    Args:
        spec: The model.
        settings: Its settings; see `reconfigure`.
        send: Runs one ModelInfer.
        num_endpoints: How many endpoints can take the model now. With none, requests still go to `send`, whose typed
            error they get at once instead of a wait.
        clock: Time of the deadlines.
    """

    def __init__(
        self,
        spec: ModelSpec,
        settings: ModelSettings,
        *,
        send: Send,
        num_endpoints: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._sender = BatchSender(send, self, clock=clock)
        self._num_endpoints = num_endpoints
        self._clock = clock
        self._what = f"model {spec.name!r}"

        # All mutable state. An item is in `_items` until its future is done; in `_waiting` as long as rows of it are
        # in no batch; and in `item.batches` of those that carry the rest. Each batch in `_batches` holds one permit.
        self._items = DeadlineHeap()
        self._waiting = WaitingItems()
        self._batches: set[Batch] = set()
        self._state = DispatcherState.OPEN
        self._num_items_ever = 0
        self._is_pump_scheduled = False
        self._timer = ExpiryTimer(self._items, clock=clock, on_due=self._expire)
        self._stalled_since = 0.0
        self._drained: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._counters = DispatcherCounters()
        self._gate = Gate(self._waiting, self._counters, what=self._what, clock=clock)
        self.reconfigure(settings)

    def reconfigure(self, settings: ModelSettings) -> None:
        """Put other settings in force for the next request and the next batch; what is under way is untouched."""
        self._queue = settings.queue
        self._limits = batch_limits_of(self._spec, settings.batching)
        self._gate.reconfigure(settings.queue, max_batch_rows=self._limits.max_rows)
        self._permits_per_endpoint = permits_of(self._spec, settings.batching)
        if self._waiting:
            self._schedule_pump()

    @property
    def num_permits(self) -> int:
        """Batches that may be under way at once, over all endpoints."""
        return self._permits_per_endpoint * max(1, self._num_endpoints())

    @property
    def max_batch_rows(self) -> int:
        """Most rows in one ModelInfer."""
        return self._limits.max_rows

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._waiting and not self._batches

    @property
    def has_waiting(self) -> bool:
        """Whether anything waits for a permit."""
        return len(self._waiting) > 0

    # --- requests come and go ---------------------------------------------------------------------------------

    def enqueue(self, request: InferRequest, rows: int, deadline: Deadline) -> asyncio.Future[InferResponse]:
        """Queue a request; it goes out at the end of this turn of the loop if there is a permit.

        Args:
            request: Checked against the model. Borrowed, and its buffers unchanged, until the future is done.
            rows: Rows in it; 1 for a model that does not batch.
            deadline: When it is no longer wanted.

        Returns:
            The answer, whose tensors may be views of a whole batch's buffers, or a typed error. Cancelling the future
            withdraws the request at once.

        Raises:
            Overloaded: The queue is full, or what is before it would take longer than may be waited.
            RequestTooLarge: It could never fit the queue, or has more rows than the model takes and cannot be cut.
            DeadlineExceeded: The deadline has passed already.
            PoolClosed: The dispatcher is closed or about to be.
        """
        if self._state is not DispatcherState.OPEN:
            raise PoolClosed(f"dispatcher of {self._what}")
        now = self._clock.now()
        if deadline.expires_at <= now:
            raise DeadlineExceeded("waiting for a batch", deadline.timeout_s)
        size_bytes = request.size_bytes
        load = Load(1, rows, size_bytes)
        check_request_size(load, self._queue, what=self._what)
        priority = priority_of(request, self._queue)
        self.check_room(load, deadline, priority=priority)
        if rows > self._limits.max_rows and not self._limits.can_cut and self._spec.max_batch_size > 0:
            raise RequestTooLarge(f"request for {self._what}", rows, self._limits.max_rows, "rows")
        self._num_items_ever += 1
        loop = asyncio.get_running_loop()
        item = Item(
            request,
            num_rows=rows,
            size_bytes=size_bytes,
            deadline=deadline,
            signature=signature_of(request) if self._spec.can_merge else None,
            number=self._num_items_ever,
            priority=priority,
            withdraw=self._on_cancelled,
            loop=loop,
        )
        if not self._waiting:
            self._stalled_since = now
        self._waiting.add(item)
        self._items.add(item)
        self._timer.watch(deadline.expires_at, now=now)
        if not self._is_pump_scheduled:
            self._schedule_pump()
        return item

    def check_room(self, more: Load, deadline: Deadline, *, priority: int, gathering: Load = NOTHING) -> None:
        """Check that so much more may wait.

        Args:
            more: What asks to.
            deadline: When it is no longer wanted.
            priority: How urgent it is; lower is more.
            gathering: What is on its way here, in a collector's window, and counts as waiting.

        Raises:
            Overloaded: Not now; with the time after which what waits now will have been answered.
        """
        if not self._gate.has_room(more, gathering):
            self._pump()  # what came in this very turn does not wait if there are permits for it
        for item, error in self._gate.admit(
            more, deadline, priority=priority, gathering=gathering, num_permits=self.num_permits
        ):
            self.fail(item, error)

    def check_more(self, more: Load, deadline: Deadline, *, priority: int, gathering: Load = NOTHING) -> None:
        """Check the same before there is a request, of which `more` is the least that it can be; nobody has to leave.

        Raises:
            Overloaded: As `check_room`.
        """
        if not self._gate.has_room(more, gathering):
            self._pump()
        self._gate.check(more, deadline, priority=priority, gathering=gathering, num_permits=self.num_permits)

    def _on_cancelled(self, item: Item) -> None:
        self._counters.num_cancelled += 1
        self._detach(item)

    def _detach(self, item: Item, *, by: Batch | None = None) -> None:
        """Take a request that is over out of everything; batches that nobody else waits for are cancelled."""
        self._items.discard(item)
        self._waiting.remove(item)
        for batch in tuple(item.batches):
            batch.release(item, may_cancel=batch is not by)
        if self._drained is not None:
            self._notice_drained()

    def _expire(self) -> None:
        for item in self._items.pop_expired(self._clock.now()):
            is_waiting = item in self._waiting
            self._counters.num_expired += 1
            self._detach(item)
            where = "waiting for a batch" if is_waiting else "waiting for the model's answer"
            item.set_exception(DeadlineExceeded(where, item.deadline.timeout_s))

    # --- batches are closed -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look again at deadlines and permits; call it on the loop when endpoints have come or gone."""
        self._expire()
        self._pump()

    def _schedule_pump(self) -> None:
        # At the end of the turn, so that all requests that arrive in one turn of the loop can share a batch.
        self._is_pump_scheduled = True
        asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Close and send batches as long as there are requests and permits."""
        self._is_pump_scheduled = False
        now = self._clock.now()
        self._expire()
        while self._waiting and len(self._batches) < self.num_permits:
            hopeless = self._gate.hopeless(self._waiting.next_queue())
            if hopeless:
                for item, error in hopeless:
                    self.fail(item, error)
                continue
            slices = self._next_slices()
            if slices:
                self._start(slices, now)
        if self._drained is not None:
            self._notice_drained()

    def _next_slices(self) -> list[Slice[Item]]:
        """Plan a batch. A request that the planner cannot handle is failed alone, and the others go on."""
        queue = self._waiting.next_queue()
        try:
            return plan_batch(queue, self._limits)
        except Exception:  # noqa: BLE001  # whatever one request does to the planner, the others are to be served
            head = next(iter(queue))
        try:
            return plan_batch([head], self._limits)
        except Exception as error:  # noqa: BLE001  # as above; now it is known whose it is
            self.fail(head, error)
            return []

    def _start(self, slices: Sequence[Slice[Item]], now: float) -> None:
        for part in slices:
            self._waiting.take(part)
        batch = Batch(slices, started_at=now, was_pressed=bool(self._waiting))
        self._counters.num_batches_sent += 1
        self._counters.num_rows_sent += batch.num_rows
        self._stalled_since = now
        self._batches.add(batch)
        batch.task = asyncio.get_running_loop().create_task(self._carry(batch))
        # A task that is cancelled before its first step runs no `finally`; its callback runs all the same.
        batch.task.add_done_callback(partial(self._on_batch_done, batch))

    async def _carry(self, batch: Batch) -> None:
        try:
            num_calls = await self._sender.run(batch)
        except asyncio.CancelledError:
            self._gate.note_given_up(batch)
            raise
        finally:
            # Before its callers wake up, so that one who comes back at once finds the dispatcher idle.
            self._batches.discard(batch)
        if num_calls == 1 and not batch.has_failed:
            self._gate.note_answered(batch)
        if num_calls > 1:
            self._counters.num_isolations += 1
            self._counters.num_isolation_calls += num_calls - 1

    def _on_batch_done(self, batch: Batch, task: asyncio.Task[None]) -> None:
        self._batches.discard(batch)
        if task.cancelled():
            error: Exception = EndpointUnavailable(self._what, "the call was cancelled below the dispatcher")
        else:
            error = RuntimeError("batch ended without an answer for each of its requests")
            error.__cause__ = task.exception()
        for part in batch.slices if batch.num_wanted else ():  # a fault of ours, or `send` was cancelled by others
            if batch in part.item.batches:
                self.fail(part.item, error, by=batch)
        # After its callers woke up, so that those who come back at once are in the next batch.
        self._pump()

    def answer(self, part: Slice[Item], response: InferResponse, *, by: Batch) -> None:
        """Give a caller its rows, once all of them are there; called by the batch that carried them."""
        item = part.item
        if part.stop - part.start < item.num_rows:
            if item.parts is None:
                item.parts = {}
            item.parts[part.start] = response
            by.release(item, may_cancel=False)
            if item.batches or item in self._waiting:
                return
            try:
                response = join_responses([item.parts[start] for start in sorted(item.parts)])
            except Exception as error:  # noqa: BLE001  # this caller's answer only
                self.fail(item, error, by=by)
                return
        self._counters.num_answered += 1
        self._detach(item, by=by)
        item.set_result(response)

    def fail(self, item: Item, error: Exception, *, by: Batch | None = None) -> None:
        """Give a caller its own copy of an error, and withdraw what is left of its request."""
        if not isinstance(error, ServeAppError):
            logger.error("request for %s failed in an unexpected way", self._what, exc_info=error)
        self._counters.num_failed += 1
        if by is not None:
            by.has_failed = True
        self._detach(item, by=by)
        item.set_exception(error_for_caller(error, item.deadline, model_name=self._spec.name))

    # --- the end ----------------------------------------------------------------------------------------------

    async def aclose(self, *, drain_s: float = DRAIN_S) -> None:
        """Take no more requests, wait for those accepted, then give up what is left; safe to call again.

        Goes on to its end even if the caller is cancelled.

        Args:
            drain_s: How long to wait in seconds; callers left after that get `Unavailable`.
        """
        if self._closing is None:
            self._state = DispatcherState.DRAINING
            self._closing = asyncio.get_running_loop().create_task(self._close(drain_s))
        await asyncio.shield(self._closing)

    async def _close(self, drain_s: float) -> None:
        self._drained = asyncio.get_running_loop().create_future()
        self._notice_drained()
        await asyncio.wait([self._drained], timeout=drain_s)
        for item in tuple(self._items):
            self.fail(item, Unavailable(self._what, "this server is shutting down"))
        if self._batches:  # their tasks were cancelled when their last item failed
            tasks = [batch.task for batch in self._batches if batch.task is not None]
            _, pending = await asyncio.wait(tasks, timeout=CANCEL_S)
            if pending:
                logger.error("%d calls of %s did not end when cancelled", len(pending), self._what)
        self._timer.close()
        self._state = DispatcherState.CLOSED

    def _notice_drained(self) -> None:
        if self._drained is not None and not self._drained.done() and self.is_idle:
            self._drained.set_result(None)

    async def __aenter__(self) -> Dispatcher:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- what it tells of itself ------------------------------------------------------------------------------

    def statistics(self) -> DispatcherStatistics:
        """The dispatcher at this moment."""
        now = self._clock.now()
        return DispatcherStatistics(
            num_waiting_requests=len(self._waiting),
            num_waiting_rows=self._waiting.num_rows,
            num_waiting_bytes=self._waiting.num_bytes,
            num_waiting_signatures=self._waiting.num_signatures,
            num_requests_in_flight=len(self._items) - len(self._waiting),
            num_batches_in_flight=len(self._batches),
            num_permits=self.num_permits,
            rows_per_s=self._gate.rows_per_s(),
            stalled_s=max(now - self._stalled_since, 0.0) if self._waiting else 0.0,
            counters=replace(self._counters),
        )

    def __repr__(self) -> str:
        return (
            f"<Dispatcher {self._spec.name} Requests: {len(self._waiting)} queued, "
            f"{len(self._items) - len(self._waiting)} in flight | "
            f"Batches: {len(self._batches)} of {self.num_permits} permits>"
        )
