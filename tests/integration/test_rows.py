"""Nobody gets another's rows, one bad request hurts nobody, and no ModelInfer is larger than the model allows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.support.stack import Stack

pytestmark = pytest.mark.integration

MODES = ("serve_batch", "continuous")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, stack: Stack) -> str:
    """Both ways in which requests come together, put in force by a deploy that restarts nothing."""
    chosen: str = request.param
    stack.configure({"default": {"batching": {"mode": chosen}}})
    return chosen


async def infer(session: aiohttp.ClientSession, stack: Stack, model: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with session.post(f"http://{stack.http}/v2/models/{model}/infer", json=body) as answer:
        return answer.status, await answer.json()


def identity_request(values: np.ndarray[Any, Any], name: str = "INPUT0") -> dict[str, Any]:
    return {
        "inputs": [{"name": name, "shape": list(values.shape), "datatype": "FP32", "data": values.ravel().tolist()}]
    }


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=200), timeout=aiohttp.ClientTimeout(total=120), json_serialize=_dumps
    )


def _dumps(document: Any) -> str:
    import orjson

    return orjson.dumps(document).decode()


async def test_two_thousand_requests_get_their_own_rows(stack: Stack, mode: str) -> None:
    """1 to 40 rows, three row lengths, unique values, `max_batch_size: 8`: whole, in order, and never more than 8."""
    before = stack.triton_statistics("identity")
    rng = random.Random(7)
    payloads = []
    for index in range(2000):
        rows = rng.choice((1, 1, 1, 2, 3, 5, 7, 8, 9, 16, 40))
        length = rng.choice((1, 4, 16))
        payloads.append(index + np.arange(rows * length, dtype=np.float32).reshape(rows, length) / 1024)
    async with session() as client:
        answers = await asyncio.gather(
            *(infer(client, stack, "identity", identity_request(values)) for values in payloads)
        )
    for values, (status, document) in zip(payloads, answers, strict=True):
        assert status == 200, document
        (output,) = document["outputs"]
        assert output["shape"] == list(values.shape)
        np.testing.assert_array_equal(np.array(output["data"], np.float32).reshape(values.shape), values)
    num_rows = sum(values.shape[0] for values in payloads)
    sent = stack.sent_since(before, "identity", num_rows=num_rows)
    assert sent.num_rows == num_rows
    assert sent.largest_batch <= 8, sent
    one_by_one = sum(-(-values.shape[0] // 8) for values in payloads)
    assert sent.num_requests < 0.9 * one_by_one, "rows of different requests did not share ModelInfers"


async def test_mixed_datatypes_and_outputs_at_the_same_time(stack: Stack, mode: str) -> None:
    """Requests that cannot share a batch run side by side, each answered with what it asked for."""
    kinds = {"FP32": np.float32, "INT8": np.int8, "UINT16": np.uint16, "INT64": np.int64, "FP64": np.float64}

    async def one(client: aiohttp.ClientSession, index: int) -> None:
        names = random.Random(index).sample(sorted(kinds), k=1 + index % 3)
        wanted = names[: 1 + index % len(names)]
        rows = 1 + index % 4
        inputs = [
            {
                "name": f"IN_{name}",
                "shape": [rows, 3],
                "datatype": name,
                "data": [(index + n) % 120 for n in range(rows * 3)],
            }
            for name in names
        ]
        body = {"id": str(index), "inputs": inputs, "outputs": [{"name": f"OUT_{name}"} for name in wanted]}
        status, document = await infer(client, stack, "echo", body)
        assert status == 200, document
        assert document["id"] == str(index)
        assert [output["name"] for output in document["outputs"]] == [f"OUT_{name}" for name in wanted]
        for output in document["outputs"]:
            assert output["shape"] == [rows, 3]
            assert output["data"] == [(index + n) % 120 for n in range(rows * 3)]

    async with session() as client:
        await asyncio.gather(*(one(client, index) for index in range(400)))


GOOD = np.array([[1.0, 2.0]], np.float32)
NAN = float("nan")
BAD_REQUESTS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "data of a wrong length": (
        "picky",
        {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0, 3.0]}]},
        400,
        "inputs[0]",
    ),
    "a wrong datatype": (
        "picky",
        {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}]},
        400,
        "FP32",
    ),
    "a wrong name": ("picky", identity_request(GOOD, name="INPUT9"), 400, "INPUT0"),
    "a backend that raises": ("picky", identity_request(np.array([[666.0, 1.0]], np.float32)), 500, "666"),
    "too many rows for an unbatched model": (
        "unbatched",
        identity_request(np.zeros((2, 2), np.float32)),
        400,
        "[2, 2]",
    ),
}


@pytest.mark.parametrize("kind", BAD_REQUESTS)
async def test_one_bad_of_sixty_four(stack: Stack, mode: str, kind: str) -> None:
    """63 right answers and one clear error that names what was wrong."""
    model, bad, expected_status, named = BAD_REQUESTS[kind]
    await sixty_three_and(stack, model, lambda client: infer(client, stack, model, bad), expected_status, named)


async def test_one_nan_of_sixty_four(stack: Stack, mode: str) -> None:
    """A value that the model itself refuses; JSON has no NaN, so it comes as binary data."""
    head = b'{"inputs":[{"name":"INPUT0","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}]}'
    body = head + np.array([[NAN, 1.0]], "<f4").tobytes()

    async def bad(client: aiohttp.ClientSession) -> tuple[int, Any]:
        headers = {"Inference-Header-Content-Length": str(len(head))}
        async with client.post(f"http://{stack.http}/v2/models/picky/infer", data=body, headers=headers) as answer:
            return answer.status, await answer.json()

    await sixty_three_and(stack, "picky", bad, 400, "NaN is refused")


async def sixty_three_and(stack: Stack, model: str, bad: Any, expected_status: int, named: str) -> None:
    async with session() as client:
        good = [np.array([[index + 1.0, 2.0]], np.float32) for index in range(63)]
        calls: list[Awaitable[tuple[int, Any]]] = [infer(client, stack, model, identity_request(v)) for v in good]
        calls.insert(31, bad(client))
        answers = list(await asyncio.gather(*calls))
    status, document = answers.pop(31)
    assert status == expected_status, document
    assert named in document["error"]
    assert "\n" not in document["error"]
    assert "Traceback" not in document["error"]
    for values, (good_status, good_document) in zip(good, answers, strict=True):
        assert good_status == 200, good_document
        assert good_document["outputs"][0]["data"] == values.ravel().tolist()
