"""Which server has the state of which sequence, as far as this process has seen it."""

from __future__ import annotations

from collections import OrderedDict

MAX_SEQUENCES = 65536
"""Sequences that are remembered; the one that was quiet longest is forgotten first."""

IDLE_S = 3600.0
"""Silence after which a sequence is forgotten; Triton itself gives up far sooner (`max_sequence_idle_microseconds`)."""


class SequenceTable:
    """Servers by model and sequence.

    Without it a server that joins would take over sequences whose state is elsewhere, since every replica chooses by
    hashing. What another replica has started is not in here; see `Delivery`.

    Args:
        max_sequences: See `MAX_SEQUENCES`.
    """

    def __init__(self, *, max_sequences: int = MAX_SEQUENCES) -> None:
        self._max_sequences = max_sequences
        self._servers: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._servers)

    def server_of(self, model_name: str, sequence_id: str, *, now: float) -> str | None:
        """Id of the server that has a sequence's state; `None` when it is not known."""
        found = self._servers.get((model_name, sequence_id))
        return found[0] if found is not None and now - found[1] < IDLE_S else None

    def keep(self, model_name: str, sequence_id: str, server_id: str, *, now: float) -> None:
        """A server has answered a request of a sequence that goes on."""
        key = (model_name, sequence_id)
        self._servers[key] = (server_id, now)
        self._servers.move_to_end(key)
        while len(self._servers) > self._max_sequences:
            self._servers.popitem(last=False)

    def forget(self, model_name: str, sequence_id: str) -> None:
        """A sequence has ended, or its state is lost."""
        self._servers.pop((model_name, sequence_id), None)

    def __repr__(self) -> str:
        return f"<SequenceTable {len(self._servers)} sequences>"
