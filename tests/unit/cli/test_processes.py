"""Processes are found by their marker, and nothing else is ever touched."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.cli.processes import (
    MARKER,
    MarkedProcess,
    find_marked,
    kill_all,
    marker_of,
    remove_shared_memory,
    shared_memory_of,
)

SLEEP = "import sys, time; print('up', flush=True); time.sleep(60)"


@pytest.fixture
def prefix() -> Iterator[str]:
    prefix = f"/tmp/test-{secrets.token_hex(4)}#"
    yield prefix
    kill_all(prefix)


def start(marker: str, script: str = SLEEP, *arguments: str) -> subprocess.Popen[str]:
    """A Python process with a marker, started and past its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, MARKER: marker},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_all_processes_of_a_folder_are_found_and_killed(prefix: str) -> None:
    """Every instance of a run folder ends, children that left their parents included; others live on."""
    orphaning = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "print('up', flush=True)"
    )
    with start(prefix + "1") as first, start(prefix + "2", orphaning) as parent, start("/tmp/other#1") as other:
        parent.wait()
        assert len(found := find_marked(prefix)) == 2
        assert first.pid in {process.pid for process in found}

        assert kill_all(prefix) == []

        assert find_marked(prefix) == []
        assert other.poll() is None
        assert marker_of(other.pid) == "/tmp/other#1"
        other.kill()


def test_this_process_and_its_parent_are_never_found(prefix: str) -> None:
    """A launcher that is itself run by a marked process does not kill itself."""
    script = (
        "import os, sys; from serve_app.cli.processes import find_marked\n"
        "found = [process.pid for process in find_marked(sys.argv[1])]; print(os.getpid() in found, len(found))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, prefix],
        env={**os.environ, MARKER: prefix + "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "False 0\n"


def test_a_reused_process_id_is_not_signalled(prefix: str) -> None:
    """Between finding and signalling a process may end and its number go to another."""
    with start(prefix + "1") as process:
        (found,) = find_marked(prefix)
        MarkedProcess(found.pid, found.started - 1, found.name).send(9)
        assert process.poll() is None
        found.send(9)
        assert process.wait() == -9


def test_shared_memory_of_killed_processes_is_removed(prefix: str) -> None:
    """What a killed process had mapped in `/dev/shm` goes; what another process uses as well stays."""
    script = (
        "import mmap, sys, time\n"
        "for path in sys.argv[1:]:\n"
        "    file = open(path, 'w+b'); file.truncate(4096); maps = [mmap.mmap(file.fileno(), 4096)]\n"
        "    globals()[path] = (file, maps)\n"
        "print('up', flush=True); time.sleep(60)"
    )
    own, shared = (f"/dev/shm/test_{name}_{secrets.token_hex(4)}" for name in ("own", "shared"))
    try:
        with start(prefix + "1", script, own, shared), start("/tmp/other#2", script, shared) as other:
            found = shared_memory_of(find_marked(prefix))
            assert {own, shared} <= found
            kill_all(prefix)
            assert remove_shared_memory({own, shared}) == [own]
            assert Path(shared).exists()
            other.kill()
    finally:
        for path in (own, shared):
            Path(path).unlink(missing_ok=True)
