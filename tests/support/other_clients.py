"""Clients of others in `.venv/clients`, run as processes: the KServe client and perf_analyzer."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.fleet.install import installed_release, runtime_roots
from tests.support.stack import ROOT

CLIENTS = Path(sys.prefix) / "clients" / "bin"
NOT_INSTALLED = f"{CLIENTS} is missing or incomplete: run `make install-dev`"


def kserve_answers(http: str, grpc: str) -> dict[str, Any]:
    """What every call of the KServe client gives, by name; see `tests/clients/kserve_calls.py`."""
    assert (CLIENTS / "python").exists(), NOT_INSTALLED
    command = [str(CLIENTS / "python"), "-I", str(ROOT / "tests" / "clients" / "kserve_calls.py"), http, grpc]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@dataclass(frozen=True)
class Measured:
    """What perf_analyzer says of its measurement.

    Attributes:
        num_requests: Requests answered, as it counted them itself.
        requests_per_s: Throughput.
        responses_per_s: Of decoupled models; the same as `requests_per_s` for others.
        num_rows: Rows that the model's statistics, asked of the same address, grew by meanwhile.
        columns: The line of its CSV, by heading.
        output: All that it printed.
    """

    num_requests: int
    requests_per_s: float
    responses_per_s: float
    num_rows: int
    columns: Mapping[str, str]
    output: str


def _link_libraries(folder: Path) -> None:
    """Two libraries that perf_analyzer needs and Debian may lack; they come with the Triton runtime."""
    releases = [release for root in runtime_roots() if (release := installed_release(root)) is not None]
    assert releases, "the Triton runtime is not installed: run `make install`"
    libraries = releases[0] / "nvidia_pytriton.libs"
    for name, pattern in (("libb64.so.0d", "libb64-*.so.0d"), ("libcudart.so.12", "libcudart-*.so.12*")):
        (folder / name).symlink_to(next(libraries.glob(pattern)))


def perf_analyzer(folder: Path, model: str, address: str, *options: str, num_requests: int) -> Measured:
    """Run perf_analyzer and read what it says.

    Args:
        folder: Empty; for its files.
        model: The model.
        address: Of HTTP, or of gRPC with `-i grpc` among the options.
        options: More options.
        num_requests: As many are sent, no more.

    Raises:
        AssertionError: It did not end well, which it does not when one request fails; with all that it printed.
    """
    binary = CLIENTS / "perf_analyzer"
    assert binary.exists(), NOT_INSTALLED
    table = folder / "measured.csv"
    command = [str(binary), "-m", model, "-u", address, "-f", str(table), f"--request-count={num_requests}", *options]
    _link_libraries(folder)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    with table.open() as lines:
        (columns,) = csv.DictReader(lines)
    throughput = _number(r"Throughput: ([\d.]+) infer/sec", output)
    is_streamed = "Response Throughput" in output
    return Measured(
        num_requests=int(_number(r"Request count: (\d+)", output)),
        requests_per_s=throughput,
        responses_per_s=_number(r"Response Throughput: ([\d.]+)", output) if is_streamed else throughput,
        num_rows=int(_number(r"Server:\s+Inference count: (\d+)", output)),
        columns=columns,
        output=output,
    )


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern!r} in:\n{text}"
    return float(found[1])
