"""The models a replica has in service: opened by their first request, replaced when they change in Triton."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from serve_app.clock import Clock, Deadline
from serve_app.errors import DeadlineExceeded, ModelNotFound, ModelNotReady, PoolClosed, ServeAppError
from serve_app.protocol.messages import InferRequest, InferResponse, ModelSpec
from serve_app.settings import ModelSettings

Key = tuple[str, str]
"""A model's name and version as requests give them; the version may be empty."""


class Runner(Protocol):
    """One model served by this replica. `runner.ModelRunner` is one."""

    async def infer(self, request: InferRequest, deadline: Deadline | None = None) -> InferResponse:
        """Answer one request."""
        ...

    def stream(self, request: InferRequest, deadline: Deadline | None = None) -> AsyncGenerator[InferResponse, None]:
        """Answer one request with every response that the model gives."""
        ...

    @property
    def is_pressed(self) -> bool:
        """Whether anything waits, so that one more may be too much."""
        ...

    def check_more(self, deadline: Deadline | None = None, *, priority: int) -> None:
        """Raise `Overloaded` where the smallest request of at most that priority would be refused now."""
        ...

    def reconfigure(self, settings: ModelSettings) -> None:
        """Put other settings in force."""
        ...

    def wake(self) -> None:
        """Look again at permits, because endpoints have come or gone."""
        ...

    async def aclose(self) -> None:
        """Finish what was accepted, refuse the rest."""
        ...

    def statistics(self) -> Any:
        """The runner's counts."""
        ...


@dataclass(slots=True)
class Served:
    """A model in service.

    Attributes:
        spec: As Triton described it.
        runner: Serves it; closed by `ServedModels`.
        checked_at: When `spec` was last compared with Triton's.
    """

    spec: ModelSpec
    runner: Runner
    checked_at: float


class ModelsState(Enum):
    """Life of the table."""

    OPEN = "open"
    CLOSED = "closed"


class ServedModels:
    """The table of models in service.

    The mutable state is `_served`, `_opening` (one task for each model being opened, shared by all who wait for it)
    and `_retiring` (one task for each runner that was replaced and finishes what it accepted). Comparing a spec
    with Triton's happens in the background, at most once in `refresh_s` for a model and only while it is asked for.

    Args:
        read_spec: Asks Triton for a model's spec; raises `ModelNotFound` for one that it does not have.
        open_runner: Makes the runner for a spec.
        clock: The clock that `refresh_s` is on.
        refresh_s: Age in seconds at which a spec is compared again.
    """

    def __init__(
        self,
        read_spec: Callable[[str, str], Awaitable[ModelSpec]],
        open_runner: Callable[[ModelSpec], Runner],
        *,
        clock: Clock,
        refresh_s: float = 2.0,
    ) -> None:
        self._read_spec = read_spec
        self._open_runner = open_runner
        self._clock = clock
        self._refresh_s = refresh_s
        self._state = ModelsState.OPEN
        self._served: dict[Key, Served] = {}
        self._opening: dict[Key, asyncio.Task[Served]] = {}
        self._comparing: set[asyncio.Task[None]] = set()
        self._retiring: set[asyncio.Task[None]] = set()

    async def get(self, key: Key, deadline: Deadline | None = None) -> Served:
        """The model in service, opened if need be.

        Args:
            key: Which model.
            deadline: Until when to wait for it to be opened; the opening itself goes on for the others.

        Raises:
            DeadlineExceeded: It was not open in time.
            ModelNotFound: Triton does not have it.
            Unavailable: Triton cannot be asked.
            PoolClosed: The table is closed.
        """
        served = self._served.get(key)
        if served is None:
            return await self._wait_for(key, deadline)
        if self._clock.now() - served.checked_at > self._refresh_s:
            served.checked_at = self._clock.now()  # one look at a time, however many requests come meanwhile
            task = asyncio.ensure_future(self._compare(key, served))
            self._comparing.add(task)
            task.add_done_callback(self._comparing.discard)
        return served

    def runner_of(self, name: str, version: str) -> Runner | None:
        """The runner of a model that is in service now."""
        served = self._served.get((name, version))
        return None if served is None else served.runner

    async def refresh(self, name: str) -> None:
        """Compare every version in service of a model that was just loaded or unloaded; drop it if it is not loaded."""
        found = [(key, served) for key, served in self._served.items() if key[0] == name]
        await asyncio.gather(*(self._compare(key, served, is_loaded=False) for key, served in found))

    def __iter__(self) -> Iterator[tuple[Key, Served]]:
        """All models in service."""
        return iter(list(self._served.items()))

    async def aclose(self) -> None:
        """Refuse new requests, and close every runner; each finishes what it accepted within its own bound."""
        self._state = ModelsState.CLOSED
        tasks = [*self._opening.values(), *self._comparing]
        for task in tasks:
            task.cancel()
        runners = [served.runner for served in self._served.values()]
        self._served.clear()
        closing = [*tasks, *self._retiring, *(runner.aclose() for runner in runners)]
        await asyncio.shield(asyncio.gather(*closing, return_exceptions=True))

    def __repr__(self) -> str:
        runners = "".join(f" | {served.runner!r}" for served in self._served.values())
        return f"Models: {len(self._served)} in service, {len(self._opening)} opening{runners}"

    async def _wait_for(self, key: Key, deadline: Deadline | None) -> Served:
        if self._state is ModelsState.CLOSED:
            raise PoolClosed("this replica")
        task = self._opening.get(key)
        if task is None:
            task = asyncio.ensure_future(self._open(key))
            self._opening[key] = task
            task.add_done_callback(lambda done: self._opened(key, done))
        remaining_s = None if deadline is None else max(deadline.remaining_s(now=self._clock.now()), 0.0)
        await asyncio.wait([task], timeout=remaining_s)
        if deadline is not None and not task.done():
            raise DeadlineExceeded(f"asking Triton for model {key[0]!r}", deadline.timeout_s)
        if task.cancelled():  # by `aclose`
            raise PoolClosed("this replica")
        return task.result()

    def _opened(self, key: Key, task: asyncio.Task[Served]) -> None:
        if self._opening.get(key) is task:
            del self._opening[key]
        if not task.cancelled():
            task.exception()  # every waiter may have gone: read it, or asyncio logs it as lost

    async def _open(self, key: Key) -> Served:
        spec = await self._read_spec(*key)
        served = self._served[key] = Served(spec, self._open_runner(spec), self._clock.now())
        return served

    async def _compare(self, key: Key, served: Served, *, is_loaded: bool = True) -> None:
        """Replace a model's runner if the model has changed in Triton, or drop it if it has gone.

        Args:
            key: The model.
            served: What is in service.
            is_loaded: Whether one that is not ready is about to be so again, as it is when its server restarts.
        """
        try:
            spec: ModelSpec | None = await self._read_spec(*key)
        except ModelNotFound:
            spec = None
        except ModelNotReady:
            if is_loaded:
                return
            spec = None
        except ServeAppError:
            return  # nobody to ask now: the old spec is the best there is
        if spec == served.spec or self._served.get(key) is not served:
            return
        if spec is None:
            del self._served[key]
        else:
            self._served[key] = Served(spec, self._open_runner(spec), self._clock.now())
        # In a task of its own: closing the table ends the comparing, but waits for what this runner has accepted.
        retiring = asyncio.ensure_future(served.runner.aclose())
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)
