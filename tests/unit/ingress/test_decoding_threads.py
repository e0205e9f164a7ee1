"""Large JSON is decoded beside the event loop, few at a time, and no longer than somebody waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import orjson
import pytest

from serve_app.errors import InvalidRequest
from serve_app.ingress.http_app import http_app
from serve_app.ingress.large_json import LargeJsonDecoder
from serve_app.protocol.large_json import is_large
from serve_app.triton.fake import FakeModel
from tests.support.asgi import request
from tests.support.front import LIMITS, running_front
from tests.support.waiting import wait_until


class Work:
    """Something that goes on until it is told to end.

    Attributes:
        ended: Whether it is over.
        is_enough: Set to end it.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.is_enough = threading.Event()

    def __call__(self, on_piece: Callable[[], None]) -> str:
        try:
            while not self.is_enough.is_set():
                on_piece()
            return "done"
        finally:
            self.ended.set()


async def test_the_event_loop_goes_on() -> None:
    """Only it can end the work here."""
    work, decoder = Work(), LargeJsonDecoder()
    task = asyncio.ensure_future(decoder.run(work))
    await wait_until(lambda: decoder.statistics()["running"] == 1, timeout_s=30)
    work.is_enough.set()
    assert await task == "done"
    assert repr(decoder) == "<LargeJsonDecoder 0 running, 0 waiting>"


async def test_work_that_nobody_waits_for_ends() -> None:
    """A caller that is cancelled takes its thread with it, and the next one finds a place."""
    work, decoder = Work(), LargeJsonDecoder(max_at_once=1)
    task = asyncio.ensure_future(decoder.run(work))
    await wait_until(lambda: decoder.statistics()["running"] == 1, timeout_s=30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(work.ended.wait, 30)
    assert await decoder.run(lambda on_piece: 1) == 1


async def test_no_more_than_so_many_at_once() -> None:
    """The others wait, and may leave while they do."""
    works, decoder = [Work() for _ in range(4)], LargeJsonDecoder(max_at_once=2)
    tasks = [asyncio.ensure_future(decoder.run(work)) for work in works]
    await wait_until(lambda: decoder.statistics() == {"running": 2, "waiting": 2}, timeout_s=30)
    tasks[3].cancel()
    await asyncio.wait([tasks[3]])
    assert decoder.statistics() == {"running": 2, "waiting": 1}
    for work in works:
        work.is_enough.set()
    assert await asyncio.gather(*tasks[:3]) == ["done"] * 3
    assert not works[3].ended.is_set()
    assert decoder.statistics() == {"running": 0, "waiting": 0}


async def test_errors_come_out() -> None:
    """As they were raised."""

    def decode(on_piece: Callable[[], None]) -> None:
        raise InvalidRequest("body", "this", "that")

    with pytest.raises(InvalidRequest, match="this"):
        await LargeJsonDecoder().run(decode)


async def test_large_json_over_http() -> None:
    """By `infer` and `generate`: the model gets the numbers, the caller gets 400 for a wrong one and 413 for a name."""
    values = np.arange(60_000, dtype=np.float32) / 8
    head = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 60_000]}
    async with running_front(FakeModel()) as front:
        app = http_app(front.plane, LIMITS)

        async def post(call: str, document: object) -> tuple[int, dict[str, object]]:
            body = orjson.dumps(document)
            assert is_large(len(body))
            path = f"/v2/models/identity/{call}"
            answer = await request(app, "POST", path, body, leave=asyncio.Event())
            return answer.status, answer.json

        numbers = values.tolist()
        status, answer = await post("infer", {"inputs": [head | {"data": [numbers]}]})
        assert status == 200
        assert answer["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 60_000], "data": numbers}]
        status, answer = await post("generate", {"INPUT0": numbers})
        assert (status, answer["OUTPUT0"]) == (200, numbers)
        numbers[59_999] = True
        status, answer = await post("infer", {"inputs": [head | {"data": [numbers]}]})
        assert status == 400
        assert str(answer["error"]).startswith("inputs[0].data[0][59999]: got a boolean, expected a number")
        status, answer = await post("infer", {"inputs": [head | {"name": "x" * 300_000, "data": [[]]}]})
        assert status == 413
        assert "the limit is 262144 bytes" in str(answer["error"])
