"""Hours in minutes: load with a fault every so often, and what the product's processes hold meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

import psutil
from rich.table import Table

from tests.chaos.faults import Fault
from tests.chaos.report import broken_promises, row_of
from tests.chaos.system import ChaosStack
from tests.chaos.traffic import SETTLED, Outcome, SteadyLoad
from tests.support.waiting import wait_until

INTERVAL_S = 20.0
"""From one fault to the next."""

MAY_GROW = 1.25
"""Of the middle of the last third over the middle of the first: faults replace processes, so no sample is exact."""


@dataclass(frozen=True)
class Holdings:
    """What all processes of the product hold at one moment.

    Attributes:
        memory_bytes: Unique to them.
        num_descriptors: Open files and sockets.
        num_threads: Threads.
        num_shared: Entries of `/dev/shm`.
        num_processes: Processes.
    """

    memory_bytes: int
    num_descriptors: int
    num_threads: int
    num_shared: int
    num_processes: int


def holdings(stack: ChaosStack) -> Holdings:
    """Counted now; processes that end meanwhile count for what was seen of them."""
    memory = descriptors = threads = count = 0
    for process in stack.processes():
        try:
            memory += process.memory_full_info().uss
            descriptors += process.num_fds()
            threads += process.num_threads()
            count += 1
        except psutil.Error:
            continue
    return Holdings(memory, descriptors, threads, len(os.listdir("/dev/shm")), count)


def grown(samples: list[Holdings]) -> list[str]:
    """What the product holds more of at the end than at the beginning."""
    third = max(len(samples) // 3, 1)
    first, last = samples[:third], samples[-third:]
    broken = []
    for name in ("memory_bytes", "num_descriptors", "num_threads", "num_shared", "num_processes"):
        before = sorted(getattr(one, name) for one in first)[third // 2]
        after = sorted(getattr(one, name) for one in last)[third // 2]
        if after > before * MAY_GROW:
            broken.append(f"{name} grew from {before:,} to {after:,}")
    return broken


class Soak:
    """One long run.

    Args:
        stack: Started; borrowed.
        faults: Chosen from at random, each as often as any other.
    """

    def __init__(self, stack: ChaosStack, faults: list[Fault]) -> None:
        self._stack, self._faults = stack, faults
        self._samples: list[Holdings] = []
        self._injected: Counter[str] = Counter()
        self._outcomes: Counter[Outcome] = Counter()

    async def run(self, *, minutes: float) -> list[str]:
        """Run for that long; what was promised and did not hold."""
        ends_at, broken = time.monotonic() + minutes * 60, []
        queue: list[Fault] = []
        async with SteadyLoad(self._stack.http, self._stack.grpc) as load:
            await wait_until(lambda: load.is_answered_since(0.0), timeout_s=60)
            while time.monotonic() < ends_at:
                queue = queue or random.sample(self._faults, len(self._faults))
                fault, began_at = queue.pop(), time.monotonic()
                async with fault.hold(self._stack):
                    await asyncio.sleep(fault.hold_s)
                await asyncio.sleep(max(began_at + INTERVAL_S - time.monotonic(), 0.0))
                await wait_until(self._stack.is_whole, timeout_s=120, what=lambda: "a whole system")
                whole_at = time.monotonic()
                await wait_until(partial(load.is_answered_since, whole_at, each=SETTLED), timeout_s=120)
                seen, load.record.ended = load.record.ended, []
                over_at = began_at + (0.0 if fault.promise.is_hidden else fault.hold_s)
                row = row_of(fault.name, seen, times=1, began_at=began_at, over_at=over_at)
                broken += [f"{fault.name}: {what}" for what in broken_promises(row, fault.promise, load_factor=2.0)]
                self._injected[fault.name] += 1
                self._outcomes += row.counts
                self._samples.append(await asyncio.to_thread(holdings, self._stack))
        return broken + grown(self._samples)

    def table(self) -> Table:
        """What the processes held, from the first sample to the last."""
        table = Table("Sample", "Memory, MB", "Descriptors", "Threads", "/dev/shm", "Processes")
        for number in range(0, len(self._samples), max(len(self._samples) // 12, 1)):
            one = self._samples[number]
            table.add_row(
                str(number),
                f"{one.memory_bytes / 1e6:,.0f}",
                str(one.num_descriptors),
                str(one.num_threads),
                str(one.num_shared),
                str(one.num_processes),
            )
        table.caption = f"{dict(self._injected)}; { ({kind.value: n for kind, n in self._outcomes.items()}) }"
        return table
