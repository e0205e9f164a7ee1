"""Generated requests, by our own OpenAPI document and by the Open Inference Protocol's, against a real tritonserver.

`make fuzz` sends tens of thousands of them; here there are as many as a test may take.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import requests

from tests.support.schema_cases import SCHEMAS_VARIABLE, open_inference_schema
from tests.support.schema_front import SchemaFront, running_schema_front
from tests.support.schema_fuzz import OPEN_INFERENCE, SERVER_ERRORS, Fuzz, own_schema
from tests.support.stack import ROOT

pytestmark = pytest.mark.integration

NUM_REQUESTS = 150


@pytest.fixture(scope="module")
def front() -> Iterator[SchemaFront]:
    """One front and one server for all of these."""
    with running_schema_front() as front:
        yield front


def test_by_our_own_document(front: SchemaFront) -> None:
    """No server error without a reason, nothing that is not declared, no hang, and the server lives."""
    report = Fuzz(front, own_schema(front), SERVER_ERRORS).run(NUM_REQUESTS, seed=1)
    assert report.foreign == []
    assert report.num_requests >= NUM_REQUESTS
    assert front.triton.is_running()


def test_by_the_open_inference_protocol(front: SchemaFront) -> None:
    """As declared there, but for the differences that have a name and a reason."""
    schema = open_inference_schema()
    if schema is None:
        pytest.skip(f"{SCHEMAS_VARIABLE} does not name the folder of the published schemas")
    report = Fuzz(front, schema, OPEN_INFERENCE).run(NUM_REQUESTS, seed=1)
    assert report.foreign == []
    assert report.num_requests >= NUM_REQUESTS
    assert front.triton.is_running()


def test_every_difference_is_documented() -> None:
    """By its name, with its reason."""
    text = (ROOT / "docs" / "protocol.md").read_text()
    for named in OPEN_INFERENCE:
        assert f"| {named.name} |" in text
        assert named.why in text


def ask(
    front: SchemaFront, method: str, target: str, *headers: tuple[str, str], body: bytes = b""
) -> tuple[int, bytes]:
    """Status and body of a request whose target goes out as it is written."""
    address = urlsplit(front.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    try:
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in (*headers, ("content-length", str(len(body)))):
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        assert method == "HEAD" or int(answer.headers.get("content-length", -1)) == len(content)
        if content:
            assert answer.headers["content-type"] == "application/json"
        if answer.status == 405:
            assert answer.headers["allow"]
        return answer.status, content
    finally:
        connection.close()


INFER = "/v2/models/identity/infer"
BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}).encode()
LONG = "a" * 16_000


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("HEAD", "/v2", 200),
        ("HEAD", "/v2/health/ready", 200),
        ("HEAD", "/v2/models/identity", 200),
        ("HEAD", INFER, 405),
        ("OPTIONS", "/v2", 405),
        ("OPTIONS", INFER, 405),
        ("GET", INFER, 405),
        ("PUT", "/v2/logging", 405),
        ("DELETE", "/v2/models/identity", 405),
        ("GET", "/v2/models/%69dentity", 200),
        ("GET", "/v2/models/identity?a=1&a=2&%00=%ff", 200),
        ("GET", "/v2/models/identity%00", 404),
        ("GET", "/v2/models/identity%0a", 404),
        ("GET", "/v2/models/%ff%fe", 404),
        ("GET", "/v2/models/%2e%2e", 404),
        ("GET", "/v2/models/identity%2fready", 200),
        ("GET", "/v2/models/..%2f..%2fidentity", 404),
        ("GET", "/v2/models//ready", 404),
        ("GET", f"/v2/models/{LONG}", 404),
        ("GET", f"/v2/models/{LONG}/ready", 404),
        ("GET", f"/{LONG}", 404),
        ("GET", f"/v2/models/identity/versions/{'9' * 5000}", 404),
        ("GET", "/v2/models/identity/versions/%c2%b2", 404),
        ("POST", f"/v2/repository/models/{LONG}/load", 404),
        ("POST", "/v2/repository/models/spare%0A/load", 404),
        ("POST", "/v2/repository/models/spare%00/unload", 404),
    ],
    ids=lambda value: str(value)[:40],
)
def test_odd_requests(front: SchemaFront, method: str, target: str, status: int) -> None:
    """Other methods, escapes and lengths get the answer of their kind: short, JSON, with its length."""
    answered, content = ask(front, method, target)
    assert answered == status
    assert len(content) < 4096
    if status >= 400 and method != "HEAD":
        assert list(json.loads(content)) == ["error"]


def test_what_is_given_twice(front: SchemaFront) -> None:
    """The first of two headers counts, and a query is not looked at."""
    twice = ("x-request-timeout-seconds", "30"), ("x-request-timeout-seconds", "nothing")
    assert ask(front, "POST", f"{INFER}?timeout=1&timeout=2", *twice, body=BODY)[0] == 200
    assert ask(front, "POST", INFER, *reversed(twice), body=BODY)[0] == 400


def test_a_load_that_triton_never_answers_is_not_sent(front: SchemaFront) -> None:
    """tritonserver 2.51 hangs on a name with a line break and files, and later loads would wait for that one."""
    load = {"parameters": {"config": '{"backend":"python"}', "file:1/model.py": "cGFzcw=="}}
    url = f"{front.url}/v2/repository/models"
    assert requests.post(f"{url}/spare%0A/load", json=load, timeout=60).status_code == 404
    assert requests.post(f"{url}/spare/load", timeout=60).status_code == 200


def test_a_file_that_is_no_text_of_base64(front: SchemaFront) -> None:
    """The caller's fault, whatever is in it."""
    for text in ("!", "\u00e9", "\u2028", "a"):
        load = {"parameters": {"config": "{}", "file:1/model.py": text}}
        answer = requests.post(f"{front.url}/v2/repository/models/spare/load", json=load, timeout=60)
        assert (answer.status_code, "base64" in answer.json()["error"]) == (400, True)
