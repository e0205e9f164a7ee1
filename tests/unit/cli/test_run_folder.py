"""One instance per run folder, whatever happened to the one before."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from serve_app.cli.run_folder import MAX_PATH_BYTES, InstanceState, RunFolder
from serve_app.errors import PreflightFailed

STATE = InstanceState(
    instance="/tmp/x#1",
    launcher_pid=os.getpid(),
    launcher_started=psutil.Process().create_time(),
    deployments="/srv/deployments.yaml",
    host="127.0.0.1",
    http_port=8000,
    grpc_port=None,
    dashboard_port=8265,
    ports=(8000, 8265),
)


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    with tempfile.TemporaryDirectory(prefix="sa", dir="/tmp") as parent:
        yield RunFolder(Path(parent) / "run")


def test_state_survives_writing_and_reading(folder: RunFolder) -> None:
    """A later command reads what the launcher wrote; a half-written or missing file is no state."""
    folder.create()
    assert folder.read_state() is None
    folder.write_state(STATE)
    assert folder.read_state() == STATE
    folder.state_file.write_text("{")
    assert folder.read_state() is None


def test_a_launcher_is_known_by_its_start_and_not_by_its_number_alone() -> None:
    """A process id that now belongs to another process is not taken for the launcher."""
    assert STATE.is_launcher_alive
    assert not replace(STATE, launcher_started=STATE.launcher_started - 60).is_launcher_alive
    assert not replace(STATE, launcher_pid=2**22 + 1).is_launcher_alive


def test_only_one_process_holds_the_lock_and_its_death_frees_it(folder: RunFolder) -> None:
    """A second launcher is refused while the first lives, and after `kill -9` of the first the way is free."""
    script = (
        "import sys, time; from pathlib import Path; from serve_app.cli.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).locked() as ours: print(ours, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(folder.path)], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with folder.locked() as is_ours:
            assert not is_ours
        assert folder.lock_holder() == holder.pid
        holder.kill()
    with folder.locked() as is_ours:
        assert is_ours
        assert folder.lock_holder() == os.getpid()
    assert not folder.lock_file.exists()


def test_a_path_too_long_for_sockets_is_refused() -> None:
    """HAProxy would fail late and obscurely on a socket path above the kernel's 107 bytes."""
    RunFolder(Path("/tmp/" + "x" * (MAX_PATH_BYTES - 5))).check()
    with pytest.raises(PreflightFailed, match=r"has 26 bytes.*SERVE_APP_RUN_DIR"):
        RunFolder(Path("/tmp/" + "x" * (MAX_PATH_BYTES - 4))).check()
    socket = f"/h/{'0' * 56}/admin.sock.4194304.tmp"
    assert MAX_PATH_BYTES + len(socket) <= 107


def test_the_default_fits_any_user_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default folder is short enough for the largest user id there is."""
    monkeypatch.setattr(os, "getuid", lambda: 2**32 - 2)
    assert len(str(RunFolder.choose(None).path)) <= MAX_PATH_BYTES


def test_a_folder_that_is_no_folder_of_ours_is_refused(folder: RunFolder) -> None:
    """Nothing is put into, or removed from, what another user or another purpose laid at the path."""
    folder.path.symlink_to("/")
    with pytest.raises(PreflightFailed, match="is not a folder of this user"):
        folder.check()


def test_the_folder_is_for_its_user_alone(folder: RunFolder) -> None:
    """Sockets below it admit whoever can reach them."""
    folder.create()
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_logs_of_the_last_runs_are_kept(folder: RunFolder, tmp_path: Path) -> None:
    """Logs outlive the folder, and do not pile up."""
    for number in range(5):
        folder.create()
        logs = folder.ray / f"session_{number}" / "logs"
        logs.mkdir(parents=True)
        (folder.ray / "session_latest").symlink_to(logs.parent)
        (logs / "serve.log").write_text(str(number))
        folder.head_log.write_text("started")
        kept = folder.keep_logs(tmp_path / "logs", f"run-{number}")
        assert kept is not None
        assert sorted(path.name for path in kept.iterdir()) == ["ray-start.log", "serve.log"]
        folder.remove()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["run-2", "run-3", "run-4"]


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    """A run folder below one that does not exist is one sentence, and no traceback."""
    with (
        pytest.raises(PreflightFailed, match=r"/tmp/no/x\.lock cannot be opened \(No such file or directory\)"),
        RunFolder(Path("/tmp/no/x")).locked(),
    ):
        pass
