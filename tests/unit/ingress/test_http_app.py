"""The HTTP application over a real data plane, runner and router, with a fake Triton behind them."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import numpy as np
import orjson
import pytest
from starlette.types import ASGIApp

from serve_app.dataplane import DataPlane
from serve_app.ingress.http_app import http_app
from serve_app.settings import LimitSettings
from serve_app.triton.fake import FakeModel, FakeTriton
from tests.support.asgi import Answer, request
from tests.support.front import running_plane

INFER = "/v2/models/identity/infer"
BODY = orjson.dumps({"id": "7", "inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2]}]})
LIMITS = LimitSettings(max_request_bytes=4096)


@dataclass
class Front:
    """An application and what is behind it."""

    app: ASGIApp
    plane: DataPlane
    fake: FakeTriton

    async def post(self, path: str, body: bytes = BODY, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await request(self.app, "POST", path, body, named)

    async def get(self, path: str) -> Answer:
        return await request(self.app, "GET", path)


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    """One replica's insides, without Ray."""
    async with (
        FakeTriton(FakeModel(), FakeModel(name="other")) as fake,
        running_plane(fake.endpoint, limits=LIMITS, names=["identity"]) as (plane, _),
    ):
        yield Front(http_app(plane, LIMITS), plane, fake)


async def test_an_answer_has_what_triton_would_send(front: Front) -> None:
    """JSON out, id echoed, version filled in, the time it took in a header."""
    answer = await front.post(INFER)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["server-timing"].startswith("total;dur=")
    output = {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}
    assert answer.json == {"model_name": "identity", "model_version": "1", "id": "7", "outputs": [output]}


@pytest.mark.parametrize("path", ["/v2/models/identity", "/v2/models/identity/versions/1"])
async def test_every_model_path_has_a_form_with_a_version(front: Front, path: str) -> None:
    """Metadata, config, ready and infer."""
    assert (await front.get(path)).json["name"] == "identity"
    assert (await front.get(f"{path}/config")).json["max_batch_size"] == 8
    assert (await front.get(f"{path}/ready")).json == {"name": "identity", "ready": True}
    assert (await front.post(f"{path}/infer")).status == 200


async def test_binary_in_and_out(front: Front) -> None:
    """The header's length parts JSON from tensor data, both ways."""
    parameters = {"binary_data_size": 8}
    head = orjson.dumps(
        {
            "inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "parameters": parameters}],
            "parameters": {"binary_data_output": True},
        }
    )
    data = np.array([[1.5, 2.0]], "<f4").tobytes()
    answer = await front.post(INFER, head + data, Inference_Header_Content_Length=str(len(head)))
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.body[int(answer.headers["inference-header-content-length"]) :] == data


async def test_a_raw_binary_request(front: Front) -> None:
    """Header length 0: the body is the only input's data, one row of it."""
    data = np.array([[1.5, 2.0]], "<f4").tobytes()
    answer = await front.post(INFER, data, Inference_Header_Content_Length="0")
    assert answer.status == 200
    assert answer.body.endswith(data)


