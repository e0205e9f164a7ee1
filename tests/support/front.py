"""One replica's insides without Ray: a data plane with real runners and a real router, and a fake Triton behind it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass

from serve_app.clock import MonotonicClock
from serve_app.dataplane import ControlLog, DataPlane
from serve_app.endpoint import Endpoint
from serve_app.runner import ModelRunner
from serve_app.settings import ChannelSettings, LimitSettings, ModelServerConfig, ModelSettings
from serve_app.triton.fake import FakeModel, FakeTriton
from serve_app.triton.router import Router

LIMITS = LimitSettings()


@dataclass(frozen=True)
class Front:
    """A data plane and what is behind it."""

    plane: DataPlane
    router: Router
    fake: FakeTriton


@contextlib.asynccontextmanager
async def running_front(*models: FakeModel, settings: ModelSettings | None = None) -> AsyncIterator[Front]:
    """A front over one fake Triton that has these models."""
    async with FakeTriton(*models) as fake, running_plane(fake.endpoint, settings=settings) as (plane, router):
        yield Front(plane, router, fake)


@contextlib.asynccontextmanager
async def running_plane(
    *endpoints: Endpoint,
    settings: ModelSettings | None = None,
    limits: LimitSettings = LIMITS,
    names: Collection[str] = (),
    change_log: ControlLog | None = None,
    allow_client_shm: bool = False,
) -> AsyncIterator[tuple[DataPlane, Router]]:
    """A data plane and its router over servers that run.

    Args:
        endpoints: The servers.
        settings: Of every model.
        limits: Sizes beyond which requests are refused.
        names: Models served; empty means all.
        change_log: Where loads and unloads are kept for servers that join.
        allow_client_shm: Whether clients may have Triton map shared memory.
    """
    clock = MonotonicClock()
    async with (
        Router(ChannelSettings(), clock=clock) as router,
        DataPlane(
            router,
            lambda spec, settings: ModelRunner(
                spec,
                settings,
                send=lambda request, timeout_s: router.infer(
                    request, timeout_s=timeout_s, spec=spec, hedge_after_s=settings.hedge_after_s
                ),
                num_endpoints=lambda: router.num_endpoints,
                limits=limits,
                clock=clock,
                open_stream=lambda request, response_timeout_s, timeout_s: router.stream(
                    request, response_timeout_s=response_timeout_s, timeout_s=timeout_s
                ),
            ),
            config=ModelServerConfig(default=settings or ModelSettings()),
            models=names,
            clock=clock,
            change_log=change_log,
            allow_client_shm=allow_client_shm,
        ) as plane,
    ):
        router.update(endpoints)
        yield plane, router
