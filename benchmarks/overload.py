"""`python -m benchmarks.overload`: five times what a model can do, and what that does to another model.

The model sleeps, so its capacity does not depend on this machine: eight rows each tenth of a second. It is measured all
the same, by callers who wait for their answers; the ratios are those of one run. The load generator shares the machine
with what it measures. Starts what it needs, on ports of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.closed_loop import closed_loop
from benchmarks.open_loop import Crowd, open_loop, percentile_ms
from tests.support.stack import Stack

SLOW_MS = 100.0
SLOW, OTHER = "/v2/models/slow/infer", "/v2/models/digits/infer"
TIMES = 5
WAIT_S = 1.0
"""Longest wait for an answer that the slow model's queue allows."""

DIGITS = orjson.dumps(
    {"inputs": [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [float(n % 17) for n in range(64)]}]}
)


def slow_body(number: int) -> bytes:
    """A request of the slow model that is like no other."""
    data = [SLOW_MS, float(number)]
    return orjson.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": data}]})


def is_slow_answer(number: int, body: bytes) -> bool:
    """Whether an answer is that request's own."""
    return bool(orjson.loads(body)["outputs"][0]["data"][1] == float(number))


async def crowd_of_slow(stack: Stack, *, rate: float, seconds: float, headers: str = "") -> Crowd:
    """The slow model's crowd."""
    return await open_loop(stack.http, SLOW, slow_body, is_slow_answer, rate=rate, seconds=seconds, headers=headers)


async def crowd_of_other(stack: Stack, *, rate: float, seconds: float) -> Crowd:
    """The other model's."""
    return await open_loop(stack.http, OTHER, lambda _: DIGITS, lambda *_: True, rate=rate, seconds=seconds)


async def configure(stack: Stack, *, max_wait_s: float | None) -> None:
    """Put a bound on the slow model's wait in force, or none."""
    models: dict[str, Any] = {"slow": {"queue": {"max_wait_s": max_wait_s}}} if max_wait_s else {}
    await asyncio.to_thread(stack.configure, {"models": models})


def add_row(table: Table, what: str, crowd: Crowd, capacity: float | None) -> None:
    """One crowd's row."""
    table.add_row(
        what,
        f"{crowd.num_sent / crowd.seconds:.0f}",
        f"{crowd.goodput:.1f}",
        "" if capacity is None else f"{crowd.goodput / capacity:.2f}",
        str(crowd.statuses[200]),
        str(crowd.statuses[429]),
        str(crowd.statuses[503]),
        str(crowd.num_strange + crowd.num_wrong + crowd.num_hung),
        f"{percentile_ms(crowd.accepted_s, 0.5):.0f}",
        f"{percentile_ms(crowd.accepted_s, 0.99):.0f}",
        f"{percentile_ms(crowd.refused_s, 0.99):.0f}",
    )


async def measure_overload(stack: Stack, table: Table, *, seconds: float) -> float:
    """Capacity, then five times as much, once bounded by the queue's setting and once by the callers' budgets."""
    await configure(stack, max_wait_s=WAIT_S)
    closed = await closed_loop(stack.http, SLOW, slow_body(0), num_connections=32, seconds=seconds)
    capacity = closed.requests_per_s
    table.add_row(
        "capacity: 32 who wait for their answers", "", f"{capacity:.1f}", "1.00", "", "", "", str(closed.num_errors),
        f"{closed.percentile_ms(0.5):.0f}", f"{closed.percentile_ms(0.99):.0f}", "",
    )  # fmt: skip
    for what, max_wait_s, headers in (
        (f"{TIMES} times as much, max_wait_s {WAIT_S:g}", WAIT_S, ""),
        (f"{TIMES} times as much, budgets of {WAIT_S:g} s", None, f"X-Request-Timeout-Seconds: {WAIT_S:g}\r\n"),
    ):
        await configure(stack, max_wait_s=max_wait_s)
        before = await asyncio.to_thread(stack.triton_statistics, "slow")
        crowd = await crowd_of_slow(stack, rate=TIMES * capacity, seconds=seconds, headers=headers)
        done = (await asyncio.to_thread(stack.triton_statistics, "slow")) - before
        add_row(table, what, crowd, capacity)
        table.add_row(f"  rows that Triton ran for it: {done.num_rows}", *[""] * 10)
    return capacity


async def measure_neighbour(
    stack: Stack, table: Table, *, capacity: float, rate: float, rounds: int, seconds: float
) -> float:
    """The other model alone and beside the flood, in turn; the ratio of the medians of its p99."""
    await configure(stack, max_wait_s=WAIT_S)
    alone: list[Crowd] = []
    beside: list[Crowd] = []
    await crowd_of_other(stack, rate=rate, seconds=2.0)
    for _ in range(rounds):
        alone.append(await crowd_of_other(stack, rate=rate, seconds=seconds))
        flood = asyncio.create_task(crowd_of_slow(stack, rate=TIMES * capacity, seconds=seconds + 1.0))
        await asyncio.sleep(0.5)
        beside.append(await crowd_of_other(stack, rate=rate, seconds=seconds))
        await flood
    for what, crowds in (("digits alone", alone), ("digits beside the flood", beside)):
        for crowd in crowds:
            add_row(table, what, crowd, None)
    medians = [
        statistics.median(percentile_ms(crowd.accepted_s, 0.99) for crowd in crowds) for crowds in (alone, beside)
    ]
    return medians[1] / medians[0]


async def measure(stack: Stack, options: argparse.Namespace, table: Table) -> float:
    """All of it."""
    capacity = await measure_overload(stack, table, seconds=options.seconds)
    return await measure_neighbour(
        stack, table, capacity=capacity, rate=options.rate, rounds=options.rounds, seconds=options.seconds
    )


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of the other model, alone and beside the flood")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second of the other model")
    options = parser.parse_args()
    console = Console(width=160)
    columns = (
        "crowd",
        "asked/s",
        "good/s",
        "of capacity",
        "200",
        "429",
        "503",
        "else",
        "p50 ms",
        "p99 ms",
        "429 p99 ms",
    )
    table = Table(title="slow: 8 rows in 100 ms; HTTP, one row a request", title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "crowd" else "right")
    folder, run_dir = Path(tempfile.mkdtemp(prefix="bench-")), Path(f"/tmp/sb-{os.getpid()}")
    stack = Stack(folder, run_dir=run_dir)
    try:
        with console.status("starting serve_app"):
            stack.start()
            assert stack.handle is not None
        with console.status("measuring"):
            ratio = asyncio.run(measure(stack, options, table))
        console.print(table)
        console.print(f"p99 of digits beside the flood: {ratio:.2f} times that of digits alone (medians)")
    finally:
        stack.close_clients()
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
