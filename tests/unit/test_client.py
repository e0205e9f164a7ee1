"""The client over a handle that is none of Ray's: threads, loops, callbacks and closing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serve_app.client import InferFuture, ModelClient
from serve_app.errors import EndpointUnavailable, PoolClosed, RequestCancelled, Unsupported
from serve_app.protocol.messages import Arrays
from tests.support.waiting import wait_until_sync

INPUTS = {"x": np.zeros(1)}


class Response:
    """Gives its arrays back, raises, or never ends."""

    def __init__(self, arrays: Arrays, ending: Exception | None, *, is_endless: bool) -> None:
        self._arrays, self._ending, self._is_endless = arrays, ending, is_endless

    def __await__(self) -> Generator[Any, None, Arrays]:
        if self._is_endless:
            Handle.num_endless += 1
            yield from asyncio.get_running_loop().create_future()
        if self._ending is not None:
            raise self._ending
        return self._arrays

    def cancel(self) -> None: ...


class Handle:
    """A handle of the `models` app."""

    ending: Exception | None = None
    is_endless = False
    num_endless = 0

    @property
    def infer(self) -> Handle:
        return self

    def options(self, **options: object) -> Handle:
        return self

    def remote(self, model_name: str, arrays: Arrays, **options: object) -> Response:
        return Response(arrays, self.ending, is_endless=self.is_endless)


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """The handles that were asked for."""
    made: list[Handle] = []

    def get_app_handle(name: str) -> Handle:
        made.append(Handle())
        return made[-1]

    monkeypatch.setattr(serve, "get_app_handle", get_app_handle)
    return made


def test_each_loop_has_a_handle_of_its_own(handles: list[Handle]) -> None:
    """A loop that was made where an ended one lay in memory does not get that one's handle, which is dropped."""
    client = ModelClient()
    for _ in range(20):
        asyncio.run(client.ainfer("m", INPUTS))
        gc.collect()
    assert len(handles) == 20
    assert len(client._handles) == 1


@pytest.mark.usefixtures("handles")
def test_a_request_that_meets_closing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client closed in the middle of `submit` gives it a future that ends, or refuses it; nothing hangs."""
    client = ModelClient()
    assert client.infer("m", INPUTS) == INPUTS
    hand_over = asyncio.run_coroutine_threadsafe
    closing = threading.Thread(target=client.close)

    def close_first(call: Any, loop: asyncio.AbstractEventLoop) -> concurrent.futures.Future[Any]:
        closing.start()
        closing.join(0.2)
        return hand_over(call, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", close_first)
    future = client.submit("m", INPUTS)
    assert concurrent.futures.wait([future], timeout=5.0).done
    closing.join()
    with pytest.raises(PoolClosed):
        client.submit("m", INPUTS)


@pytest.mark.usefixtures("handles")
def test_infer_in_a_callback_is_refused_and_submit_works() -> None:
    """A callback runs in the thread that brings the answers: waiting there would be for ever."""
    seen: concurrent.futures.Future[InferFuture] = concurrent.futures.Future()
    ready = threading.Event()

    def ask_again(future: InferFuture) -> None:
        ready.wait(5.0)
        with pytest.raises(Unsupported, match="infer in a callback"):
            client.infer("m", INPUTS)
        seen.set_result(client.submit("m", INPUTS))

    with ModelClient() as client:
        future = client.submit("m", INPUTS, callback=ask_again)
        ready.set()
        assert future.result(5.0) == INPUTS
        assert seen.result(5.0).result(5.0) == INPUTS


@pytest.mark.usefixtures("handles")
def test_a_callback_cannot_end_the_client(caplog: pytest.LogCaptureFixture) -> None:
    """Not even with `sys.exit`: it is logged, and the next request is answered."""
    ready = threading.Event()

    def leave(future: InferFuture) -> None:
        ready.wait(5.0)
        raise SystemExit

    with ModelClient() as client:
        future = client.submit("m", INPUTS, callback=leave)
        ready.set()
        assert future.result(5.0) == INPUTS
        assert client.submit("m", INPUTS).result(5.0) == INPUTS
    assert "a callback of an inference request raised" in caplog.text


@pytest.mark.parametrize("error", [RayError("lost"), RayServeException("no such app\nand a trace")])
def test_errors_of_ray_are_ours(handles: list[Handle], monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """What Ray raises for reasons of its own is one line of one class."""
    monkeypatch.setattr(Handle, "ending", error)
    with ModelClient() as client, pytest.raises(EndpointUnavailable, match=rf"app 'models': {type(error).__name__}"):
        client.infer("m", INPUTS)
    assert len(handles) == 1


@pytest.mark.usefixtures("handles")
def test_closing_cancels_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits in `infer` hears of it, and every callback is called."""
    monkeypatch.setattr(Handle, "is_endless", True)
    monkeypatch.setattr(Handle, "num_endless", 0)
    called = threading.Event()
    client = ModelClient()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.infer, "m", INPUTS)
        future = client.submit("m", INPUTS, callback=lambda done: called.set())
        wait_until_sync(lambda: Handle.num_endless == 2, timeout_s=30)
        client.close()
        assert future.cancelled()
        assert called.wait(5.0)
        with pytest.raises(RequestCancelled):
            waiting.result(5.0)
