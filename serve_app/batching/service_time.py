"""How long a model's batches take lately, and so how long what waits will wait."""

from __future__ import annotations

from collections import deque

_WEIGHT, _WEIGHT_OF_LESS = 0.1, 0.3
"""Of the newest batch. The mean follows a change within about twenty batches, and one for the better within seven: a
request that was let in too soon waits, but one that was refused for a trouble long over is lost. Batches with nothing
behind them weigh as those that got slower: they are quick because the model is idle."""

_RECENT = 16
"""Batches of which the quickest is taken for what can be hoped for."""


class ServiceTime:
    """Duration and size of batches, newer ones weighing more.

    What is measured is capacity and not demand: a rate of answers would call an idle model slow.
    """

    def __init__(self) -> None:
        self._duration_s = 0.0
        self._num_rows = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, num_rows: int, duration_s: float, *, was_pressed: bool) -> None:
        """Note a batch that was answered.

        Args:
            num_rows: Rows in it.
            duration_s: From sending it to its answer, in seconds; Triton's own queue is part of it.
            was_pressed: Whether more was waiting when it was closed, so that it was as large as it could be.
        """
        weight = _WEIGHT_OF_LESS if was_pressed else _WEIGHT
        self._duration_s = _mean(self._duration_s, duration_s, weight_of_less=weight)
        self._recent.append(duration_s)
        if was_pressed:
            self._num_rows = _mean(self._num_rows, float(num_rows))

    def wait_s(self, num_rows_ahead: int, *, num_permits: int, max_batch_rows: int) -> float:
        """Most seconds until a request is answered that has so many rows before it; 0 while nothing is known.

        Little's law: `num_permits` batches are under way at once and each takes the mean duration, so that one ends
        each `num_permits`th part of it; those before the request's own have to end, and then its own has to run. At
        most, because the first of them may just have begun: who is told that there is time has to have it.

        Args:
            num_rows_ahead: Waiting rows that go first.
            num_permits: Batches that may be under way at once.
            max_batch_rows: Size of a batch while no full one has been seen.
        """
        rows_per_batch = self._num_rows or float(max_batch_rows)
        num_batches = num_rows_ahead // rows_per_batch + 1
        return self._duration_s * (1.0 + num_batches / num_permits)

    def note_longer(self, duration_s: float) -> None:
        """Note a batch that was given up after so long: it would have taken longer.

        Without these only batches that were quick enough would count, and a model that is too slow for its callers
        would look quicker than it is, and be given more than it can do.
        """
        if duration_s > self._duration_s > 0.0:
            self._duration_s = _mean(self._duration_s, duration_s)
            self._recent.append(duration_s)

    @property
    def shortest_s(self) -> float:
        """How long the quickest of the last batches took; 0 while nothing is known."""
        return min(self._recent, default=0.0)


def _mean(old: float, new: float, *, weight_of_less: float = _WEIGHT_OF_LESS) -> float:
    return new if old == 0.0 else old + (_WEIGHT if new > old else weight_of_less) * (new - old)
