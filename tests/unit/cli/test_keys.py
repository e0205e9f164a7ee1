"""`serve-app keys`, and what `serve-app up` wants of keys before it listens where others reach it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.auth.keys_file import hash_of, parse_keys
from serve_app.auth.scopes import Scope
from serve_app.cli.deployments_file import DeploymentsFile
from serve_app.cli.host_checks import check_keys
from serve_app.cli.main import app
from serve_app.errors import PreflightFailed
from serve_app.settings import LauncherSettings
from tests.support.keys import write_keys

run = CliRunner()


def test_a_new_key_is_printed_with_the_lines_for_the_file(tmp_path: Path) -> None:
    """The key once; the file gets its hash, and is right as it is printed."""
    options = ["--scope", "infer", "--scope", "load", "--model", "a*", "--model", "b", "--lane", "batch"]
    result = run.invoke(app, ["keys", "new", "team-a", *options, "--expires-in-days", "30"])
    assert result.exit_code == 0, result.output
    key, _, lines = result.stdout.partition("\n")
    (entry,) = parse_keys("keys:\n" + lines, where="it").keys
    assert entry.sha256 == hash_of(key)
    assert key not in lines
    assert (entry.id, entry.scopes, entry.models) == ("team-a", [Scope.INFER, Scope.LOAD], ["a*", "b"])
    assert (entry.lane, entry.expires is not None) == ("batch", True)


def test_a_new_key_as_json() -> None:
    """For programs; by default it runs every model and does nothing else."""
    result = run.invoke(app, ["keys", "new", "team-a", "--json"])
    answer = json.loads(result.stdout)
    assert answer["entry"] == {
        "id": "team-a",
        "sha256": hash_of(answer["key"]),
        "scopes": ["infer"],
        "models": ["*"],
    }


def test_keys_are_added_to_a_file(tmp_path: Path) -> None:
    """A new file is its owner's alone; one that is there keeps its mode and its comments."""
    path = tmp_path / "keys.yaml"
    first = run.invoke(app, ["keys", "new", "a", "--file", str(path)])
    assert first.exit_code == 0, first.output
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("# ours\n" + path.read_text())
    path.chmod(0o640)
    second = run.invoke(app, ["keys", "new", "b", "--scope", "admin", "--file", str(path)])
    entries = parse_keys(path.read_text(), where="it").keys
    assert [(entry.id, entry.sha256) for entry in entries] == [
        ("a", hash_of(first.stdout.strip())),
        ("b", hash_of(second.stdout.strip())),
    ]
    assert path.read_text().startswith("# ours\n")
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_indentation(tmp_path: Path) -> None:
    """Whoever or whatever wrote it."""
    path = write_keys(tmp_path)
    before = len(parse_keys(path.read_text(), where="it").keys)
    for name in ("a", "b"):
        assert run.invoke(app, ["keys", "new", name, "--file", str(path)]).exit_code == 0
    assert len(parse_keys(path.read_text(), where="it").keys) == before + 2


def test_keys_and_ray_serves_own_reflection_do_not_go_together(tmp_path: Path) -> None:
    """It is on by default, and asks nobody."""
    write_keys(tmp_path)
    file = deployments(tmp_path, host="127.0.0.1", auth="{keys_file: keys.yaml}")
    file.path.write_text("grpc_options: {grpc_servicer_functions: [a.b]}\n" + file.path.read_text())
    environ = {"SERVE_APP_HOME": str(tmp_path)}
    with pytest.raises(PreflightFailed, match="answers without a key"):
        check_keys(DeploymentsFile.read(file.path, LauncherSettings()), environ)
    file.path.write_text(file.path.read_text().replace("[a.b]", "[a.b], enable_reflection: false"))
    check_keys(DeploymentsFile.read(file.path, LauncherSettings()), environ)


