"""One closed batch on its way to Triton: merged, sent, taken apart, and sent in parts when it fails as a whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from serve_app.batching.isolation import Isolation, is_one_requests_fault
from serve_app.batching.item import Batch, Item
from serve_app.batching.merge import merge
from serve_app.batching.plan import Slice
from serve_app.batching.split import check_rows, split_response
from serve_app.clock import Clock
from serve_app.errors import is_loss
from serve_app.protocol.messages import InferRequest, InferResponse

Send = Callable[[InferRequest, float], Awaitable[InferResponse]]
"""Runs one ModelInfer within a budget in seconds. The request is borrowed until it returns; the response belongs to
the caller, who may change it. Retries on other endpoints are its own matter."""


class Outcomes(Protocol):
    """Who is told how a batch went."""

    def answer(self, part: Slice[Item], response: InferResponse, *, by: Batch) -> None:
        """A part's rows have come back; `response` holds these rows and no others."""
        ...

    def fail(self, item: Item, error: Exception, *, by: Batch) -> None:
        """A request has failed for good."""
        ...


class BatchSender:
    """Sends batches and hands out what came back.

    Args:
        send: Runs one ModelInfer.
        outcomes: Told of each part's answer, or of its request's error.
        clock: Time of the deadlines.
    """

    def __init__(self, send: Send, outcomes: Outcomes, *, clock: Clock) -> None:
        self._send = send
        self._outcomes = outcomes
        self._clock = clock

    async def run(self, batch: Batch) -> int:
        """Send a batch until each of its parts has an answer or an error.

        When it fails as a whole and that may be one request's fault, it is sent again in parts, one after another,
        until the guilty stands alone. When it was lost with its server or the model's process, one of its requests may
        be what killed it: each is sent once more, by itself, and then no more. Parts whose callers have left are not
        sent.

        Returns:
            How many calls it took; above 1 only if the first failed.
        """
        isolation = Isolation(batch.slices)
        num_calls = 0
        lost: set[Slice[Item]] = set()
        while (members := isolation.next_part()) is not None:
            wanted = [part for part in members if not part.item.done()]
            if not wanted:
                continue
            num_calls += 1
            try:
                answers = await self._infer(wanted, is_repeat=wanted[0] in lost)
            except Exception as error:  # noqa: BLE001  # any error of one batch is for its own callers
                if len(wanted) > 1 and is_loss(error):
                    lost.update(wanted)
                    isolation.send_alone(wanted)
                    continue
                if len(wanted) > 1 and is_one_requests_fault(error):
                    isolation.narrow(wanted)
                    continue
                for part in wanted:
                    if not part.item.done():
                        self._outcomes.fail(part.item, error, by=batch)
            else:
                for part, answer in zip(wanted, answers, strict=True):
                    if not part.item.done():
                        self._outcomes.answer(part, answer, by=batch)
        return num_calls

    async def _infer(self, parts: Sequence[Slice[Item]], *, is_repeat: bool) -> list[InferResponse]:
        request = merge([part.item.request_between(part.start, part.stop) for part in parts])
        if is_repeat:
            request = replace(request, num_losses=1)
        # The longest of all budgets: a member with a shorter one is expired by the timer, alone.
        expires_at = max([part.item.deadline.expires_at for part in parts])
        response = await self._send(request, max(expires_at - self._clock.now(), 0.0))
        rows = [part.stop - part.start for part in parts]
        if len(parts) > 1:
            return split_response(response, rows)
        if rows[0] != parts[0].item.num_rows:
            check_rows(response, rows[0])
        return [response]
