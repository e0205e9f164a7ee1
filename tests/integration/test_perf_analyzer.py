"""perf_analyzer, unchanged: it describes, measures and counts our address as it does Triton's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.other_clients import perf_analyzer
from tests.support.stack import Stack

pytestmark = pytest.mark.integration

NUM_REQUESTS = 120
SHAPE = "--shape=INPUT0:24"
# Name: model, interface, rows in a request, responses to one, more options.
RUNS: dict[str, tuple[str, str, int, int, tuple[str, ...]]] = {
    "http": ("digits", "http", 1, 1, ("--concurrency-range=4",)),
    "http, rows and a shape": ("identity", "http", 3, 1, ("-b", "3", SHAPE, "--concurrency-range=4")),
    "http, JSON": ("digits", "http", 1, 1, ("--input-tensor-format=json", "--output-tensor-format=json")),
    "http, calls that do not wait": ("digits", "http", 1, 1, ("--async", "--concurrency-range=4")),
    "grpc": ("digits", "grpc", 1, 1, ("--concurrency-range=4",)),
    "grpc, rows and a shape": ("identity", "grpc", 3, 1, ("-b", "3", SHAPE, "--concurrency-range=4")),
    "grpc, packed": ("digits", "grpc", 1, 1, ("--grpc-compression-algorithm=gzip",)),
    "grpc, streaming": ("identity", "grpc", 1, 1, ("--streaming", "--async", SHAPE, "--concurrency-range=4")),
    "grpc, streaming of a decoupled model": ("repeat", "grpc", 1, 3, ("--streaming", "--async")),
}


@pytest.fixture(autouse=True, scope="module")
def one_server(stack: Stack) -> None:
    """What is counted is the sum over the servers of the moment; let none come or go meanwhile."""
    stack.scale_fleet(1)


@pytest.mark.parametrize("run", RUNS)
def test_it_measures_our_model(stack: Stack, tmp_path: Path, run: str) -> None:
    """No request fails; it counts what it sent, and the model's statistics grow by exactly that, from where it looks
    and from where Triton is."""
    model, interface, num_rows, num_responses, options = RUNS[run]
    if model == "repeat":
        (tmp_path / "input.json").write_text('{"data": [{"COUNT": [3], "DELAY_MS": [0]}]}')
        options = (*options, f"--input-data={tmp_path / 'input.json'}")
    address = stack.grpc if interface == "grpc" else stack.http
    before = stack.triton_statistics(model)
    measured = perf_analyzer(tmp_path, model, address, "-i", interface, *options, num_requests=NUM_REQUESTS)
    assert measured.num_requests == NUM_REQUESTS
    assert measured.requests_per_s > 0
    assert float(measured.columns["Inferences/Second"]) > 0
    assert measured.responses_per_s == pytest.approx(num_responses * measured.requests_per_s, rel=0.01)
    sent = stack.sent_since(before, model, num_rows=NUM_REQUESTS * num_rows)
    assert sent.num_rows == NUM_REQUESTS * num_rows
    # Triton counts a request after it has answered it, so the last ones may not be in what perf_analyzer read.
    assert 0 < measured.num_rows <= NUM_REQUESTS * num_rows
