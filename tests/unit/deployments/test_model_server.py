"""The replica's methods as Ray Serve calls them, without Ray."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from serve_app.clock import MonotonicClock
from serve_app.dataplane import DataPlane
from serve_app.deployments.model_server import ModelServer
from serve_app.protocol.messages import InferRequest
from serve_app.protocol.tensor import Tensor
from serve_app.runner import ModelRunner
from serve_app.settings import ChannelSettings, LimitSettings, ModelServerConfig
from serve_app.triton.fake import FakeTriton
from serve_app.triton.router import Router


class Replica(ModelServer):
    """Without the `__del__` that Ray Serve awaits, for Python does not."""

    def __del__(self) -> None:  # type: ignore[override]  # as said
        pass


async def call_as_serve_does(method: Callable[..., Any], *args: object) -> None:
    """Coroutines on the replica's loop, plain methods in a thread."""
    if inspect.iscoroutinefunction(method):
        await method(*args)
    else:
        await asyncio.to_thread(method, *args)


async def test_settings_change_in_place_while_requests_wait() -> None:
    """A new `user_config` meets requests in the queue on their own loop, and all of them are answered."""
    clock = MonotonicClock()
    request = InferRequest("identity", [Tensor.from_numpy("INPUT0", np.zeros((1, 4), np.float32))])
    async with (
        FakeTriton() as fake,
        Router(ChannelSettings(), clock=clock) as router,
        DataPlane(
            router,
            lambda spec, settings: ModelRunner(
                spec,
                settings,
                send=lambda request, timeout_s: router.infer(request, timeout_s=timeout_s),
                num_endpoints=lambda: router.num_endpoints,
                limits=LimitSettings(),
                clock=clock,
            ),
            config=ModelServerConfig(),
            clock=clock,
        ) as plane,
    ):
        router.update([fake.endpoint])
        await plane.infer(request)
        fake.freeze()
        waiting = [asyncio.create_task(plane.infer(request)) for _ in range(64)]
        await fake.wait_for_active(2)
        replica = object.__new__(Replica)
        replica._plane = plane
        config = {"default": {"batching": {"max_batch_rows": 2}}}
        await call_as_serve_does(replica.reconfigure, config)
        assert plane.config.default.batching.max_batch_rows == 2
        fake.thaw()
        assert len(await asyncio.gather(*waiting)) == 64
