"""Every HTTP route without a key, with a wrong one, with one that is too small, and with the right one."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import orjson
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from serve_app.auth.scopes import REQUIRED_SCOPE, Operation
from serve_app.dataplane import DataPlane
from serve_app.ingress.guard import guard_routes
from serve_app.ingress.http_routes import v2_routes
from serve_app.ingress.openapi import document_routes, operations_of
from serve_app.ingress.operations import operation_of_route
from tests.support.asgi import Answer, request
from tests.support.front import LIMITS
from tests.support.guarded_front import GuardedFront, guarded_front
from tests.support.keys import KEYS, RIGHT, SECRETS, TOO_SMALL, WRONG, key_of, key_store

BODY = orjson.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2]}]})


def routes() -> list[Route]:
    """Every route of the application, as `http_app` makes them."""
    found = v2_routes(cast("DataPlane", _NoPlane()), LIMITS)
    return found + document_routes(found)


class _NoPlane:
    """Routes are made of its methods, and none is called."""

    def __getattr__(self, name: str) -> Any:
        return self


ROUTES = sorted(operations_of(routes()))


def path_of(route: str) -> str:
    """A path of a route: of model `identity`, version 1."""
    values = {"name": "identity", "version": "1"}
    return re.sub(r"\{([^}]*)\}", lambda match: values.get(match[1], "r"), route)


@pytest.fixture
async def front() -> AsyncIterator[GuardedFront]:
    async with guarded_front() as front:
        yield front


async def ask(front: GuardedFront, method: str, path: str, headers: Mapping[str, str] | None = None) -> Answer:
    body = BODY if path.endswith("/infer") else b""
    return await request(front.app, method, path, body, headers)


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_every_route_is_an_operation(method: str, route: str) -> None:
    """A new route has to be listed in `ingress.operations`; till then it needs an `admin` key."""
    assert operation_of_route(method, route) is not None


@pytest.mark.parametrize(("method", "route"), ROUTES)
async def test_every_route_wants_a_key(front: GuardedFront, method: str, route: str) -> None:
    """None, a wrong one or one that has expired: 401 with a challenge; one that is too small: 403 with the scope."""
    operation = operation_of_route(method, route)
    assert operation is not None
    path = path_of(route)
    scope = REQUIRED_SCOPE[operation]
    for headers in ({}, {"x-api-key": WRONG}, {"authorization": f"Bearer {key_of('old')}"}):
        answer = await ask(front, method, path, headers)
        if operation is Operation.HEALTH:
            assert answer.status == 200
            continue
        assert (answer.status, path) == (401, path)
        assert answer.headers["www-authenticate"].startswith('Bearer realm="serve_app"')
        assert not any(secret in answer.body.decode() for secret in SECRETS)
    if scope in TOO_SMALL:
        answer = await ask(front, method, path, {"x-api-key": key_of(TOO_SMALL[scope])})
        assert answer.status == 403
        assert f"lacks the scope {scope.value!r}" in answer.json["error"]
    answer = await ask(front, method, path, {"x-api-key": key_of(RIGHT[scope])})
    assert answer.status not in (401, 403), answer.body


async def test_a_route_that_is_not_listed_needs_an_admin(front: GuardedFront) -> None:
    """Forgetting one opens nothing."""

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    class Endpoint:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await endpoint(scope, receive, send)

    route = Route("/new", Endpoint(), methods=["GET"])
    guard_routes([route], front.gate)
    app = Starlette(routes=[route])
    statuses = {
        key: (await request(app, "GET", "/new", headers={"x-api-key": key_of(key)})).status
        for key in KEYS
        if key != "old"
    }
    assert {key for key, status in statuses.items() if status == 204} == {"admin"}
    assert (await request(app, "GET", "/new")).status == 401


@pytest.mark.parametrize(("method", "path"), [("GET", "/nothing"), ("GET", "/v2/models/identity/infer")])
async def test_which_paths_there_are_is_nothing_for_strangers(front: GuardedFront, method: str, path: str) -> None:
    """Unknown paths and wrong methods are told to keys only."""
    assert (await ask(front, method, path)).status == 401
    assert (await ask(front, method, path, {"x-api-key": key_of("reader")})).status in (404, 405)


async def test_the_body_of_a_stranger_is_not_read(front: GuardedFront) -> None:
    """Refusing costs nothing, however much is sent."""
    asked = []

    async def receive() -> Any:
        asked.append(1)
        return {"type": "http.disconnect"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    path = "/v2/models/identity/infer"
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-length", b"99999999999")],
    }
    await front.app(scope, receive, send)
    assert sent[0]["status"] == 401
    assert asked == []


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {key_of('runner')}"},
        {"x-api-key": key_of("runner")},
        {"authorization": "Basic " + base64.b64encode(f"any:{key_of('runner')}".encode()).decode()},
    ],
)
async def test_ways_to_send_a_key(front: GuardedFront, headers: dict[str, str]) -> None:
    """Bearer, a header of its own, and Basic for clients that know nothing else."""
    answer = await ask(front, "POST", "/v2/models/identity/infer", headers)
    assert answer.status == 200, answer.body


async def test_a_key_of_some_models_sees_no_others(front: GuardedFront) -> None:
    """Index and statistics leave them out; asking for one is refused in the same words whether it exists or not."""
    headers = {"x-api-key": key_of("runner")}
    index = await ask(front, "POST", "/v2/repository/index", headers)
    assert {entry["name"] for entry in index.json} == {"identity"}
    statistics = await ask(front, "GET", "/v2/models/stats", headers)
    assert {entry["name"] for entry in statistics.json["model_stats"]} == {"identity"}
    everything = await ask(front, "POST", "/v2/repository/index", {"x-api-key": key_of("reader")})
    assert {entry["name"] for entry in everything.json} == {"identity", "other"}
    texts = set()
    for name in ("other", "nothing"):
        for suffix in ("", "/config", "/stats", "/ready", "/versions/1"):
            answer = await ask(front, "GET", f"/v2/models/{name}{suffix}", headers)
            assert answer.status == 403
            texts.add(answer.json["error"].replace(name, "..."))
        answer = await ask(front, "POST", f"/v2/models/{name}/infer", headers)
        assert answer.status == 403
        texts.add(answer.json["error"].replace(name, "..."))
    assert texts == {"key 'runner' may not use model '...': it is not one of its models"}


async def test_settings_of_the_whole_server_need_a_key_of_all_models(front: GuardedFront) -> None:
    """A key of one model changes that model's trace settings, and nobody else's."""
    headers = {"x-api-key": key_of("small-tuner")}
    assert (await ask(front, "GET", "/v2/models/identity/trace/setting", headers)).status not in (401, 403)
    for path in ("/v2/trace/setting", "/v2/logging", "/v2/models/other/trace/setting"):
        assert (await ask(front, "GET", path, headers)).status == 403


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "http://models.example:8000"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({}, 200),
    ],
)
async def test_a_page_of_another_site_has_no_use_of_the_browsers_key(
    front: GuardedFront, more: dict[str, str], status: int
) -> None:
    """Browsers send Basic credentials along with every request, whoever makes it; Bearer tokens they do not."""
    host = {"host": "models.example:8000"}
    basic = {"authorization": "Basic " + base64.b64encode(f"me:{key_of('admin')}".encode()).decode()}
    assert (await ask(front, "POST", "/v2/models/identity/infer", {**host, **basic, **more})).status == status
    bearer = {"authorization": f"Bearer {key_of('admin')}"}
    assert (await ask(front, "POST", "/v2/models/identity/infer", {**host, **bearer, **more})).status == 200


async def test_health_can_be_closed_too() -> None:
    """Where even that is nobody's business."""
    async with guarded_front(is_health_open=False) as front:
        assert (await ask(front, "GET", "/v2/health/ready")).status == 401
        assert (await ask(front, "GET", "/v2/health/ready", {"x-api-key": key_of("reader")})).status == 200


