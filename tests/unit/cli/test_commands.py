"""The commands' exit statuses, and what they say, where nothing has to be started for it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.exit_codes import ExitCode
from serve_app.cli.main import app
from serve_app.cli.run_folder import RunFolder
from serve_app.cli.session import launcher_settings
from serve_app.errors import InvalidRequest
from serve_app.settings import LauncherSettings

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field` is deprecated")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    with tempfile.TemporaryDirectory(prefix="sa", dir="/tmp") as parent:
        path = Path(parent) / "run"
        monkeypatch.setenv("SERVE_APP_RUN_DIR", str(path))
        yield RunFolder(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_up_without_a_file_starts_nothing(folder: RunFolder, tmp_path: Path) -> None:
    """A missing file is one line with a fix and status 2, and the run folder is not even made."""
    result = run("up", str(tmp_path / "nowhere.yaml"))
    assert result.exit_code == ExitCode.NOT_READY
    assert "nowhere.yaml does not exist. Fix: " in result.output
    assert not folder.path.exists()
    assert not folder.lock_file.exists()


def test_up_beside_another_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    """Two launchers in one run folder would stop each other's processes."""
    with folder.locked():
        result = run("up", str(tmp_path / "nowhere.yaml"))
    assert result.exit_code == ExitCode.NOT_READY
    assert f"runs in {folder.path}" in result.output
    assert "serve-app down" in result.output


def test_status_of_nothing(folder: RunFolder) -> None:
    """Scripts tell a stopped instance by the exit status, and from the JSON."""
    assert run("status").exit_code == ExitCode.NOT_RUNNING
    result = run("status", "--json")
    assert result.exit_code == ExitCode.NOT_RUNNING
    assert json.loads(result.output) == {"status": "stopped", "run_dir": str(folder.path)}


def test_down_of_nothing_is_done_already(folder: RunFolder) -> None:
    """Stopping twice is no error."""
    result = run("down")
    assert (result.exit_code, result.output) == (ExitCode.OK, f"Nothing runs in {folder.path}.\n")


def test_a_wrong_variable_is_named(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the environment and the options, the one at fault is named."""
    monkeypatch.setenv("SERVE_APP_HTTP_PORT", "80000")
    result = run("up")
    assert result.exit_code == ExitCode.NOT_READY
    assert "SERVE_APP_HTTP_PORT: got '80000', expected less than or equal to 65535" in result.output


def test_options_win_over_the_environment() -> None:
    """An option given is in force, one not given leaves the variable's value, an empty variable is none."""
    environ = {"SERVE_APP_HTTP_PORT": "8001", "SERVE_APP_GRPC_PORT": "9001", "SERVE_APP_HOST": ""}
    settings = launcher_settings(environ, http_port=8002, grpc_port=None)
    assert (settings.http_port, settings.grpc_port, settings.host) == (8002, 9001, None)
    with pytest.raises(InvalidRequest, match="--http-port: got 0"):
        launcher_settings(environ, http_port=0)


def test_a_laptop_gets_enough_logical_cpus() -> None:
    """Ray counts reservations; eight fit the fleet and some fronts on a machine with two cores."""
    assert LauncherSettings().num_cpus >= 8
