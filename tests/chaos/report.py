"""What a fault did to the callers, as a row, and whether that is what is promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from tests.chaos.traffic import Ended, Outcome, errors_by_kind


@dataclass(frozen=True)
class Promise:
    """What callers may see of a fault.

    Attributes:
        is_hidden: Nothing at all but right answers: a replica and a server survive.
        recovery_s: Last bad answer after the fault, at most.
        may_lose: Answers may break off: what holds the connections dies.
    """

    is_hidden: bool = True
    recovery_s: float = 5.0
    may_lose: bool = False


@dataclass(frozen=True)
class Row:
    """One fault and what was seen of it.

    Attributes:
        fault: Its name.
        times: How often it was injected.
        counts: Requests by outcome.
        errors: Errors by kind.
        recovery_s: From the fault to the end of the last request that was not answered, or took over a second.
    """

    fault: str
    times: int
    counts: Counter[Outcome]
    errors: Counter[str]
    recovery_s: float

    @property
    def num_requests(self) -> int:
        """All of them."""
        return sum(self.counts.values())


SLOW_S = 1.0
"""An answer that took longer counts as one that the fault has held up."""


def row_of(fault: str, ended: Sequence[Ended], *, times: int, began_at: float, over_at: float) -> Row:
    """The row of a fault.

    Args:
        fault: Its name.
        ended: Requests that ended since it began.
        times: How often it was injected.
        began_at: When, on the callers' clock.
        over_at: When its cause was gone: recovery is counted from here.
    """
    bad = [one.ended_at for one in ended if one.outcome is not Outcome.OK or one.ended_at - one.began_at > SLOW_S]
    counts = Counter(one.outcome for one in ended)
    recovery_s = max(max(bad, default=began_at) - over_at, 0.0)
    return Row(fault, times, counts, errors_by_kind(list(ended)), recovery_s)


def broken_promises(row: Row, promise: Promise, *, load_factor: float = 1.0) -> list[str]:
    """What was promised and did not hold.

    Args:
        row: What was seen.
        promise: What was promised.
        load_factor: How many times more than its CPUs the machine has to do; recovery is work, and takes as long.
    """
    never = [Outcome.WRONG, Outcome.CROSSED, Outcome.HUNG]
    if not promise.may_lose:
        never.append(Outcome.LOST)
    if promise.is_hidden:
        never.append(Outcome.TYPED)
    broken = [f"{row.counts[outcome]} {outcome.value}" for outcome in never if row.counts[outcome]]
    if row.recovery_s > promise.recovery_s * max(load_factor, 1.0):
        broken.append(f"recovery took {row.recovery_s:.1f} s, not {promise.recovery_s:.0f} s")
    if not row.counts[Outcome.OK]:
        broken.append("nothing was answered")
    return broken


def table_of(rows: Sequence[tuple[Row, list[str]]]) -> Table:
    """All rows, as they are printed."""
    table = Table("Fault", "Times", "Requests", "Lost", "Wrong", "Crossed", "Hung", "Typed errors", "Recovery", "")
    for row, broken in rows:
        kinds = ", ".join(f"{count} {kind}" for kind, count in row.errors.most_common(3))
        table.add_row(
            row.fault,
            str(row.times),
            f"{row.num_requests:,}",
            *(str(row.counts[kind]) for kind in (Outcome.LOST, Outcome.WRONG, Outcome.CROSSED, Outcome.HUNG)),
            f"{row.counts[Outcome.TYPED]}" + (f" ({kinds})" if kinds else ""),
            f"{row.recovery_s:.1f} s",
            "; ".join(broken) or "as promised",
            style="red" if broken else None,
        )
    return table
