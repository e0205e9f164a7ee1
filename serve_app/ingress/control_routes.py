"""The V2 routes around inference: health, metadata, statistics, the model repository, trace and log settings."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tritonclient.grpc import service_pb2

from serve_app import __version__
from serve_app.dataplane import DataPlane
from serve_app.errors import InvalidRequest, ModelNotFound, ModelNotReady, ServeAppError, Unsupported
from serve_app.ingress.body import read_body
from serve_app.ingress.http_errors import error_response, json_response
from serve_app.protocol.control_codec import (
    decode_load,
    decode_log_settings,
    decode_region,
    decode_trace_setting,
    decode_unload,
    log_settings_json,
    regions_json,
    trace_setting_json,
)
from serve_app.protocol.model_spec import model_config_json, model_metadata_json
from serve_app.protocol.statistics import model_statistics_json
from serve_app.settings import LimitSettings
from serve_app.shared_memory import NO_SHARED_MEMORY

logger = logging.getLogger(__name__)

SERVER_NAME = "serve_app"
# Extensions in the words of Triton's own server metadata; it has one for CUDA's shared memory beside these.
EXTENSIONS = [
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
]

Handler = Callable[[Request], Awaitable[Response]]


def server_metadata(plane: DataPlane) -> dict[str, object]:
    """What `GET /v2` and `ServerMetadata` say of this server."""
    extensions = [*EXTENSIONS, "system_shared_memory"] if plane.shared_memory.is_allowed else EXTENSIONS
    return {"name": SERVER_NAME, "version": __version__, "extensions": extensions}


class ControlRoutes:
    """Health, metadata, statistics, repository and settings routes.

    Args:
        plane: Borrowed.
        limits: Sizes beyond which a request is refused.
    """

    def __init__(self, plane: DataPlane, limits: LimitSettings) -> None:
        self._plane = plane
        self._limits = limits

    async def server(self, request: Request) -> Response:
        """`GET /v2`."""
        return json_response(server_metadata(self._plane))

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
            await self._plane.check_known(name, version)
            raise ModelNotReady(f"model {name!r}", "no server has it ready")
        return json_response({"name": name, "ready": True})

    async def statistics(self, request: Request) -> Response:
        """`GET /v2/models[/{name}[/versions/{version}]]/stats`: what all servers have counted, added up."""
        name, version = model_of(request.path_params) if "name" in request.path_params else ("", "")
        return json_response(model_statistics_json(await self._plane.control.model_statistics(name, version)))

    async def index(self, request: Request) -> Response:
        """`POST /v2/repository/index`: models with their states."""
        entries = await self._plane.repository_index(is_ready_only=await self._wants_ready_only(request))
        keys = ("name", "version", "state", "reason")
        return json_response([{key: getattr(entry, key) for key in keys if getattr(entry, key)} for entry in entries])

    async def load(self, request: Request) -> Response:
        """`POST /v2/repository[/{repository}]/models/{name}/load`, on every server; an empty answer."""
        with self._plane.admission.load.enter() as share:
            limit = self._limits.max_request_bytes
            body = await read_body(request.headers, request.receive, max_bytes=limit, share=share)
            await self._plane.control.load_model(decode_load(body, **_repository_model_of(request)))
        return Response()

    async def unload(self, request: Request) -> Response:
        """`POST /v2/repository[/{repository}]/models/{name}/unload`, on every server; an empty answer."""
        body = await self._settings_body(request)
        await self._plane.control.unload_model(decode_unload(body, **_repository_model_of(request)))
        return Response()

    async def trace_setting(self, request: Request) -> Response:
        """`GET` and `POST /v2[/models/{name}]/trace/setting`: read from any server, changed on every one."""
        body = await self._settings_body(request)
        message = decode_trace_setting(body, request.path_params.get("name", ""))
        return json_response(trace_setting_json(await self._plane.control.trace_setting(message)))

    async def log_settings(self, request: Request) -> Response:
        """`GET` and `POST /v2/logging`: read from any server, changed on every one."""
        message = decode_log_settings(await self._settings_body(request))
        return json_response(log_settings_json(await self._plane.control.log_settings(message)))

    async def regions(self, request: Request) -> Response:
        """`GET /v2/systemsharedmemory[/region/{region}]/status`: what clients have registered, or one of it."""
        message = service_pb2.SystemSharedMemoryStatusRequest(name=request.path_params.get("region", ""))
        return json_response(regions_json(await self._plane.shared_memory.status(message)))

    async def register_region(self, request: Request) -> Response:
        """`POST /v2/systemsharedmemory/region/{region}/register`; an empty answer."""
        self._plane.shared_memory.check_allowed()
        body = await self._settings_body(request)
        await self._plane.shared_memory.register(decode_region(body, request.path_params.get("region", "")))
        return Response()

    async def unregister_region(self, request: Request) -> Response:
        """`POST /v2/systemsharedmemory[/region/{region}]/unregister`: one, or all of clients; an empty answer."""
        message = service_pb2.SystemSharedMemoryUnregisterRequest(name=request.path_params.get("region", ""))
        await self._plane.shared_memory.unregister(message)
        return Response()

    async def cuda_shared_memory(self, request: Request) -> Response:
        """Every path below `/v2/cudasharedmemory`: refused."""
        raise Unsupported("CUDA shared memory", NO_SHARED_MEMORY)

    async def _settings_body(self, request: Request) -> bytes:
        if request.method != "POST":
            return b""
        with self._plane.admission.load.enter() as share:
            limit = self._limits.max_json_bytes
            return await read_body(request.headers, request.receive, max_bytes=limit, share=share)

    async def _wants_ready_only(self, request: Request) -> bool:
        return parse_ready_flag(await self._settings_body(request))


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


def _repository_model_of(request: Request) -> dict[str, str]:
    names = {"model_name": request.path_params["name"]}
    if "repository" in request.path_params:  # Triton takes the name and says that it cannot use it
        names["repository_name"] = request.path_params["repository"]
    return names


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
        ("GET", "/v2/models/stats", control.statistics),  # before the model of that name, as in Triton
        ("POST", "/v2/repository/index", control.index),
        ("GET", "/v2/logging", control.log_settings),
        ("POST", "/v2/logging", control.log_settings),
    ]
    for repository in ("/v2/repository", "/v2/repository/{repository}"):
        table += [
            ("POST", f"{repository}/models/{{name}}/load", control.load),
            ("POST", f"{repository}/models/{{name}}/unload", control.unload),
        ]
    for owner in ("/v2", "/v2/models/{name}"):
        table += [
            ("GET", f"{owner}/trace/setting", control.trace_setting),
            ("POST", f"{owner}/trace/setting", control.trace_setting),
        ]
    for region in ("", "/region/{region}"):
        system, cuda = f"/v2/systemsharedmemory{region}", f"/v2/cudasharedmemory{region}"
        table += [
            ("GET", f"{system}/status", control.regions),
            ("POST", f"{system}/register", control.register_region),
            ("POST", f"{system}/unregister", control.unregister_region),
            ("GET", f"{cuda}/status", control.cuda_shared_memory),
            ("POST", f"{cuda}/register", control.cuda_shared_memory),
            ("POST", f"{cuda}/unregister", control.cuda_shared_memory),
        ]
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        table += [
            ("GET", f"{model}/ready", control.model_ready),
            ("GET", f"{model}/config", control.config),
            ("GET", f"{model}/stats", control.statistics),
            ("GET", model, control.model),
        ]
    routes: dict[tuple[str, Handler], list[str]] = {}
    for method, path, handler in table:
        routes.setdefault((path, handler), []).append(method)
    return [Route(path, answering_errors(handler), methods=methods) for (path, handler), methods in routes.items()]
