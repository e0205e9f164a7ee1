"""The models of one server life: loads and unloads them, and heals the ones whose python stub died.

Triton 24.10 never restarts a dead stub and goes on calling its model ready, while each request to it takes a second
and fails. The cure is to unload and load the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from serve_app.clock import Clock
from serve_app.errors import ServeAppError
from serve_app.fleet.guard import remove_files
from serve_app.fleet.preflight import SHARED_MEMORY
from serve_app.fleet.probe import READY, ModelState, ServerProbe
from serve_app.fleet.restart import RestartState, decide_restart
from serve_app.fleet.stubs import Stub, find_stubs, is_running, model_of, num_instances
from serve_app.settings import RestartSettings

logger = logging.getLogger(__name__)

LOOK_S = 0.4
"""Pause between two looks at the known stubs, which cost one small file read each."""

REFRESH_S = 5.0
"""Pause between two looks for stubs and models that others loaded."""

CALL_TIMEOUT_S = 10.0
"""For calls that do not load anything."""


@dataclass(slots=True)
class _Healing:
    """What earlier deaths of one model's stubs leave behind."""

    state: RestartState
    healed_at: float


class LoadedModels:
    """Models and stubs of one running server.

    Args:
        probe: Calls to the server.
        server_pid: Its process id.
        settings: Backoff and limit of healing one model, as for restarts of the server.
        load_timeout_s: How long one model may take to load.
        grace_s: How long stubs of a version that is being unloaded may go on with what they run.
        config_of: The config override in force for a model, if it has one.
        clock: Monotonic clock.
    """

    def __init__(
        self,
        probe: ServerProbe,
        server_pid: int,
        *,
        settings: RestartSettings,
        load_timeout_s: float,
        grace_s: float,
        config_of: Callable[[str], str | None],
        clock: Clock,
    ) -> None:
        self.states: tuple[ModelState, ...] = ()
        self.num_healed = 0
        self.given_up: dict[str, str] = {}
        self._probe = probe
        self._server_pid = server_pid
        self._settings = settings
        self._load_timeout_s = load_timeout_s
        self._grace_s = grace_s
        self._config_of = config_of
        self._clock = clock
        self._stubs: dict[int, tuple[Stub, str]] = {}
        self._lingering: set[int] = set()
        self._suspects: set[str] = set()
        self._groups: dict[str, list[str]] = {}
        self._healings: dict[str, _Healing] = {}
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        ready = sum(state.state == READY for state in self.states)
        return (
            f"<LoadedModels: {ready} of {len(self.states)} ready, {len(self._stubs)} stubs, {self.num_healed} healed>"
        )

    @property
    def num_stubs(self) -> int:
        """Stubs that are watched."""
        return len(self._stubs)

    def is_ready(self, name: str) -> bool:
        """Whether a version of the model was ready at the last look."""
        return any(state.name == name and state.state == READY for state in self.states)

    async def load(self, name: str, config: str | None = None) -> None:
        """Load a model; errors as in `ServerProbe.load`."""
        async with self._lock:
            await self._probe.load(name, config=config, timeout_s=self._load_timeout_s)
            self.given_up.pop(name, None)
            await self._refresh()

    async def unload(self, name: str) -> None:
        """Unload a model; errors as in `ServerProbe.unload`."""
        async with self._lock:
            # Its stubs are about to end as they should; one that takes its time must not be taken for one of the
            # next load.
            ending = [pid for pid, (_, model) in self._stubs.items() if model == name]
            for pid in ending:
                del self._stubs[pid]
            self._lingering.update(ending)
            await self._probe.unload(name, timeout_s=self._load_timeout_s)
            await self._refresh()

    async def refresh(self) -> None:
        """Read the models' states, and find the stubs that are new. Errors as in `ServerProbe.models`."""
        async with self._lock:
            await self._refresh()

    async def watch(self) -> str:
        """Look after the stubs until the server itself has to be restarted.

        Returns:
            Why.
        """
        refreshed_at = self._clock.now()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if self._suspects or any(not is_running(pid, self._server_pid) for pid in self._stubs):
                    async with self._lock:
                        for name in await self._dead_models():
                            await self._heal(name)
                if self._clock.now() - refreshed_at >= REFRESH_S:
                    await self.refresh()
                    refreshed_at = self._clock.now()
            except _HealFailed as problem:
                return str(problem)
            except ServeAppError as problem:
                # Whether the server still answers is watched elsewhere.
                logger.info("looking at the models of tritonserver failed: %s", problem)

    async def _refresh(self) -> None:
        self.states = tuple(await self._probe.models(timeout_s=CALL_TIMEOUT_S))
        living = await asyncio.to_thread(find_stubs, self._server_pid)
        pids = {stub.pid for stub in living}
        self._lingering &= pids
        fresh = [stub for stub in living if stub.pid not in self._stubs and stub.pid not in self._lingering]
        if not fresh:
            return
        self._groups = {}
        for name in dict.fromkeys(state.name for state in self.states if state.state == READY):
            with contextlib.suppress(ServeAppError):  # Unloaded meanwhile.
                config = await self._probe.model_config(name, timeout_s=CALL_TIMEOUT_S)
                self._groups[name] = [group.name for group in config.instance_group]
        for stub in fresh:
            # A stub of no ready model belongs to one that is being loaded, or is there to complete a config.
            if (model := model_of(stub, self._groups)) is not None:
                self._stubs[stub.pid] = (stub, model)

    async def _dead_models(self) -> list[str]:
        """Models that have lost a stub although they are ready.

        A stub that ends is no loss by itself: a client may have loaded the model again, with the same config or with
        one of fewer instances or of groups with other names, and then the older stubs end once the newer ones run. So
        a model that has lost one is suspect until it has as many as it has instances.
        """
        for pid in [pid for pid in self._stubs if not is_running(pid, self._server_pid)]:
            self._suspects.add(self._stubs.pop(pid)[1])
        lost: list[str] = []
        for attempt in range(2):
            if attempt:  # Somebody else may be reloading the model just now.
                await asyncio.sleep(LOOK_S / 2)
            await self._refresh()
            living = await asyncio.to_thread(find_stubs, self._server_pid)
            current = [stub for stub in living if stub.pid not in self._lingering]
            missing = {name: await self._num_missing(name, current) for name in self._suspects}
            self._suspects -= {name for name, count in missing.items() if count == 0}
            lost = [name for name, count in missing.items() if count > 0]
            if not lost:
                break
        self._suspects -= set(lost)
        return lost

    async def _num_missing(self, name: str, living: Iterable[Stub]) -> int:
        """How many stubs a model lacks; negative while older ones are about to end, 0 for one that is not ready."""
        if not self.is_ready(name):
            return 0
        try:
            config = await self._probe.model_config(name, timeout_s=CALL_TIMEOUT_S)
        except ServeAppError:  # Unloaded meanwhile.
            return 0
        self._groups[name] = [group.name for group in config.instance_group]
        return num_instances(config) - sum(model_of(stub, self._groups) == name for stub in living)

    async def _heal(self, name: str) -> None:
        """Unload and load a model that lost a stub.

        Raises:
            _HealFailed: Only a restart of the server is left.
        """
        now = self._clock.now()
        before = self._healings.get(name, _Healing(RestartState(), now))
        decision = decide_restart(self._settings, before.state, lived_s=now - before.healed_at)
        others = [stub for stub, model in self._stubs.values() if model == name]
        logger.warning("a python stub of model %r died; loading the model again", name)
        was_ready = {state.name for state in self.states if state.state == READY}
        try:
            configs = await self._configs(was_ready | {name})
            await self._probe.unload(name, timeout_s=CALL_TIMEOUT_S)
            self._end_later(others)
            if decision.backoff_s is None:
                self.given_up[name] = f"its python stub died {before.state.num_restarts + 1} times in a row"
                logger.error("model %r stays unloaded: %s", name, self.given_up[name])
                return
            await asyncio.sleep(decision.backoff_s)
            await self._load_again(name, configs.get(name))
            await self._refresh()
            for other in was_ready - {name}:  # Ensembles are unloaded with a model that they are made of.
                if not self.is_ready(other):
                    await self._load_again(other, configs.get(other))
            await self._refresh()
        except ServeAppError as problem:
            raise _HealFailed(name, str(problem)) from problem
        self._healings[name] = _Healing(decision.state, self._clock.now())
        self.num_healed += 1

    async def _configs(self, names: Iterable[str]) -> dict[str, Any]:
        """The configs in force."""
        configs = {}
        for name in names:
            with contextlib.suppress(ServeAppError):  # Unloaded meanwhile.
                configs[name] = await self._probe.model_config(name, timeout_s=CALL_TIMEOUT_S)
        return configs

    async def _load_again(self, name: str, before: Any) -> None:
        """Load a model with the config that was in force, which a client may have given it past its supervisor.

        Only where the repository's config differs: a model that is loaded with a config of its own no longer follows
        the repository's. Errors as in `ServerProbe.load`.
        """
        own = self._config_of(name)
        await self._probe.load(name, config=own, timeout_s=self._load_timeout_s)
        if own is not None or before is None:
            return
        if await self._probe.model_config(name, timeout_s=CALL_TIMEOUT_S) != before:
            config = json_format.MessageToJson(before, preserving_proto_field_name=True)
            await self._probe.load(name, config=config, timeout_s=self._load_timeout_s)

    def _end_later(self, stubs: Iterable[Stub]) -> None:
        """Have the stubs of a version that Triton will never finish unloading end after a grace period."""
        for stub in stubs:
            self._stubs.pop(stub.pid, None)
            self._lingering.add(stub.pid)
            asyncio.get_running_loop().call_later(self._grace_s, end_stub, stub, self._server_pid)


class _HealFailed(Exception):
    """A model could not be loaded again after its stub died."""

    def __init__(self, model_name: str, reason: str) -> None:
        super().__init__(model_name, reason)
        self.model_name, self.reason = model_name, reason

    def __str__(self) -> str:
        return f"model {self.model_name!r} could not be loaded again after its python stub died: {self.reason}"


def end_stub(stub: Stub, server_pid: int) -> None:
    """Kill a stub that is still a child of its server, and remove its shared memory."""
    if is_running(stub.pid, server_pid):
        with contextlib.suppress(OSError):
            os.kill(stub.pid, signal.SIGKILL)
        remove_files("", [str(SHARED_MEMORY / stub.shm_name)])