@pytest.mark.parametrize("content", ["keys: []\n", '{"keys": []}', "keys:\n- {id: a}", None])
def test_a_file_that_cannot_be_added_to_stays_as_it_is(tmp_path: Path, content: str | None) -> None:
    """And no key is printed, since nobody would know it."""
    path = tmp_path / "keys.yaml"
    if content is None:
        run.invoke(app, ["keys", "new", "a", "--file", str(path)])
        content = path.read_text()
    path.write_text(content)
    result = run.invoke(app, ["keys", "new", "a", "--file", str(path)])
    assert (result.exit_code, result.stdout, path.read_text()) == (2, "", content)


@pytest.mark.parametrize(
    ("options", "said"), [(["a b"], "ID: got 'a b'"), (["a", "--model", "[x]"], "--model: got '[x]'")]
)
def test_a_wrong_option_is_named(options: list[str], said: str) -> None:
    """With what it was; nothing is made."""
    result = run.invoke(app, ["keys", "new", *options])
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_file_is_checked_and_listed(tmp_path: Path) -> None:
    """What each key is good for, and which have expired; no hashes."""
    path = write_keys(tmp_path)
    result = run.invoke(app, ["keys", "check", str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "runner" in result.stdout
    assert "(expired)" in result.stdout
    listed = json.loads(run.invoke(app, ["keys", "check", str(path), "--json"]).stdout)["keys"]
    assert listed[0] == {"id": "runner", "scopes": ["infer"], "models": ["iden*"], "lane": "batch", "expires": None}
    path.write_text("keys: [{id: a}]")
    wrong = run.invoke(app, ["keys", "check", str(path)])
    assert wrong.exit_code == 2
    assert "wrong at keys.0.sha256" in wrong.stderr


def deployments(folder: Path, *, host: str, auth: str) -> DeploymentsFile:
    path = folder / "deployments.yaml"
    path.write_text(
        f"http_options: {{host: '{host}'}}\n"
        "applications:\n"
        "- name: models\n"
        "  import_path: serve_app.deployments.apps:model_server\n"
        f"  args: {{auth: {auth}}}\n"
    )
    return DeploymentsFile.read(path, LauncherSettings())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "models.example"])
def test_an_address_for_everybody_needs_keys(tmp_path: Path, host: str) -> None:
    """Or the word that none are meant; an address of this machine alone needs neither."""
    environ = {"SERVE_APP_HOME": str(tmp_path)}
    with pytest.raises(PreflightFailed, match="asks nobody for a key"):
        check_keys(deployments(tmp_path, host=host, auth="{}"), environ)
    check_keys(deployments(tmp_path, host=host, auth="{allow_anonymous: true}"), environ)
    write_keys(tmp_path)
    check_keys(deployments(tmp_path, host=host, auth="{keys_file: keys.yaml}"), environ)
    for loopback in ("127.0.0.1", "127.0.0.9", "localhost", "::1"):
        check_keys(deployments(tmp_path, host=loopback, auth="{}"), environ)


def test_keys_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    """Before Ray is started, rather than in a replica's log."""
    with pytest.raises(PreflightFailed, match="cannot be read"):
        check_keys(
            deployments(tmp_path, host="127.0.0.1", auth="{keys_file: no.yaml}"), {"SERVE_APP_HOME": str(tmp_path)}
        )
    with pytest.raises(PreflightFailed, match="SERVE_KEYS is not set"):
        check_keys(deployments(tmp_path, host="127.0.0.1", auth="{keys_env: SERVE_KEYS}"), {})
    check_keys(deployments(tmp_path, host="127.0.0.1", auth="{keys_env: SERVE_KEYS}"), {"SERVE_KEYS": "keys: []"})


@pytest.mark.parametrize("auth", ["{keys_file: a, keys_env: B}", "{keys_file: a, allow_anonymous: true}"])
def test_contradictions_are_refused(tmp_path: Path, auth: str) -> None:
    """Keys come from one place, and are asked for or not."""
    with pytest.raises(PreflightFailed, match="auth"):
        deployments(tmp_path, host="127.0.0.1", auth=auth)