async def test_packed_both_ways(front: Front) -> None:
    """A packed request is understood; a large answer is packed for a client that asks for it, a small one is not."""
    values = [float(n) for n in range(300)]
    body = orjson.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 300], "datatype": "FP32", "data": values}]})
    answer = await front.post(INFER, gzip.compress(body), Content_Encoding="gzip", Accept_Encoding="gzip")
    assert answer.headers["content-encoding"] == "gzip"
    assert orjson.loads(gzip.decompress(answer.body))["outputs"][0]["data"] == values
    assert "content-encoding" not in (await front.post(INFER, Accept_Encoding="gzip")).headers


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/v2/", 404, "/v2/"),
        ("GET", "/nothing", 404, "/nothing"),
        ("GET", INFER, 405, "GET"),
        ("POST", "/v2", 405, "POST"),
        ("GET", "/v2/models/nothing", 404, "nothing"),
        ("GET", "/v2/models/other", 404, "other"),
        ("GET", "/v2/models/other/ready", 404, "other"),
        ("GET", "/v2/models/identity/versions/9", 404, "9"),
        ("GET", "/v2/models/identity/versions/x/ready", 404, "x"),
        ("POST", "/v2/models/other/infer", 404, "other"),
        ("POST", "/v2/models/../infer", 404, ".."),
    ],
)
async def test_what_is_not_there(front: Front, method: str, path: str, status: int, says: str) -> None:
    """Unknown paths, wrong methods, models that are not served: a V2 error that names what was asked for."""
    answer = await request(front.app, method, path, BODY if method == "POST" else b"")
    assert (answer.status, list(answer.json)) == (status, ["error"])
    assert says in answer.json["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"inputs":7}', b"\xff\xfe", b"[" * 4000])
async def test_a_body_that_is_no_request(front: Front, body: bytes) -> None:
    """400 and one line, whatever it is; the next request is answered."""
    answer = await front.post(INFER, body)
    assert (answer.status, list(answer.json)) == (400, ["error"])
    assert (await front.post(INFER)).status == 200


async def test_a_body_above_the_limit(front: Front) -> None:
    """413 with the size and the limit."""
    answer = await front.post(INFER, b" " * 5000)
    assert answer.status == 413
    assert "4096" in answer.json["error"]


async def test_health_tells_the_truth(front: Front) -> None:
    """Ready with Triton, not ready without it, and again when it is back; live all the time."""
    assert (await front.get("/v2/health/ready")).json == {"ready": True}
    front.fake.models["identity"].is_ready = False
    assert (await front.get("/v2/health/ready")).status == 503
    assert (await front.get("/v2/models/identity/ready")).status == 503
    front.fake.models["identity"].is_ready = True
    await front.fake.kill()
    assert (await front.get("/v2/health/ready")).status == 503
    assert (await front.get("/v2/health/live")).json == {"live": True}
    await front.fake.restart()
    for _ in range(500):
        if (await front.get("/v2/health/ready")).status == 200:
            break
        await asyncio.sleep(0.02)
    assert (await front.get("/v2/health/ready")).json == {"ready": True}


async def test_a_server_that_hangs_is_not_ready(front: Front) -> None:
    """It says nothing, and a probe hears so in time, for the server and for its model; and the same once it goes on."""
    front.fake.hang()
    for path in ("/v2/health/ready", "/v2/models/identity/ready"):
        started = time.monotonic()
        assert (await front.get(path)).status == 503
        assert time.monotonic() - started < 4.0  # two short calls; one of any other kind may take five seconds
    front.fake.resume()
    for _ in range(500):
        if (await front.get("/v2/health/ready")).status == 200:
            break
        await asyncio.sleep(0.02)
    assert (await front.get("/v2/models/identity/ready")).status == 200


async def test_the_index_lists_what_is_served(front: Front) -> None:
    """Only models of the settings, with Triton's states; a body that is no flag is refused."""
    for body in (b"", b"{}", b'{"ready": true}'):
        answer = await front.post("/v2/repository/index", body)
        assert answer.json == [{"name": "identity", "version": "1", "state": "READY"}]
    assert (await front.post("/v2/repository/index", b'{"ready": 1}')).status == 400


async def test_an_app_of_one_model_keeps_the_paths(front: Front) -> None:
    """Mounted at the model's own path, or under a prefix of any name, the V2 paths work."""
    for root_path in ("/v2/models/identity", "/prefix"):
        path = INFER if root_path.startswith("/v2") else f"{root_path}{INFER}"
        answer = await request(front.app, "POST", path, BODY, root_path=root_path)
        assert answer.status == 200, answer.body


async def test_triton_saying_no_is_a_typed_error(front: Front) -> None:
    """What the backend says reaches the client as one line with the right status."""
    front.fake.fail_next(grpc.StatusCode.INTERNAL, "ValueError: boom\n\nAt:\n  model.py(3): execute")
    answer = await front.post(INFER)
    assert answer.status == 500
    assert "boom" in answer.json["error"]
    assert "model.py" not in answer.json["error"]


async def test_a_deadline_is_504(front: Front) -> None:
    """The budget of the header counts."""
    front.fake.models["identity"].latency_s = 30.0
    answer = await front.post(INFER, x_request_timeout_seconds="0.1")
    assert answer.status == 504


async def test_requests_after_closing_are_refused(front: Front) -> None:
    """503, not a hang."""
    await front.plane.aclose()
    assert (await front.post(INFER)).status == 503
    assert (await front.get("/v2/health/live")).status == 503
