"""The OpenAPI document says exactly what is there, and the page needs nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest
from starlette.routing import Route
from starlette.types import ASGIApp

from serve_app.ingress.http_app import http_app
from serve_app.ingress.http_routes import v2_routes
from serve_app.ingress.openapi import document_routes, openapi_document, operation_of, operations_of
from serve_app.ingress.openapi_schemas import SCHEMAS
from serve_app.settings import LimitSettings
from tests.support.asgi import request
from tests.support.served_front import open_plane, serve_front

LIMITS = LimitSettings(max_request_bytes=1024 * 1024, max_json_bytes=1024 * 1024)


@pytest.fixture
async def app_and_routes() -> AsyncIterator[tuple[ASGIApp, list[Route]]]:
    """An application and the routes that it was made of."""
    async with open_plane(LIMITS) as (plane, _):
        routes = v2_routes(plane, LIMITS)
        yield http_app(plane, LIMITS), [*routes, *document_routes(routes)]


async def test_the_document_has_every_route_and_no_other(app_and_routes: tuple[ASGIApp, list[Route]]) -> None:
    """Compared with the route table that answers."""
    app, routes = app_and_routes
    paths = (await request(app, "GET", "/openapi.json")).json["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == set(operations_of(routes))


async def test_every_route_is_described(app_and_routes: tuple[ASGIApp, list[Route]]) -> None:
    """A new route gets its sentence in `OPERATIONS`."""
    assert [route for route in operations_of(app_and_routes[1]) if operation_of(*route) is None] == []


async def test_operation_ids_are_distinct(app_and_routes: tuple[ASGIApp, list[Route]]) -> None:
    """Generators of clients name functions after them."""
    paths = openapi_document(app_and_routes[1])["paths"]
    ids = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)


async def test_real_answers_fit_their_schemas(app_and_routes: tuple[ASGIApp, list[Route]]) -> None:
    """Each schema of an answer, on the answer of the application."""
    app, _ = app_and_routes
    body = b'{"id":"7","inputs":[{"name":"INPUT0","shape":[1,2],"datatype":"FP32","data":[1.5,2]}]}'
    answers = {
        "Live": await request(app, "GET", "/v2/health/live"),
        "Ready": await request(app, "GET", "/v2/health/ready"),
        "ServerMetadata": await request(app, "GET", "/v2"),
        "ModelMetadata": await request(app, "GET", "/v2/models/identity"),
        "ModelReady": await request(app, "GET", "/v2/models/identity/ready"),
        "Index": await request(app, "POST", "/v2/repository/index"),
        "InferResponse": await request(app, "POST", "/v2/models/identity/infer", body),
        "Error": await request(app, "GET", "/v2/models/nothing"),
    }
    for name, answer in answers.items():
        schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}
        jsonschema.validate(answer.json, schema)


async def test_under_a_prefix_the_document_names_it(app_and_routes: tuple[ASGIApp, list[Route]]) -> None:
    """So that what the page sends arrives; and the next client at no prefix is told of none."""
    app, _ = app_and_routes
    answer = await request(app, "GET", "/prefix/openapi.json", root_path="/prefix")
    assert answer.json["servers"] == [{"url": "/prefix"}]
    assert "servers" not in (await request(app, "GET", "/openapi.json")).json


async def test_the_page_is_self_contained(app_and_routes: tuple[ASGIApp, list[Route]]) -> None:
    """No address of another host, and a policy under which the browser would refuse one."""
    page = await request(app_and_routes[0], "GET", "/docs")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert re.findall(rb"(?:https?:)?//[a-z]+\.", page.body) == []


DECLARED = "status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.parametrize(
    "options",
    [
        ["--exclude-path-regex=sharedmemory|unload", f"--checks=not_a_server_error,{DECLARED}", "--max-examples=8"],
        # 501 each, and what leaves no model.
        ["--include-path-regex=sharedmemory|unload", f"--checks={DECLARED}", "--max-examples=2"],
    ],
    ids=["served", "refused"],
)
def test_generated_requests_find_no_fault(tmp_path: Path, options: list[str]) -> None:
    """schemathesis: no 5xx, no status or Content-Type that is not declared, no answer against its schema, no hang."""
    config = tmp_path / "schemathesis.toml"
    # A model that is there, and a budget that is no reason for 504.
    config.write_text(
        '[parameters]\n"path.name" = "identity"\n"path.version" = "1"\n"header.x-request-timeout-seconds" = "20"\n'
    )
    with serve_front(LIMITS) as url:
        command = [
            str(Path(sys.executable).parent / "schemathesis"),
            f"--config-file={config}",
            "run",
            f"{url}/openapi.json",
            *options,
            "--phases=examples,coverage,fuzzing",
            "--seed=1",
            "--generation-database=none",
            "--request-timeout=20",
            "--no-color",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
