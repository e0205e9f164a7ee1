"""The Python client: futures that always end, timeouts that cancel, errors as they were raised, large tensors."""

from __future__ import annotations

import asyncio
import logging
import threading

import numpy as np
import pytest

from serve_app.client import InferFuture, ModelClient
from serve_app.errors import (
    DeadlineExceeded,
    ModelNotFound,
    PoolClosed,
    RequestCancelled,
    TensorDatatypeMismatch,
    TensorNameMismatch,
    TensorShapeMismatch,
)
from tests.support.stack import Stack
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

ONE = np.ones((1, 2), np.float32)


def slow(milliseconds: float) -> dict[str, np.ndarray[tuple[int, int], np.dtype[np.float32]]]:
    return {"INPUT0": np.full((1, 2), milliseconds, np.float32)}


def test_errors_arrive_as_they_were_raised(stack: Stack) -> None:
    """Our own types, with their fields, not Ray's wrapper around a traceback."""
    with pytest.raises(ModelNotFound) as unknown:
        stack.client.infer("nothing", {"x": ONE})
    assert unknown.value.model_name == "nothing"
    with pytest.raises(TensorNameMismatch):
        stack.client.infer("identity", {"INPUT9": ONE})
    with pytest.raises(TensorDatatypeMismatch):
        stack.client.infer("identity", {"INPUT0": np.ones((1, 2), np.int64)})
    with pytest.raises(TensorShapeMismatch):
        stack.client.infer("digits", {"pixels": np.ones((1, 63), np.float32)})


def test_a_timeout_cancels_the_request(stack: Stack) -> None:
    """The budget ends the call and the request with it; the model is free again for the next."""
    with pytest.raises(DeadlineExceeded):
        stack.client.infer("slow", slow(3000.0), timeout_s=0.3)
    assert stack.client.infer("slow", slow(1.0))["OUTPUT0"].shape == (1, 2)


async def test_cancelling_the_await_cancels_the_request(stack: Stack) -> None:
    """Nothing runs on in the replica for a caller that has gone."""
    task = asyncio.create_task(stack.client.ainfer("slow", slow(1000.0)))
    await wait_until(lambda: running(stack) == 1, timeout_s=10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until(lambda: running(stack) == 0, timeout_s=10)


def running(stack: Stack) -> int:
    count: int = stack.model_server_statistics()["plane"].num_running
    return count


def test_callbacks_are_called_once_however_it_ends(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """An answer, an error, a timeout, a cancelled future and a callback that raises: one call each, none lost."""
    calls: dict[str, list[InferFuture]] = {}
    done = threading.Semaphore(0)

    def note(name: str) -> object:
        def callback(future: InferFuture) -> None:
            calls.setdefault(name, []).append(future)
            done.release()
            if name == "raises":
                raise RuntimeError("a callback with a fault")

        return callback

    with ModelClient(stack.app_name) as client, caplog.at_level(logging.ERROR, logger="serve_app.client"):
        submit = client.submit
        submit("identity", {"INPUT0": ONE}, callback=note("answer"))  # type: ignore[arg-type]  # a callable
        submit("identity", {"INPUT9": ONE}, callback=note("error"))  # type: ignore[arg-type]
        submit("slow", slow(2000.0), timeout_s=0.2, callback=note("timeout"))  # type: ignore[arg-type]
        submit("identity", {"INPUT0": ONE}, callback=note("raises"))  # type: ignore[arg-type]
        cancelled = submit("slow", slow(2000.0), callback=note("cancelled"))  # type: ignore[arg-type]
        assert cancelled.cancel()
        for _ in range(5):
            assert done.acquire(timeout=20)
    assert {name: len(futures) for name, futures in calls.items()} == dict.fromkeys(
        ("answer", "error", "timeout", "raises", "cancelled"), 1
    )
    assert calls["answer"][0].result()["OUTPUT0"].tolist() == ONE.tolist()
    assert isinstance(calls["error"][0].exception(), TensorNameMismatch)
    assert isinstance(calls["timeout"][0].exception(), DeadlineExceeded)
    assert calls["cancelled"][0].cancelled()
    assert "a callback of an inference request raised" in caplog.text


def test_closing_ends_what_is_under_way(stack: Stack) -> None:
    """Every future of a closed client is done, and its thread has ended."""
    client = ModelClient(stack.app_name)
    threads = threading.active_count()
    future = client.submit("slow", slow(5000.0))
    client.close()
    assert future.cancelled() or isinstance(future.exception(), PoolClosed)
    assert threading.active_count() == threads
    with pytest.raises(PoolClosed):
        client.submit("identity", {"INPUT0": ONE})


def test_an_interrupted_wait_is_a_cancelled_request(stack: Stack) -> None:
    """`close` from another thread ends a blocked `infer` with a typed error."""
    client = ModelClient(stack.app_name)
    timer = threading.Timer(0.3, client.close)
    timer.start()
    with pytest.raises(RequestCancelled):
        client.infer("slow", slow(5000.0))
    timer.join()
