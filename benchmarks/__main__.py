"""`make bench`: one model, one row a request, JSON over HTTP; serve_app beside Triton's own HTTP endpoint, in turn.

Starts what it needs, on ports of its own, and prints a table with the ratios. The load generator shares the machine
with what it measures, so ratios are to be trusted and absolute rates are not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shutil
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import orjson
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.closed_loop import Measurement, closed_loop
from tests.support.stack import ROOT, Stack
from tests.support.triton_server import running_triton

BODY = orjson.dumps(
    {
        "inputs": [
            {"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [float(n % 17) for n in range(64)]}
        ],
        "outputs": [{"name": "label"}],
    }
)
PATH = "/v2/models/digits/infer"
Results = dict[tuple[str, int], list[Measurement]]
"""What each system, at each number of connections, did in each round."""

TRITON, OURS = "Triton's HTTP", "serve_app, {mode}"
MODES = ("serve_batch", "continuous")


async def measure(stack: Stack, *, connections: list[int], rounds: int, seconds: float) -> Results:
    """All systems in turn, `rounds` times, for each number of connections."""
    results: Results = defaultdict(list)
    async with running_triton(ROOT / "model_repository", args={"models": ["digits"], "allow_http": True}) as server:
        address = f"127.0.0.1:{http_port_of(server.statistics()['pid'])}"
        for num_connections in connections:
            for _ in range(rounds):
                run = await closed_loop(address, PATH, BODY, num_connections=num_connections, seconds=seconds)
                results[TRITON, num_connections].append(run)
                for mode in MODES:
                    await asyncio.to_thread(stack.configure, {"default": {"batching": {"mode": mode}}})
                    run = await closed_loop(stack.http, PATH, BODY, num_connections=num_connections, seconds=seconds)
                    results[OURS.format(mode=mode), num_connections].append(run)
    return results


def http_port_of(pid: int) -> int:
    """The port of a tritonserver's own HTTP endpoint, from its command line."""
    arguments = psutil.Process(pid).cmdline()
    return next(int(argument.split("=")[1]) for argument in arguments if argument.startswith("--http-port="))


def report(results: Results, console: Console) -> None:
    """A table: medians over the rounds, and the ratio of each rate to Triton's in the same run."""
    table = Table(title="digits, one row a request, JSON over HTTP, keep-alive", title_justify="left")
    for column in ("system", "in flight", "req/s", "of Triton's", "p50 ms", "p99 ms", "errors"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for (system, num_connections), runs in sorted(results.items(), key=lambda item: (item[0][1], item[0][0] != TRITON)):
        rate = statistics.median(run.requests_per_s for run in runs)
        triton = statistics.median(run.requests_per_s for run in results[TRITON, num_connections])
        table.add_row(
            system,
            str(num_connections),
            f"{rate:.0f}",
            f"{rate / triton:.2f}",
            f"{statistics.median(run.percentile_ms(0.5) for run in runs):.1f}",
            f"{statistics.median(run.percentile_ms(0.99) for run in runs):.1f}",
            str(sum(run.num_errors for run in runs)),
        )
    console.print(table)
    console.print(
        f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}; medians of "
        f"{len(next(iter(results.values())))} rounds, systems in turn; the load generator runs on the same CPUs."
    )


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured in each round, after one of warm-up")
    options = parser.parse_args()
    console = Console()
    folder, run_dir = Path(tempfile.mkdtemp(prefix="bench-")), Path(f"/tmp/sb-{os.getpid()}")
    stack = Stack(folder, run_dir=run_dir)
    try:
        with console.status("starting serve_app"):
            stack.start()
            assert stack.handle is not None
        with console.status("measuring"):
            results = asyncio.run(
                measure(stack, connections=options.connections, rounds=options.rounds, seconds=options.seconds)
            )
        report(results, console)
    finally:
        stack.close_clients()
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
