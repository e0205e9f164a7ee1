"""The OpenAPI document of the HTTP routes, made from the routes themselves, and the page that shows it.

What is said of each operation stands in `OPERATIONS`; which operations there are, the routes say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve_app import __version__
from serve_app.auth.scopes import Operation as AuthOperation
from serve_app.ingress.middleware import SERVE_TIMEOUT_HEADER
from serve_app.ingress.openapi_schemas import SCHEMAS, Schema, ref
from serve_app.ingress.operations import operation_of_route
from serve_app.protocol.binary import HEADER_LENGTH

DOCUMENT_PATH = "/openapi.json"
PAGE_PATH = "/docs"

_STATUS_TEXTS = {
    400: "Something in the request is not as it must be.",
    401: "No valid API key came with the request.",
    403: "The API key is not good for this.",
    404: "Unknown model or version, or shared memory region.",
    413: "Above a limit of size.",
    429: "Too much is waiting; `Retry-After` says for how long.",
    500: "The model's backend failed.",
    501: "Not supported.",
    503: "Not ready, or no Triton server can be reached.",
    504: "The budget ran out.",
}
# As `auth.credentials` reads them.
_SECURITY_SCHEMES: dict[str, Schema] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "basic": {"type": "http", "scheme": "basic", "description": "Any user, the key as the password."},
}
_ALWAYS = (500, 503)
_READ = (404, *_ALWAYS, 504)
_WRITE = (400, 404, 413, *_ALWAYS, 501, 504)

_TENSORS = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Operation:
    """What the document says of one method of one path.

    Attributes:
        tag: Heading that it stands under.
        summary: One line.
        answer: Name of the schema of the 200 answer; `None`: empty, or anything.
        errors: Statuses of error answers.
        body: Name of the schema of the request's JSON; `None`: no body.
        media_types: More Content-Types, of request and answer.
        is_body_required: Whether a request without a body is refused.
        has_budget: Whether the header with the request's budget counts.
    """

    tag: str
    summary: str
    answer: str | None = "Object"
    errors: tuple[int, ...] = _READ
    body: str | None = None
    media_types: tuple[str, ...] = ()
    is_body_required: bool = False
    has_budget: bool = False


_INFER = Operation(
    "Inference",
    "Run the model on tensors; JSON, binary tensor data behind the JSON, or both",
    "InferResponse",
    (400, 404, 413, 429, *_ALWAYS, 501, 504),
    "InferRequest",
    (_TENSORS,),
    is_body_required=True,
    has_budget=True,
)
_GENERATE_ERRORS = (400, 404, 413, 429, *_ALWAYS, 501, 504)
_SHARED_MEMORY_ERRORS = (400, 404, 413, *_ALWAYS, 501, 504)

# By method and path, the names in braces left out; a model's path stands for the one with a version too.
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/v2/health/live"): Operation("Health", "Whether this replica takes requests", "Live", (503,)),
    ("GET", "/v2/health/ready"): Operation("Health", "Whether a request would be answered now", "Ready", _ALWAYS),
    ("GET", "/v2/models/{}/ready"): Operation("Health", "Whether some server has the model loaded", "ModelReady"),
    ("GET", "/v2"): Operation("Metadata", "Name, version and extensions of this server", "ServerMetadata", ()),
    ("GET", "/v2/models/{}"): Operation("Metadata", "Inputs and outputs of the model", "ModelMetadata"),
    ("GET", "/v2/models/{}/config"): Operation("Metadata", "Triton's configuration of the model", "ModelConfig"),
    ("GET", "/v2/models/stats"): Operation("Metadata", "Statistics of all models", "Statistics"),
    ("GET", "/v2/models/{}/stats"): Operation("Metadata", "Statistics of the model", "Statistics"),
    ("POST", "/v2/models/{}/infer"): _INFER,
    ("POST", "/v2/models/{}/generate"): Operation(
        "Inference", "Run the model on plain JSON", "Object", _GENERATE_ERRORS, "GenerateRequest", (), True, True
    ),
    ("POST", "/v2/models/{}/generate_stream"): Operation(
        "Inference",
        "Run the model on plain JSON; the answers come as server-sent events",
        None,
        _GENERATE_ERRORS,
        "GenerateRequest",
        ("text/event-stream",),
        True,
        True,
    ),
    ("POST", "/v2/repository/index"): Operation(
        "Repository", "Models with their states", "Index", (400, 413, *_ALWAYS, 504), "IndexRequest"
    ),
    ("POST", "/v2/repository/models/{}/load"): Operation(
        "Repository", "Load the model on every server", None, _WRITE, "LoadRequest"
    ),
    ("POST", "/v2/repository/models/{}/unload"): Operation(
        "Repository", "Unload the model from every server", None, _WRITE, "UnloadRequest"
    ),
    ("GET", "/v2/logging"): Operation("Settings", "Log settings of the servers"),
    ("POST", "/v2/logging"): Operation("Settings", "Change log settings", "Object", _WRITE, "Object"),
    ("GET", "/v2/trace/setting"): Operation("Settings", "Trace settings of the servers"),
    ("POST", "/v2/trace/setting"): Operation("Settings", "Change trace settings", "Object", _WRITE, "Object"),
    ("GET", "/v2/models/{}/trace/setting"): Operation("Settings", "Trace settings of the model"),
    ("POST", "/v2/models/{}/trace/setting"): Operation(
        "Settings", "Change the model's trace settings", "Object", _WRITE, "Object"
    ),
    ("GET", DOCUMENT_PATH): Operation("Documents", "This document", "Object", ()),
    ("GET", PAGE_PATH): Operation("Documents", "This document as a page", None, (), None, ("text/html",)),
    **{
        ("GET", f"/v2/systemsharedmemory{region}/status"): Operation(
            "Shared memory", "System shared memory that clients have registered", "Regions", _SHARED_MEMORY_ERRORS
        )
        for region in ("", "/region/{}")
    },
    **{
        ("POST", f"/v2/systemsharedmemory{region}/register"): Operation(
            "Shared memory",
            "Let Triton map a client's system shared memory; only where `allow_client_shm` is set",
            None,
            _SHARED_MEMORY_ERRORS,
            "RegionRequest",
        )
        for region in ("", "/region/{}")
    },
    ("POST", "/v2/systemsharedmemory/region/{}/unregister"): Operation(
        "Shared memory", "Let go of a region", None, _SHARED_MEMORY_ERRORS
    ),
    ("POST", "/v2/systemsharedmemory/unregister"): Operation(
        "Shared memory", "Let go of all regions that clients have registered", None, _SHARED_MEMORY_ERRORS
    ),
    **{
        (method, f"/v2/cudasharedmemory{region}/{verb}"): Operation(
            "Shared memory", "Not supported: CUDA shared memory", None, _SHARED_MEMORY_ERRORS
        )
        for region in ("", "/region/{}")
        for method, verb in (("GET", "status"), ("POST", "register"), ("POST", "unregister"))
    },
}


def operation_of(method: str, path: str) -> Operation | None:
    """What is said of a route; `None` when nothing is."""
    key = re.sub(r"\{[^}]*\}", "{}", path).replace("/versions/{}", "")
    key = key.replace("/v2/repository/{}/", "/v2/repository/")  # a named repository is all of them, too
    return OPERATIONS.get((method, key))


def operations_of(routes: Iterable[Route]) -> Iterator[tuple[str, str]]:
    """Method and path of every operation of some routes; `HEAD` goes with `GET`."""
    for route in routes:
        yield from ((method, route.path_format) for method in sorted(route.methods or ()) if method != "HEAD")


def openapi_document(routes: Iterable[Route], *, server: str = "", has_keys: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 document of some routes.

    Args:
        routes: The application's.
        server: Prefix that the application is reached under.
        has_keys: Whether callers need a key; those who ask for health do not.
    """
    paths: dict[str, dict[str, Any]] = {}
    for method, path in operations_of(routes):
        operation = operation_of(method, path) or Operation("Other", path)
        described = _described(operation, method, path)
        if has_keys and operation_of_route(method, path) is AuthOperation.HEALTH:
            described["security"] = []
        elif has_keys:
            described["responses"] |= {str(status): _error(status, path) for status in (401, 403)}
        paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "serve_app",
            "version": __version__,
            "summary": "Triton's V2 protocol (the Open Inference Protocol) over HTTP",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        **({"servers": [{"url": server}]} if server else {}),
        "paths": paths,
        **({"security": [{name: []} for name in _SECURITY_SCHEMES]} if has_keys else {}),
        "components": {"schemas": SCHEMAS, **({"securitySchemes": _SECURITY_SCHEMES} if has_keys else {})},
    }


