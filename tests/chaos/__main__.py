"""`make chaos`: faults under steady load, one after another, and a table of what callers saw; `make soak`: for long.

Needs Linux 5.6 and the rights over its own processes. Ends with status 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.report import Row, broken_promises, row_of, table_of
from tests.chaos.soak import Soak
from tests.chaos.system import ChaosStack, load_factor
from tests.chaos.traffic import SETTLED, SteadyLoad
from tests.support.waiting import wait_until

console = Console(width=180)


async def inject(stack: ChaosStack, load: SteadyLoad, fault: Fault) -> Row:
    """Do a fault to a whole system under load, wait until it is whole again, and tell what callers saw."""
    began_at = time.monotonic()
    async with fault.hold(stack):
        await asyncio.sleep(fault.hold_s)
    over_at = time.monotonic() if fault.hold_s and not fault.promise.is_hidden else began_at
    await wait_until(stack.is_whole, timeout_s=120, what=lambda: f"a whole system after {fault.name}")
    whole_at = time.monotonic()
    await wait_until(lambda: load.is_answered_since(whole_at, each=SETTLED), timeout_s=120)
    return row_of(fault.name, load.record.since(began_at), times=1, began_at=began_at, over_at=over_at)


def merged(rows: list[Row]) -> Row:
    """Several rows of one fault as one, with the longest recovery."""
    first, *others = rows
    for row in others:
        counts, errors = first.counts + row.counts, first.errors + row.errors
        first = Row(row.fault, first.times + row.times, counts, errors, max(first.recovery_s, row.recovery_s))
    return first


async def chaos(stack: ChaosStack, faults: list[Fault], *, times: int) -> list[tuple[Row, list[str]]]:
    """Every fault, `times` each."""
    table: list[tuple[Row, list[str]]] = []
    async with SteadyLoad(stack.http, stack.grpc) as load:
        await wait_until(lambda: load.is_answered_since(0.0), timeout_s=60)
        for fault in faults:
            rows = []
            for _ in range(times):
                rows.append(await inject(stack, load, fault))
            row = merged(rows)
            broken = broken_promises(row, fault.promise, load_factor=load_factor())
            table.append((row, broken))
            console.print(f"{row.fault}: {row.num_requests:,} requests, {'; '.join(broken) or 'as promised'}")
    return table


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--times", type=int, default=1, help="how often each fault is injected")
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    parser.add_argument("--without", default=[], action="append", help="no faults whose name has this in it")
    parser.add_argument("--soak-min", type=float, default=0.0, help="minutes of load with a fault every 20 s instead")
    return parser.parse_args()


def main() -> int:
    """Start the product, do all that, stop it."""
    args = parsed()
    faults = [
        fault for fault in FAULTS if args.only in fault.name and not any(word in fault.name for word in args.without)
    ]
    folder, run_dir = Path(tempfile.mkdtemp(prefix="serve-app-chaos-")), Path(f"/tmp/sx-{os.getpid()}")
    stack = ChaosStack(folder, run_dir=run_dir)
    try:
        stack.start()
        if args.soak_min:
            soak = Soak(stack, [fault for fault in faults if fault.is_for_soak])
            broken = asyncio.run(soak.run(minutes=args.soak_min))
            console.print(soak.table())
            console.print(*broken, sep="\n")
            return 1 if broken else 0
        rows = asyncio.run(chaos(stack, faults, times=args.times))
    finally:
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(run_dir, ignore_errors=True)
    console.print(table_of(rows))
    return 1 if any(broken for _, broken in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
