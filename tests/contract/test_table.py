"""The contract: every row of the table gets the same answer, or class of error, from us and from a real Triton."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tritonclient.grpc import service_pb2

from tests.contract import matrix, servers, table
from tests.contract.asking import Server
from tests.contract.case import HANDLE, WAYS, Case
from tests.contract.differences import SHOWN_ELSEWHERE, documented
from tests.support import echo_models, golden
from tests.support.stack import ROOT, Stack
from tests.support.waiting import wait_until_sync

SETTINGS = {"default": {"batching": {"mode": "serve_batch"}, "timeout_s": 30}}


@dataclass(frozen=True)
class Contract:
    """Both sides, and what they said."""

    results: dict[str, matrix.Result]
    ours: Server
    truth: servers.Truth


@pytest.fixture(scope="module")
def contract(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contract]:
    """The whole table asked of the product, which loads the models it lacks by its own call, and of a server alone."""
    stack.scale_fleet(1)
    stack.configure(SETTINGS)
    repository = tmp_path_factory.mktemp("contract")
    servers.write_repository(repository)
    added = [folder.name for folder in repository.iterdir() if not (stack.repository / folder.name).exists()]
    ours = Server(stack.http, stack.grpc, stack.client.infer)
    try:
        with servers.triton_itself(repository) as truth:
            for name in sorted(added, key=lambda name: name in ("ensemble", "bls")):  # these two need another one
                shutil.copytree(repository / name, stack.repository / name)
                ours.ask_grpc("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name=name))
            with truth.connect() as theirs:
                results = matrix.run(table.USABLE, ours, theirs)
            yield Contract({result.row.name: result for result in results}, ours, truth)
    finally:
        for name in added:
            ours.ask_grpc("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name=name))
            shutil.rmtree(stack.repository / name, ignore_errors=True)
        ours.close()


@pytest.mark.integration
@pytest.mark.parametrize("name", [row.name for row in table.USABLE])
def test_answers_like_triton_or_as_documented(contract: Contract, name: str) -> None:
    """By every way in that can carry the case: the same answer, the same status, or the documented difference."""
    assert contract.results[name].faults() == []


@pytest.mark.integration
def test_recorded_answers_are_what_the_server_says(contract: Contract) -> None:
    """The file that the unit tests compare with says what a server says today."""
    with contract.truth.connect() as theirs:
        cases = [case for case in table.CODEC_CASES if case in table.USABLE]
        now, recorded = golden.record(theirs.http, theirs.grpc, cases), golden.load()
    assert now.models == recorded.models
    assert [case.name for case in table.CODEC_CASES] == list(recorded.answers)
    assert [name for name in now.answers if now.answers[name] != recorded.answers[name]] == []


def test_the_table_is_large_and_reaches_every_way_in() -> None:
    """At least 150 cases, each with a name of its own, many of them by every way in."""
    counts = Counter(row.name for row in table.ROWS)
    assert [name for name, count in counts.items() if count > 1] == []
    assert len(table.ROWS) >= 150
    ways = Counter(way for row in table.ROWS for way in matrix.ways_of(row))
    assert set(ways) == set(WAYS)
    assert min(ways.values()) >= 150
    assert ways[HANDLE] >= 150


def test_the_table_and_the_document_name_the_same_differences() -> None:
    """Each difference that a case shows is documented with its reason, and each that is documented is shown."""
    rows = documented()
    used = {row.difference for row in table.ROWS if row.difference}
    assert used | set(SHOWN_ELSEWHERE) == set(rows)
    assert used & set(SHOWN_ELSEWHERE) == set()
    assert all(difference.why and difference.here for difference in rows.values())
    assert all((ROOT / path).is_file() for path in SHOWN_ELSEWHERE.values())


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Truth]:
    """A server that may end, with the one model that the cases for it ask."""
    repository = tmp_path_factory.mktemp("lone")
    echo_models.write_echo_models(repository)
    for folder in repository.iterdir():
        if folder.name != "echo1":
            shutil.rmtree(folder)
    with servers.triton_itself(repository) as truth:
        yield truth


@pytest.mark.integration
@pytest.mark.parametrize("name", [row.name for row in table.USABLE if isinstance(row, Case) and row.ends_triton])
def test_what_ends_triton_does_not_end_it_through_us(contract: Contract, lone: servers.Truth, name: str) -> None:
    """A server that is asked directly ends; ours, behind us, has answered the whole table with this case in it."""
    wait_until_sync(lambda: lone.num_ready > 0, timeout_s=60, what="the server")
    num_ready = lone.num_ready
    with lone.connect() as theirs:
        assert not matrix.ask_as_written(theirs, contract.results[name].row).is_ok
    wait_until_sync(lambda: lone.num_ready > num_ready, timeout_s=60, what="its next start")
    assert matrix.is_live(contract.ours)
