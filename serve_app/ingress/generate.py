"""Triton's generate extension: flat JSON in, flat JSON out, whole (`generate`) or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from enum import Enum
from functools import partial

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.dataplane import DataPlane
from serve_app.errors import InvalidRequest, ServeAppError
from serve_app.ingress.body import check_plain, read_body, timeout_of
from serve_app.ingress.control_routes import model_of
from serve_app.ingress.http_errors import error_response, error_text
from serve_app.ingress.large_json import LargeJsonDecoder
from serve_app.protocol.flat_json import decode_generate_request, encode_generate_response
from serve_app.protocol.large_json import is_large
from serve_app.protocol.messages import InferRequest
from serve_app.settings import LimitSettings

logger = logging.getLogger(__name__)

_EVENTS_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class GenerateForm(Enum):
    """How responses are written."""

    WHOLE = "generate"
    EVENTS = "generate_stream"


class GenerateEndpoint:
    """`POST M/generate` or `M/generate_stream`, as a plain ASGI application.

    A client that goes away cancels the model's work. Each event is handed to the server before the next response is
    read, so what a slow client has not taken waits in Triton.

    Args:
        plane: Borrowed.
        limits: Sizes beyond which a request is refused.
        form: Which of the two.
        decoder: Borrowed; for JSON that takes long.
    """

    def __init__(self, plane: DataPlane, limits: LimitSettings, form: GenerateForm, decoder: LargeJsonDecoder) -> None:
        self._plane = plane
        self._limits = limits
        self._form = form
        self._decoder = decoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every error becomes an answer, or an event once events have begun."""
        with contextlib.ExitStack() as stack:
            try:
                headers = Headers(scope=scope)
                name, version = model_of(scope["path_params"])
                timeout_s = timeout_of(headers)
                share = stack.enter_context(self._plane.admission.admit(name, version, timeout_s=timeout_s))
                body = await read_body(headers, receive, max_bytes=self._limits.max_json_bytes, share=share)
                check_plain(self._plane.admission, name, version, body, timeout_s=timeout_s)
                request = await self._decode(body, name, version)
            except Exception as error:  # noqa: BLE001  # becomes an answer
                await _refuse(error)(scope, receive, send)
                return
            await self._run(request, timeout_s, scope, receive, send)

    async def _run(
        self, request: InferRequest, timeout_s: float | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        answering = asyncio.ensure_future(self._answer(request, timeout_s, scope, receive, send))
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                if not task.done():
                    task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _decode(self, body: bytes, name: str, version: str) -> InferRequest:
        spec = await self._plane.model_spec(name, version)
        decode = partial(decode_generate_request, body, spec, model_version=version)
        return await self._decoder.run(decode) if is_large(len(body)) else decode()

    async def _answer(
        self, request: InferRequest, timeout_s: float | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        async with contextlib.aclosing(self._texts(request, timeout_s)) as texts:
            if self._form is GenerateForm.WHOLE:
                response = await _whole(texts)
            else:
                try:
                    first = await anext(texts, None)
                except Exception as error:  # noqa: BLE001  # becomes an answer
                    response = _refuse(error)
                else:
                    await _send_events(first, texts, send)
                    return
        await response(scope, receive, send)

    async def _texts(self, request: InferRequest, timeout_s: float | None) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._plane.stream(request, timeout_s=timeout_s)) as responses:
            async for response in responses:
                if response.outputs:
                    yield encode_generate_response(response)


async def _whole(texts: AsyncGenerator[bytes, None]) -> Response:
    try:
        first, num_more = await anext(texts, None), 0
        async for _ in texts:  # to the end: tritonserver 2.51 may itself end where quick responses are cancelled
            num_more += 1
        if first is None or num_more:
            got = "none" if first is None else "several"
            raise InvalidRequest("responses of the model", got, "exactly one; use generate_stream for any number")
    except Exception as error:  # noqa: BLE001  # becomes an answer
        return _refuse(error)
    return Response(first, media_type="application/json")


async def _send_events(first: bytes | None, texts: AsyncGenerator[bytes, None], send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS_HEADERS})
    text = first
    try:
        while text is not None:
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % text, "more_body": True})
            text = await anext(texts, None)
    except Exception as error:
        if not isinstance(error, ServeAppError):
            logger.exception("generate_stream failed in a way that has no error class")
        text = orjson.dumps({"error": error_text(error)})
        await send({"type": "http.response.body", "body": b"data: %b\n\n" % text, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _refuse(error: Exception) -> Response:
    if not isinstance(error, ServeAppError):
        logger.error("generate failed in a way that has no error class", exc_info=error)
    return error_response(error)


async def _disconnect(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
