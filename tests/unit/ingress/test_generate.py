"""generate and generate_stream over a real data plane and router, with a fake Triton behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest
from starlette.types import Message

from serve_app.ingress.http_app import http_app
from serve_app.settings import ModelSettings
from serve_app.triton.fake import FakeModel
from tests.support.asgi import Answer, request
from tests.support.front import LIMITS, Front, running_front

REPEAT = "/v2/models/repeat"


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    repeat = FakeModel("repeat", is_decoupled=True, num_responses=3)
    async with running_front(FakeModel(), repeat, settings=ModelSettings(timeout_s=5.0, max_streams=2)) as front:
        yield front


async def post(front: Front, path: str, document: object, **headers: str) -> Answer:
    body = document if isinstance(document, bytes) else orjson.dumps(document)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await request(http_app(front.plane, LIMITS), "POST", path, body, named, leave=asyncio.Event())


def events(answer: Answer) -> list[object]:
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.body.endswith(b"\n\n") or not answer.body
    return [orjson.loads(part.removeprefix(b"data: ")) for part in answer.body.split(b"\n\n") if part]


@pytest.mark.parametrize("path", [REPEAT, f"{REPEAT}/versions/1"])
async def test_each_response_is_an_event(front: Front, path: str) -> None:
    """In order, as flat JSON, with the request's id."""
    answer = await post(front, f"{path}/generate_stream", {"INPUT0": [1, 2], "id": "7"})
    one = {"OUTPUT0": [1.0, 2.0], "id": "7", "model_name": "repeat", "model_version": "1"}
    assert events(answer) == [one] * 3


async def test_a_model_that_is_not_decoupled_gives_one(front: Front) -> None:
    """By the ordinary batched way: `ModelInfer`."""
    answer = await post(front, "/v2/models/identity/generate_stream", {"INPUT0": 1})
    assert events(answer) == [{"OUTPUT0": 1.0, "model_name": "identity", "model_version": "1"}]
    answer = await post(front, "/v2/models/identity/generate", {"INPUT0": 1})
    assert answer.json == {"OUTPUT0": 1.0, "model_name": "identity", "model_version": "1"}
    assert (front.fake.rpc_counts["ModelInfer"], front.fake.rpc_counts["ModelStreamInfer"]) == (2, 0)


@pytest.mark.parametrize("num_responses", [0, 1, 3])
async def test_generate_takes_exactly_one(front: Front, num_responses: int) -> None:
    """400 for none and for several, which are read to the end and not cancelled; no events for none."""
    front.fake.models["repeat"].num_responses = num_responses
    answer = await post(front, f"{REPEAT}/generate", {"INPUT0": 1})
    assert answer.status == (200 if num_responses == 1 else 400)
    assert num_responses == 1 or "generate_stream" in answer.json["error"]
    assert front.plane.statistics().num_cancelled == 0
    assert len(events(await post(front, f"{REPEAT}/generate_stream", {"INPUT0": 1}))) == num_responses


@pytest.mark.parametrize("form", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("path", "document", "status"),
    [
        (REPEAT, b"{", 400),
        (REPEAT, {}, 400),
        (REPEAT, {"INPUT0": "x"}, 400),
        (REPEAT, {"INPUT0": 1, "other": None}, 400),
        ("/v2/models/nothing", {"INPUT0": 1}, 404),
        (f"{REPEAT}/versions/9", {"INPUT0": 1}, 404),
    ],
)
async def test_errors_before_the_first_response_are_statuses(
    front: Front, form: str, path: str, document: object, status: int
) -> None:
    """The V2 error form, whichever of the two was asked."""
    answer = await post(front, f"{path}/{form}", document)
    assert (answer.status, list(answer.json)) == (status, ["error"])


async def test_an_error_between_responses_is_an_event(front: Front) -> None:
    """After what was good; at the very beginning it is a status."""
    front.fake.models["repeat"].fail_after = 2
    answer = await post(front, f"{REPEAT}/generate_stream", {"INPUT0": 1})
    assert answer.status == 200
    assert events(answer)[2:] == [{"error": "model 'repeat' failed: no more than 2 responses"}]
    front.fake.models["repeat"].fail_after = 0
    assert (await post(front, f"{REPEAT}/generate_stream", {"INPUT0": 1})).status == 500


@pytest.mark.parametrize("form", ["generate", "generate_stream"])
async def test_a_client_that_leaves_stops_the_work(front: Front, form: str) -> None:
    """The call to Triton is cancelled, nothing is left counted."""
    front.fake.freeze()
    leave = asyncio.Event()
    app = http_app(front.plane, LIMITS)
    task = asyncio.ensure_future(request(app, "POST", f"{REPEAT}/{form}", b'{"INPUT0": 1}', leave=leave))
    await front.fake.wait_for_active(1)
    leave.set()
    await front.fake.wait_until(lambda: front.fake.num_cancelled == 1)
    with pytest.raises(RuntimeError, match="StopIteration"):  # of the helper: nothing was answered
        await task
    assert front.plane.statistics().num_running == 0
    assert front.router.statistics().num_active == 0


async def test_a_client_that_takes_nothing_makes_triton_wait(front: Front) -> None:
    """Responses are asked for one by one, as the client takes their events."""
    front.fake.models["repeat"].num_responses = 2000
    gate, sent = asyncio.Event(), []

    async def on_send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 3:
            await gate.wait()

    app = http_app(front.plane, LIMITS)
    body = orjson.dumps({"INPUT0": [1.0] * 16384})
    leave = asyncio.Event()
    path = f"{REPEAT}/generate_stream"
    task = asyncio.ensure_future(request(app, "POST", path, body, leave=leave, on_send=on_send))
    before = -1
    while before != front.fake.num_streamed or len(sent) < 3:
        before = front.fake.num_streamed
        await asyncio.sleep(0.1)
    assert front.fake.num_streamed < 1000
    leave.set()
    await front.fake.wait_for_active(0)
    assert (await task).status == 200


async def test_too_many_streams_are_refused(front: Front) -> None:
    """429 beyond `max_streams`, and room again when they end."""
    front.fake.freeze()
    tasks = [asyncio.ensure_future(post(front, f"{REPEAT}/generate_stream", {"INPUT0": 1})) for _ in range(2)]
    await front.fake.wait_for_active(2)
    assert (await post(front, f"{REPEAT}/generate_stream", {"INPUT0": 1})).status == 429
    front.fake.thaw()
    assert [len(events(await task)) for task in tasks] == [3, 3]
    assert (await post(front, f"{REPEAT}/generate_stream", {"INPUT0": 1})).status == 200


async def test_the_budget_of_the_request(front: Front) -> None:
    """504 for a first response that does not come in time."""
    front.fake.freeze()
    answer = await post(front, f"{REPEAT}/generate_stream", {"INPUT0": 1}, x_request_timeout_seconds="0.1")
    assert answer.status == 504
    answer = await post(front, f"{REPEAT}/generate", {"INPUT0": 1}, x_request_timeout_seconds="0.1")
    assert answer.status == 504
