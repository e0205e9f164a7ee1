"""The models that a server is to have in each of its lives, and how far it has them in this one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from serve_app.errors import ServeAppError
from serve_app.fleet.loaded_models import LoadedModels

logger = logging.getLogger(__name__)

UNAVAILABLE = "UNAVAILABLE"
"""State of a model that is wanted and that the server does not know."""


class WantedModels:
    """Names of models with the config that each was given, over all lives of one server.

    Attributes:
        loaded: The models of this life; `None` between two lives.
    """

    def __init__(self) -> None:
        self.loaded: LoadedModels | None = None
        self._configs: dict[str, str | None] = {}
        self._num_healed = 0

    def __len__(self) -> int:
        return len(self._configs)

    def __repr__(self) -> str:
        return f"Models: {len(self)} wanted, {self.num_ready} ready, {self.num_healed} healed"

    @property
    def num_ready(self) -> int:
        """Wanted models that are ready."""
        return sum(self.loaded.is_ready(name) for name in self._configs) if self.loaded else 0

    @property
    def num_healed(self) -> int:
        """Models loaded again since their stub had died, over all lives."""
        return self._num_healed + (self.loaded.num_healed if self.loaded else 0)

    @property
    def at_start(self) -> list[str]:
        """Those that a server loads as it starts: the others come with a config of their own."""
        return [name for name, config in self._configs.items() if config is None]

    def want(self, names: Iterable[str]) -> None:
        """Want these, with the repository's configs, and no others."""
        self._configs = dict.fromkeys(names)

    def config_of(self, name: str) -> str | None:
        """The config that a model was given; `None` for the repository's."""
        return self._configs.get(name)

    async def begin_life(self, loaded: LoadedModels) -> None:
        """Load what came with a config of its own on a server that has become ready, and read all states.

        Raises:
            ServeAppError: The server does not answer.
        """
        for name, config in self._configs.items():
            if config is not None:
                try:
                    await loaded.load(name, config)
                except ServeAppError as problem:
                    logger.error("model %r could not be loaded again with its config: %s", name, problem)
        await loaded.refresh()
        self.loaded = loaded
        for state in loaded.states:
            if state.name in self._configs and state.reason and not loaded.is_ready(state.name):
                logger.error("model %r did not load: %s", state.name, state.reason)

    def end_life(self) -> None:
        """What that life had loaded is gone with it."""
        self._num_healed, self.loaded = self.num_healed, None

    async def load(self, loaded: LoadedModels, name: str, config: str | None) -> None:
        """Load a model, and want it; errors as in `LoadedModels.load`."""
        if config is None and self._configs.get(name) is not None:
            # A plain load of a loaded model changes nothing, so that it would keep its config.
            await loaded.unload(name)
        await loaded.load(name, config)
        self._configs[name] = config

    async def unload(self, loaded: LoadedModels, name: str) -> None:
        """Want a model no longer, and unload it; errors as in `LoadedModels.unload`."""
        self._configs.pop(name, None)
        await loaded.unload(name)

    def statistics(self) -> dict[str, Any]:
        """States and reasons, as JSON types."""
        states = self.loaded.states if self.loaded else ()
        known = {state.name: state.state or UNAVAILABLE for state in reversed(states)}
        reasons = {state.name: state.reason for state in states if state.reason and state.reason != "unloaded"}
        return {
            "num_healed": self.num_healed,
            "num_stubs": self.loaded.num_stubs if self.loaded else 0,
            "models": {name: known.get(name, UNAVAILABLE) for name in self._configs},
            "reasons": reasons | (self.loaded.given_up if self.loaded else {}),
        }