def _described(operation: Operation, method: str, path: str) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": f"{method.lower()}{re.sub('[^a-z0-9]+', '_', path.lower()).rstrip('_')}",
    }
    parameters = [_path_parameter(name) for name in re.findall(r"\{([^}:]+)\}", path)]
    if operation.has_budget:
        parameters.append(
            _header(SERVE_TIMEOUT_HEADER, "Budget in seconds.", {"type": "number", "exclusiveMinimum": 0})
        )
    if _TENSORS in operation.media_types:
        text = "Length of the JSON, where binary tensor data follows it; 0: the body is the only input's data."
        parameters.append(_header(HEADER_LENGTH, text, {"type": "integer", "minimum": 0}))
    if parameters:
        described["parameters"] = parameters
    binary: dict[str, Schema] = {kind: {} for kind in operation.media_types}
    if operation.body is not None:
        content = {"application/json": {"schema": ref(operation.body)}}
        content |= {_TENSORS: {}} if _TENSORS in binary else {}
        described["requestBody"] = {"required": operation.is_body_required, "content": content}
    answer: dict[str, Any] = {"description": "What was asked for."}
    content = {"application/json": {"schema": ref(operation.answer)}} if operation.answer else {}
    if content or binary:
        answer["content"] = content | binary
    described["responses"] = {"200": answer} | {str(status): _error(status, path) for status in operation.errors}
    return described


