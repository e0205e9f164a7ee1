"""The V2 routes around inference: health, metadata, statistics, the model repository, trace and log settings."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve_app import __version__
from serve_app.dataplane import DataPlane
from serve_app.errors import InvalidRequest, ModelNotFound, ModelNotReady, ServeAppError
from serve_app.ingress.body import read_body
from serve_app.ingress.http_errors import error_response, json_response
from serve_app.protocol.model_spec import model_config_json, model_metadata_json
from serve_app.settings import LimitSettings

logger = logging.getLogger(__name__)

SERVER_NAME = "serve_app"
# Extensions in the words of Triton's own server metadata.
EXTENSIONS = ["model_repository", "model_configuration", "binary_tensor_data"]

Handler = Callable[[Request], Awaitable[Response]]


def server_metadata() -> dict[str, object]:
    """What `GET /v2` and `ServerMetadata` say of this server."""
    return {"name": SERVER_NAME, "version": __version__, "extensions": EXTENSIONS}


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
        name, version = model_of(request.path_params)
        return json_response(model_metadata_json(await self._plane.model_metadata(name, version)))

    async def config(self, request: Request) -> Response:
        """`GET /v2/models/{name}[/versions/{version}]/config`: Triton's config."""
        name, version = model_of(request.path_params)
        return json_response(model_config_json((await self._plane.model_config(name, version)).config))

    async def model_ready(self, request: Request) -> Response:
        """`GET /v2/models/{name}[/versions/{version}]/ready`: 200, 404 for an unknown model, else 503."""
        name, version = model_of(request.path_params)
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


def model_of(path_params: dict[str, str]) -> tuple[str, str]:
    """Model name and version of a path; a version that is not a number is one that nobody has."""
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


def control_routes(plane: DataPlane, limits: LimitSettings) -> list[Route]:
    """All routes of `ControlRoutes`."""
    control = ControlRoutes(plane, limits)
    table: list[tuple[str, str, Handler]] = [
        ("GET", "/v2", control.server),
        ("GET", "/v2/health/live", control.live),
        ("GET", "/v2/health/ready", control.ready),
        ("POST", "/v2/repository/index", control.index),
    ]
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        table += [
            ("GET", f"{model}/ready", control.model_ready),
            ("GET", f"{model}/config", control.config),
            ("GET", model, control.model),
        ]
    return [Route(path, answering_errors(handler), methods=[method]) for method, path, handler in table]
