"""generate and generate_stream beside the real server's own: the same bytes, or the difference that is documented."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from starlette.types import ASGIApp

from serve_app.ingress.http_app import http_app
from tests.support.asgi import request
from tests.support.front import LIMITS, running_plane
from tests.support.stack import ROOT
from tests.support.triton_server import python_config, running_triton, write_model

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

# The python backend of Triton 24.10 was built for numpy 1 and loses text with numpy 2.
HAS_TEXT = np.__version__.startswith("1.")

SAME = [
    ("batched", {"INPUT0": 1.5}),
    ("batched", {"INPUT0": [1.5, 2]}),
    ("batched", {"INPUT0": []}),
    ("batched", {"INPUT0": 1, "id": "x", "other": 7, "parameters": {"a": 1.5, "b": "x", "c": True}}),
    ("batched", {"parameters": {"INPUT0": [1, 2, 3]}}),
    ("batched", {"INPUT0": 1, "parameters": {"id": "x"}}),
    ("batched", {"INPUT0": 1, "triton_enable_empty_final_response": True, "triton_other": 1.5}),
    ("batched", {"INPUT0": 1, "parameters": {"triton_other": "x"}, "model_name": "other", "outputs": "x"}),
    ("batched", {"INPUT0": 1, "timeout": 300000, "priority": 1}),
    ("fixed", {"INPUT0": [1, 2, 3, 4, 5, 6]}),
    ("flags", {"INPUT0": [True, False]}),
    ("repeat", {"COUNT": 1}),
    *([("texts", {"INPUT0": 'héllo "\n'}), ("texts", {"INPUT0": ["a", "b"]})] if HAS_TEXT else []),
]
STREAMED = [("repeat", {"COUNT": 0}), ("repeat", {"COUNT": 5, "DELAY_MS": 1})]
REFUSED = [
    ("batched", {"INPUT0": 1, "other": [1]}, 400),
    ("batched", {"INPUT0": 1, "other": None}, 400),
    ("batched", {"INPUT0": 1, "triton_other": {}}, 400),
    ("batched", {"INPUT0": 1, "parameters": {"INPUT0": 1}}, 400),
    ("batched", {}, 400),
    ("fixed", {"INPUT0": [1, 2, 3, 4]}, 400),
    ("fixed", {"INPUT0": [[1, 2, 3], [4, 5, 6]]}, 400),
    ("repeat", {"COUNT": [1, 2]}, 400),
    ("nothing", {"INPUT0": 1}, 404),
    ("repeat/versions/9", {"COUNT": 1}, 404),
]
# What Triton calls its own fault.
CALLERS_FAULT = [
    ("batched", {"INPUT0": "x"}),
    ("batched", {"INPUT0": None}),
    ("batched", {"INPUT0": [[1.5, 2]]}),
    ("batched", {"INPUT0": 1, "parameters": 3}),
    ("batched", {"INPUT0": 1, "id": 3}),
    ("flags", {"INPUT0": 1}),
]


@dataclass(frozen=True)
class Pair:
    """Triton's own HTTP endpoint, and our application over the same server."""

    triton: str
    app: ASGIApp

    async def ask(self, path: str, document: object) -> list[tuple[int, str, bytes]]:
        """Status, Content-Type and body of both answers, Triton's first."""
        body = json.dumps(document).encode()
        ours = await request(self.app, "POST", f"/v2/models/{path}", body, leave=asyncio.Event())
        theirs = await asyncio.to_thread(_post, f"http://{self.triton}/v2/models/{path}", body)
        return [theirs, (ours.status, ours.headers["content-type"], ours.body)]


def _post(url: str, body: bytes) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(url, body, timeout=20) as answer:
            return answer.status, answer.headers["content-type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["content-type"], error.read()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """One server with a model of each kind."""
    repository: Path = tmp_path_factory.mktemp("generate")
    shutil.copytree(ROOT / "tests" / "support" / "model_repository" / "repeat", repository / "repeat")
    write_model(repository, "batched")
    write_model(repository, "texts", config=python_config(datatype="TYPE_STRING"))
    write_model(repository, "fixed", config=python_config(max_batch_size=0, dims="2,3"))
    write_model(repository, "flags", config=python_config(datatype="TYPE_BOOL", max_batch_size=0))
    async with running_triton(repository, args={"allow_http": True}) as server:
        assert server.endpoint is not None
        line = psutil.Process(server.statistics()["pid"]).cmdline()
        port = next(word.partition("=")[2] for word in line if word.startswith("--http-port="))
        async with running_plane(server.endpoint) as (plane, _):
            yield Pair(f"127.0.0.1:{port}", http_app(plane, LIMITS))


@pytest.mark.parametrize("form", ["generate", "generate_stream"])
@pytest.mark.parametrize(("model", "document"), SAME)
async def test_one_response_is_the_same(pair: Pair, form: str, model: str, document: object) -> None:
    """Status, Content-Type and every byte."""
    theirs, ours = await pair.ask(f"{model}/{form}", document)
    assert ours == theirs
    assert ours[0] == 200


@pytest.mark.parametrize(("model", "document"), STREAMED)
async def test_any_number_of_events_is_the_same(pair: Pair, model: str, document: object) -> None:
    """None, and several."""
    theirs, ours = await pair.ask(f"{model}/generate_stream", document)
    assert ours == theirs


async def test_an_error_after_the_first_event_is_the_last_one(pair: Pair) -> None:
    """The same events, but that ours says which model failed; the server lives on."""
    for _ in range(5):
        theirs, ours = await pair.ask("repeat/generate_stream", {"COUNT": 666})
        assert ours == (*theirs[:2], theirs[2].replace(b'"error":"', b'"error":"model \'repeat\' failed: '))


@pytest.mark.parametrize("form", ["generate", "generate_stream"])
@pytest.mark.parametrize(("model", "document", "status"), REFUSED)
async def test_errors_have_the_same_status(pair: Pair, form: str, model: str, document: object, status: int) -> None:
    """Before the first event there are statuses; the texts are each one's own."""
    theirs, ours = await pair.ask(f"{model}/{form}", document)
    assert (theirs[0], ours[0]) == (status, status)
    assert list(json.loads(ours[2])) == ["error"]


@pytest.mark.parametrize(("model", "document"), CALLERS_FAULT)
async def test_the_callers_fault_is_not_the_servers(pair: Pair, model: str, document: object) -> None:
    """400 where Triton says 500; see docs/protocol.md."""
    theirs, ours = await pair.ask(f"{model}/generate", document)
    assert (theirs[0], ours[0]) == (500, 400)


@pytest.mark.parametrize("count", [0, 3])
async def test_generate_of_none_or_several(pair: Pair, count: int) -> None:
    """400 where Triton says 200 with an error; see docs/protocol.md."""
    theirs, ours = await pair.ask("repeat/generate", {"COUNT": count})
    assert (theirs[0], ours[0]) == (200, 400)
    assert (list(json.loads(theirs[2])), list(json.loads(ours[2]))) == (["error"], ["error"])