async def test_the_gate_counts(front: GuardedFront) -> None:
    """What it let in, and what not and why."""
    for key in ("runner", "reader", None):
        await ask(front, "POST", "/v2/models/identity/infer", {"x-api-key": key_of(key)} if key else {})
    assert front.gate.statistics() == {"num_allowed": 1, "num_unauthenticated": 1, "num_forbidden": 1}
    assert "1 allowed, 1 without a key, 1 forbidden" in repr(front.gate)
    assert not any(secret in repr(front.gate) + repr(key_store()) for secret in SECRETS)


async def test_a_region_in_a_request_needs_the_scope_too() -> None:
    """Regions are everybody's: without it a key that runs models would read and write what another has registered."""
    region = {"shared_memory_region": "theirs", "shared_memory_byte_size": 8}
    tensor = {"name": "INPUT0", "shape": [1, 2], "datatype": "FP32"}
    plain = orjson.loads(BODY)["inputs"]
    documents = [
        {"inputs": [{**tensor, "parameters": region}]},
        {"inputs": plain, "outputs": [{"name": "OUTPUT0", "parameters": region}]},
    ]
    async with guarded_front(allow_client_shm=True) as front:
        for document in documents:
            for key, is_refused in (("runner", True), ("mapper", False)):
                answer = await request(
                    front.app,
                    "POST",
                    "/v2/models/identity/infer",
                    orjson.dumps(document),
                    {"x-api-key": key_of(key)},
                )
                assert ("lacks the scope 'shared_memory'" in answer.json.get("error", "")) == is_refused
                assert (answer.status == 403) == is_refused


async def test_the_document_says_how_to_send_a_key(front: GuardedFront) -> None:
    """Its schemes, where one is needed, and what the answers without one are."""
    answer = await ask(front, "GET", "/openapi.json", {"x-api-key": key_of("reader")})
    document = answer.json
    assert set(document["components"]["securitySchemes"]) == {"bearer", "apiKey", "basic"}
    assert document["security"]
    assert document["paths"]["/v2/health/ready"]["get"]["security"] == []
    infer = document["paths"]["/v2/models/{name}/infer"]["post"]
    assert {"401", "403"} <= set(infer["responses"])
    assert "security" not in infer
