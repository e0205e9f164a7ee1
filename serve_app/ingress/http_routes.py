"""The V2 routes over HTTP: each decodes, asks the data plane, encodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app import __version__
from serve_app.dataplane import DataPlane
from serve_app.errors import InvalidRequest, ModelNotFound, ModelNotReady, ServeAppError
from serve_app.ingress.body import (
    accepted_encoding,
    pack,
    read_body,
    timeout_of,
)
from serve_app.ingress.http_errors import error_response, json_response
from serve_app.protocol.binary import (
    HEADER_LENGTH,
    EncodedBody,
    decode_infer_request,
    encode_infer_response,
    parse_header_length,
)
from serve_app.protocol.model_spec import model_config_json, model_metadata_json
from serve_app.settings import LimitSettings

logger = logging.getLogger(__name__)

SERVER_NAME = "serve_app"
# Extensions in the words of Triton's own server metadata.
EXTENSIONS = ["model_repository", "model_configuration", "binary_tensor_data"]

# Answers smaller than this are sent as they are: packing would cost more than it saves.
_PACK_ABOVE_BYTES = 1024

Handler = Callable[[Request], Awaitable[Response]]


def server_metadata() -> dict[str, object]:
    """What `GET /v2` and `ServerMetadata` say of this server."""
    return {"name": SERVER_NAME, "version": __version__, "extensions": EXTENSIONS}


class InferEndpoint:
    """`POST /v2/models/{name}[/versions/{version}]/infer`; plain ASGI, since every request passes here.

    Args:
        plane: Borrowed.
        limits: Sizes beyond which a request is refused.
    """

    def __init__(self, plane: DataPlane, limits: LimitSettings) -> None:
        self._plane = plane
        self._limits = limits

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
        name, version = _model_of(scope["path_params"])
        timeout_s = timeout_of(headers)
        header_length = parse_header_length(headers.get(HEADER_LENGTH))
        body = await read_body(headers, receive, max_bytes=self._limits.max_request_bytes)
        spec = await self._plane.model_spec(name, version)
        decoded = decode_infer_request(
            body,
            model_name=name,
            model_version=version,
            header_length=header_length,
            limits=self._limits,
            spec=spec,
        )
        decoded.wants_binary.check(decoded.request, spec)
        answer = await self._plane.infer(decoded.request, timeout_s=timeout_s)
        return _infer_response(encode_infer_response(answer, decoded.wants_binary), accepted_encoding(headers))


def _infer_response(encoded: EncodedBody, encoding: str | None) -> Response:
    headers = {} if encoded.header_length is None else {HEADER_LENGTH: str(encoded.header_length)}
    body = encoded.body
    if encoding is not None and len(body) > _PACK_ABOVE_BYTES:
        body = pack(body, encoding=encoding)
        headers["content-encoding"] = encoding
    return Response(body, 200, headers, media_type=encoded.media_type)


class ControlRoutes:
    """Health, metadata, config and repository routes.

    Args:
        plane: Borrowed.
        limits: Sizes beyond which a request is refused.
    """

    def __init__(self, plane: DataPlane, limits: LimitSettings) -> None:
        self._plane = plane
        self._limits = limits

    async def server(self, request: Request) -> Response:
        """`GET /v2`."""
        return json_response(server_metadata())

    async def live(self, request: Request) -> Response:
        """`GET /v2/health/live`."""
        is_live = self._plane.is_live()
        return json_response({"live": is_live}, status_code=200 if is_live else 503)

    async def ready(self, request: Request) -> Response:
        """`GET /v2/health/ready`: 200 or 503."""
        is_ready = await self._plane.is_ready()
        return json_response({"ready": is_ready}, status_code=200 if is_ready else 503)

    async def model(self, request: Request) -> Response:
        """`GET /v2/models/{name}[/versions/{version}]`: Triton's metadata."""
        name, version = _model_of(request.path_params)
        return json_response(model_metadata_json(await self._plane.model_metadata(name, version)))

    async def config(self, request: Request) -> Response:
        """`GET /v2/models/{name}[/versions/{version}]/config`: Triton's config."""
        name, version = _model_of(request.path_params)
        return json_response(model_config_json((await self._plane.model_config(name, version)).config))

    async def model_ready(self, request: Request) -> Response:
        """`GET /v2/models/{name}[/versions/{version}]/ready`: 200, 404 for an unknown model, else 503."""
        name, version = _model_of(request.path_params)
        if not await self._plane.is_model_ready(name, version):
            await self._plane.model_metadata(name, version)  # tells unknown models from those not loaded
            raise ModelNotReady(f"model {name!r}", "no server has it ready")
        return json_response({"name": name, "ready": True})

    async def index(self, request: Request) -> Response:
        """`POST /v2/repository/index`: models with their states."""
        entries = await self._plane.repository_index(is_ready_only=await self._wants_ready_only(request))
        keys = ("name", "version", "state", "reason")
        return json_response([{key: getattr(entry, key) for key in keys if getattr(entry, key)} for entry in entries])

    async def _wants_ready_only(self, request: Request) -> bool:
        body = await read_body(request.headers, request.receive, max_bytes=self._limits.max_json_bytes)
        return parse_ready_flag(body)


def parse_ready_flag(body: bytes) -> bool:
    """The `ready` flag in the body of a repository index request; an empty body means false.

    Raises:
        InvalidRequest: The body is neither empty nor a JSON object with a boolean `ready`.
    """
    if not body.strip():
        return False
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("ready", False), bool):
        raise InvalidRequest("body", "something else", 'an empty body or a JSON object such as {"ready": true}')
    return bool(document.get("ready", False))


def _model_of(path_params: dict[str, str]) -> tuple[str, str]:
    name, version = path_params["name"], path_params.get("version", "")
    if version and not version.isdigit():
        raise ModelNotFound(name, version)
    return name, version


def answering_errors(handler: Handler) -> Handler:
    """A handler whose errors become V2 error answers."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ServeAppError as error:
            return error_response(error)
        except Exception as error:  # as in InferEndpoint: log it, tell the client nothing
            logger.exception("%s failed in a way that has no error class", request.url.path)
            return error_response(error)

    return handle


def v2_routes(plane: DataPlane, limits: LimitSettings) -> list[Route]:
    """All V2 routes, the hot one first."""
    control = ControlRoutes(plane, limits)
    infer: ASGIApp = InferEndpoint(plane, limits)
    model_paths = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    routes = [Route(f"{path}/infer", infer, methods=["POST"]) for path in model_paths]
    for path in model_paths:
        routes.append(Route(f"{path}/ready", answering_errors(control.model_ready), methods=["GET"]))
        routes.append(Route(f"{path}/config", answering_errors(control.config), methods=["GET"]))
        routes.append(Route(path, answering_errors(control.model), methods=["GET"]))
    routes += [
        Route("/v2", control.server, methods=["GET"]),
        Route("/v2/health/live", answering_errors(control.live), methods=["GET"]),
        Route("/v2/health/ready", answering_errors(control.ready), methods=["GET"]),
        Route("/v2/repository/index", answering_errors(control.index), methods=["POST"]),
    ]
    return routes
