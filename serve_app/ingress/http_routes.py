"""The V2 routes over HTTP: each decodes, asks the data plane, encodes."""

from __future__ import annotations

import logging
import time
from functools import partial

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.dataplane import DataPlane
from serve_app.errors import ServeAppError
from serve_app.ingress.body import (
    accepted_encoding,
    check_plain,
    pack_body,
    read_buffer,
    timeout_of,
)
from serve_app.ingress.control_routes import control_routes, model_of
from serve_app.ingress.generate import GenerateEndpoint, GenerateForm
from serve_app.ingress.http_errors import error_response
from serve_app.ingress.large_json import LargeJsonDecoder
from serve_app.ingress.memory import give_back
from serve_app.ingress.piecemeal import PIECE_BYTES, PiecemealResponse
from serve_app.protocol.binary import (
    HEADER_LENGTH,
    EncodedBody,
    decode_infer_request,
    encode_infer_response,
    parse_header_length,
)
from serve_app.protocol.large_json import is_large
from serve_app.settings import LimitSettings

logger = logging.getLogger(__name__)

# Answers smaller than this are sent as they are: packing would cost more than it saves.
_PACK_ABOVE_BYTES = 1024


class InferEndpoint:
    """`POST /v2/models/{name}[/versions/{version}]/infer`; plain ASGI, since every request passes here.

    Args:
        plane: Borrowed.
        limits: Sizes beyond which a request is refused.
        decoder: Borrowed; for JSON that takes long.
    """

    def __init__(self, plane: DataPlane, limits: LimitSettings, decoder: LargeJsonDecoder) -> None:
        self._plane = plane
        self._limits = limits
        self._decoder = decoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every error becomes an answer too."""
        started = time.perf_counter()
        try:
            response = await self._respond(scope, receive)
        except ServeAppError as error:
            response = error_response(error)
        except Exception as error:  # the last line: a stack trace goes to the log, not to the client
            logger.exception("infer failed in a way that has no error class")
            response = error_response(error)
        response.headers["server-timing"] = f"total;dur={(time.perf_counter() - started) * 1e3:.3f}"
        await response(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive) -> Response:
        headers = Headers(scope=scope)
        name, version = model_of(scope["path_params"])
        timeout_s = timeout_of(headers)
        header_length = parse_header_length(headers.get(HEADER_LENGTH))
        with self._plane.admission.admit(name, version, timeout_s=timeout_s) as share:
            body = await read_buffer(headers, receive, max_bytes=self._limits.max_request_bytes, share=share)
            check_plain(self._plane.admission, name, version, body, timeout_s=timeout_s)
            return await self._answer(headers, body, name, version, header_length, timeout_s)

    async def _answer(
        self,
        headers: Headers,
        body: bytes | memoryview,
        name: str,
        version: str,
        header_length: int | None,
        timeout_s: float | None,
    ) -> Response:
        spec = await self._plane.model_spec(name, version, timeout_s=timeout_s)
        decode = partial(
            decode_infer_request,
            body,
            model_name=name,
            model_version=version,
            header_length=header_length,
            limits=self._limits,
            spec=spec,
        )
        if is_large(len(body) if header_length is None else header_length):
            decoded = await self._decoder.run(decode)
        else:
            decoded = decode()
        plan = decoded.wants_binary
        plan.check(decoded.request, spec)
        answer = await self._plane.infer(decoded.request, timeout_s=timeout_s)
        del body, decode, decoded  # large ones make room for their answer
        await give_back(answer.size_bytes)
        return await _infer_response(encode_infer_response(answer, plan), accepted_encoding(headers))


async def _infer_response(encoded: EncodedBody, encoding: str | None) -> Response:
    headers = {} if encoded.header_length is None else {HEADER_LENGTH: str(encoded.header_length)}
    if encoding is None and encoded.size_bytes > PIECE_BYTES:
        return PiecemealResponse(encoded, headers)
    body = encoded.body
    if encoding is not None and len(body) > _PACK_ABOVE_BYTES:
        body = await pack_body(body, encoding=encoding)
        headers["content-encoding"] = encoding
    return Response(body, 200, headers, media_type=encoded.media_type)


def v2_routes(plane: DataPlane, limits: LimitSettings) -> list[Route]:
    """All V2 routes, the hot one first."""
    decoder = LargeJsonDecoder()
    infer: ASGIApp = InferEndpoint(plane, limits, decoder)
    model_paths = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    routes = [Route(f"{path}/infer", infer, methods=["POST"]) for path in model_paths]
    for form in GenerateForm:
        generate: ASGIApp = GenerateEndpoint(plane, limits, form, decoder)
        routes += [Route(f"{path}/{form.value}", generate, methods=["POST"]) for path in model_paths]
    return routes + control_routes(plane, limits)
