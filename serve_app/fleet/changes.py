"""What clients have loaded and unloaded at run time, for servers that start later. Pure, as `leases`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.errors import RequestTooLarge

MAX_CHANGES = 1024
"""Models whose last change is kept."""

MAX_REGIONS = 1024
"""Shared memory regions that clients may have registered at a time."""

MAX_FORGOTTEN = 256
"""Regions that were unregistered and are kept all the same, for servers and replicas that have missed it."""

REGION_PREFIX = "region/"
"""Before the name of a shared memory region where a model's name would stand, which never has a slash."""

MAX_BYTES = 256 * 1024 * 1024
"""Bytes of all changes together; uploaded model files are part of them."""


@dataclass(frozen=True, slots=True)
class Change:
    """The last load or unload of one model, or the last registration of one shared memory region.

    Attributes:
        number: Grows with every change of any model or region.
        model_name: The model; a region's name behind `REGION_PREFIX`.
        rpc_name: `RepositoryModelLoad` or `RepositoryModelUnload`; `SystemSharedMemoryRegister` or
            `SystemSharedMemoryUnregister`.
        message: Its request message, serialized.
        place: Where the servers are that it is for (`Endpoint.place`); empty for all.
    """

    number: int
    model_name: str
    rpc_name: str
    message: bytes
    place: str = ""

    @property
    def region(self) -> str:
        """Name of the region; empty for a model."""
        return self.model_name.removeprefix(REGION_PREFIX) if self.model_name.startswith(REGION_PREFIX) else ""

    @property
    def is_end_of_region(self) -> bool:
        """Whether it unregisters one."""
        return self.rpc_name == "SystemSharedMemoryUnregister"


class ChangeTable:
    """The last change of each model.

    Args:
        max_changes: Models in it.
        max_bytes: Bytes of all messages.
    """

    def __init__(self, *, max_changes: int = MAX_CHANGES, max_bytes: int = MAX_BYTES) -> None:
        self._max_changes = max_changes
        self._max_bytes = max_bytes
        self._changes: dict[str, Change] = {}
        self.number = 0

    def __repr__(self) -> str:
        return f"<ChangeTable number {self.number}: {len(self._changes)} models, {self.size_bytes} bytes>"

    @property
    def size_bytes(self) -> int:
        """Bytes of all messages."""
        return sum(len(change.message) for change in self._changes.values())

    def check(self, model_name: str, size_bytes: int) -> None:
        """Whether one more change fits.

        Raises:
            RequestTooLarge: Too many models, or too many bytes.
        """
        if model_name.startswith(REGION_PREFIX):
            registered = [c for c in self._changes.values() if c.region and not c.is_end_of_region]
            if len(registered) >= MAX_REGIONS and not any(c.model_name == model_name for c in registered):
                raise RequestTooLarge("shared memory regions", len(registered) + 1, MAX_REGIONS, "regions")
            return
        others = [c for c in self._changes.values() if c.model_name != model_name and not c.region]
        if len(others) >= self._max_changes:
            raise RequestTooLarge("models changed at run time", len(others) + 1, self._max_changes, "models")
        size = size_bytes + sum(len(change.message) for change in others)
        if size > self._max_bytes:
            raise RequestTooLarge("changes of models at run time", size, self._max_bytes)

    def record(self, rpc_name: str, model_name: str, message: bytes, *, after: int = 0, place: str = "") -> Change:
        """Enter a change in place of the model's last one.

        Args:
            rpc_name: See `Change`.
            model_name: See `Change`.
            message: See `Change`.
            after: A number given before, which a table that was started anew may not know.
            place: See `Change`.

        Raises:
            RequestTooLarge: See `check`.
        """
        change = Change(max(self.number, after) + 1, model_name, rpc_name, message, place)
        if not change.is_end_of_region:
            self.check(model_name, len(message))
        self.take([change])
        return change

    def after(self, number: int) -> tuple[Change, ...]:
        """The changes with a higher number, oldest first."""
        return tuple(sorted((c for c in self._changes.values() if c.number > number), key=lambda c: c.number))

    def take(self, changes: Iterable[Change]) -> None:
        """Enter changes that another table has numbered, where they are newer than what is known of their model."""
        for change in changes:
            if change.number > self.number_of(change.model_name):
                self._changes[change.model_name] = change
                self.number = max(self.number, change.number)
        ended = sorted((c.number, c.model_name) for c in self._changes.values() if c.is_end_of_region)
        for _, name in ended[:-MAX_FORGOTTEN]:
            del self._changes[name]

    def has(self, model_name: str) -> bool:
        """Whether the model was changed."""
        return model_name in self._changes

    def number_of(self, model_name: str) -> int:
        """Number of the model's last change; 0 when there is none."""
        change = self._changes.get(model_name)
        return 0 if change is None else change.number

    def statistics(self) -> dict[str, int]:
        """Counts of now."""
        return {"number": self.number, "models": len(self._changes), "size_bytes": self.size_bytes}
