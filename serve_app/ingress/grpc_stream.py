"""One `ModelStreamInfer` of a client: many requests in, each with its own responses or error out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Any

from tritonclient.grpc import service_pb2

from serve_app.auth.principal import CALLER, Principal
from serve_app.batching.lanes import MOST_URGENT
from serve_app.batching.replica_load import Share
from serve_app.dataplane import DataPlane
from serve_app.errors import ServeAppError
from serve_app.ingress.http_errors import error_text
from serve_app.protocol.grpc_codec import decode_infer_request, encode_infer_response, heading_of
from serve_app.protocol.messages import InferRequest

logger = logging.getLogger(__name__)

MAX_OUTSTANDING = 32
"""Requests of one stream under way at once; the next one is read when one of them is answered in full."""

MAX_BUFFERED = 2
"""Responses that wait here for the client to take them; the others wait in Triton."""

Message = Any
_Answer = Message | Exception | None


def admitted(plane: DataPlane, message: Message) -> Share:
    """A request's share of what the replica may take on; before its tensors are looked at.

    Raises:
        Overloaded: It has to be refused.
        InvalidRequest: It is no `ModelInferRequest`.
    """
    heading = heading_of(message)
    return plane.admission.admit(
        heading.model_name,
        heading.model_version,
        size_bytes=heading.size_bytes,
        asked_priority=MOST_URGENT if heading.asks_priority else 0,
    )


class InferStream:
    """One stream; use it once.

    Requests are worked on together. The responses to one request come in the order in which the model gave them. Those
    of models that are not decoupled come in the order of the requests, as Triton's do; requests of one sequence are
    sent one after the other, so that their order is kept on the way to the model. A request that fails is answered
    with an `error_message`, and the stream goes on.

    Args:
        plane: Borrowed.
        ends_with_error: Whether the first error ends the stream instead, as the metadata `triton_grpc_error: true`
            asks.
        admit: Raises for a request that the client may not make, and says whose the others are; `None`: all are let in.
    """

    def __init__(
        self,
        plane: DataPlane,
        *,
        ends_with_error: bool = False,
        admit: Callable[[Message], Principal | None] | None = None,
    ) -> None:
        self._plane = plane
        self._admit = admit
        self._ends_with_error = ends_with_error
        self._room = asyncio.Semaphore(MAX_OUTSTANDING)
        self._answers: asyncio.Queue[_Answer] = asyncio.Queue(MAX_BUFFERED)
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_turn: asyncio.Event | None = None
        self._sequences: dict[tuple[str, str], asyncio.Event] = {}

    async def answer(self, requests: AsyncIterable[Message]) -> AsyncGenerator[Message, None]:
        """Answer `ModelInferRequest`s with `ModelStreamInferResponse`s; closing the generator cancels what is left.

        Raises:
            ServeAppError: How a request failed, when the first error ends the stream.
        """
        reading = asyncio.ensure_future(self._read(requests))
        try:
            while (answer := await self._answers.get()) is not None:
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            left = [reading, *self._tasks]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _read(self, requests: AsyncIterable[Message]) -> None:
        try:
            async for message in requests:
                await self._begin(message)
                async with self._room:
                    pass  # only to wait for room before the next message is read
        except Exception:  # whatever the server's iterator raises, what was read before is answered
            logger.exception("the requests of a stream could not be read to their end")
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._answers.put(None)

    async def _begin(self, message: Message) -> None:
        await self._room.acquire()
        share: Share | None = None
        try:
            if self._admit is not None:
                CALLER.set(self._admit(message))  # of this reading task, and of those that it starts
            share = admitted(self._plane, message)
            request = decode_infer_request(message)
            spec = await self._plane.model_spec(request.model_name, request.model_version)
        except Exception as error:  # noqa: BLE001  # every error is its request's answer
            self._room.release()
            if share is not None:
                share.release()
            await self._fail(message.id, error)
            return
        except BaseException:
            if share is not None:
                share.release()
            raise
        done = asyncio.Event()
        turn = None
        if not spec.is_decoupled:
            turn, self._last_turn = self._last_turn, done
        sequence_id = request.parameters.get("sequence_id") or None
        key = (request.model_name, f"{sequence_id}")
        before = self._sequences.get(key) if sequence_id is not None else None
        if sequence_id is not None:
            self._sequences[key] = done
        task = asyncio.ensure_future(self._run(request, turn=turn, before=before))
        self._tasks.add(task)

        def finish(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            share.release()
            self._room.release()
            done.set()
            if self._sequences.get(key) is done:
                del self._sequences[key]

        task.add_done_callback(finish)

    async def _run(self, request: InferRequest, *, turn: asyncio.Event | None, before: asyncio.Event | None) -> None:
        """Answer one request, after `before` has ended, and give its answers out after `turn` has."""
        if before is not None:
            await before.wait()
        try:
            async with contextlib.aclosing(self._plane.stream(request)) as responses:
                async for response in responses:
                    answer = service_pb2.ModelStreamInferResponse(infer_response=encode_infer_response(response))
                    if turn is not None:
                        await turn.wait()
                    await self._answers.put(answer)
        except Exception as error:  # noqa: BLE001  # every error is its request's answer
            if turn is not None:
                await turn.wait()
            await self._fail(request.id, error)

    async def _fail(self, request_id: str, error: Exception) -> None:
        if not isinstance(error, ServeAppError):
            logger.error("a request of a stream failed in a way that has no error class", exc_info=error)
        if self._ends_with_error:
            await self._answers.put(error)
            return
        response = service_pb2.ModelInferResponse(id=request_id)
        await self._answers.put(
            service_pb2.ModelStreamInferResponse(error_message=error_text(error), infer_response=response)
        )

    def __repr__(self) -> str:
        return f"<InferStream Requests: {len(self._tasks)} under way | Responses: {self._answers.qsize()} waiting>"