def _path_parameter(name: str) -> Schema:
    schema = {"type": "string", "pattern": "^[0-9]+$"} if name == "version" else {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _header(name: str, text: str, schema: Schema) -> Schema:
    return {"name": name, "in": "header", "required": False, "description": text, "schema": schema}


def _error(status: int, path: str) -> Schema:
    schema = ref("Error")
    if status == 503 and path.startswith("/v2/health/"):
        schema = {"anyOf": [ref("Live" if path.endswith("live") else "Ready"), schema]}
    return {"description": _STATUS_TEXTS[status], "content": {"application/json": {"schema": schema}}}


def document_routes(routes: Iterable[Route], *, has_keys: bool = False) -> list[Route]:
    """`/openapi.json` and `/docs` for some routes and themselves."""
    page = resources.files("serve_app.ingress").joinpath("docs.html").read_bytes()
    documents: dict[str, bytes] = {}

    async def document(request: Request) -> Response:
        server = request.scope.get("root_path", "")
        if server not in documents:
            documents.clear()  # one prefix at a time: clients do not choose how much is kept
            documents[server] = orjson.dumps(openapi_document(described, server=server, has_keys=has_keys))
        return Response(documents[server], media_type="application/json")

    async def show(request: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        headers = {"content-security-policy": policy}
        return Response(page, headers=headers, media_type="text/html")

    own = [Route(DOCUMENT_PATH, document, methods=["GET"]), Route(PAGE_PATH, show, methods=["GET"])]
    described = [*routes, *own]
    return own
