"""`cluster/serve.env` means the same to the launcher as to a shell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.cli.serve_env import PACKAGED, find_serve_env, load_serve_env, parse_serve_env
from serve_app.errors import InvalidRequest

REPOSITORY = Path(__file__).parents[3]


def sourced(path: Path, environ: dict[str, str]) -> dict[str, str]:
    """The environment after a real `sh` sourced the file."""
    script = f"cd '{environ['PWD']}'; set -a; . {path}; set +a; env -0"
    output = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, check=True).stdout
    return dict(line.split("=", 1) for line in output.decode().split("\0") if line)


@pytest.mark.parametrize(
    "environ", [{}, {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_AUTH_MODE": "token", "SERVE_APP_HOME": "/srv"}]
)
def test_the_file_reads_as_a_shell_sources_it(environ: dict[str, str], tmp_path: Path) -> None:
    """Sourced or parsed, every switch has the same value, whether the environment has its own or not."""
    environ = {"PATH": "/usr/bin:/bin", "PWD": str(tmp_path), **environ}
    path = REPOSITORY / "cluster" / "serve.env"

    parsed = parse_serve_env(path.read_text(), environ)

    shell = sourced(path, environ)
    assert parsed == {name: shell[name] for name in parsed}
    assert set(shell) - set(environ) - set(parsed) <= {"OLDPWD", "SHLVL", "_"}


def test_the_packaged_file_is_the_one_of_the_checkout(tmp_path: Path) -> None:
    """There is one file: an installed launcher has the very switches that operators source."""
    assert PACKAGED.read_text() == (REPOSITORY / "cluster" / "serve.env").read_text()
    assert find_serve_env(REPOSITORY) == REPOSITORY / "cluster" / "serve.env"
    assert find_serve_env(tmp_path) == PACKAGED


def test_the_home_folder_falls_back_to_the_working_directory() -> None:
    """`SERVE_APP_HOME=${SERVE_APP_HOME:-$PWD}` names where the file is sourced, unless it is set."""
    line = "SERVE_APP_HOME=${SERVE_APP_HOME:-$PWD}\n"
    assert parse_serve_env(line, {"PWD": "/here"}) == {"SERVE_APP_HOME": "/here"}
    assert parse_serve_env(line, {"PWD": "/here", "SERVE_APP_HOME": "/there"}) == {"SERVE_APP_HOME": "/there"}


def test_what_the_environment_has_wins_for_the_launcher(tmp_path: Path) -> None:
    """A variable set for one command is not undone by the file; an empty one counts as not set."""
    path = tmp_path / "serve.env"
    path.write_text("A=1\nB=2\nC=3\n")
    assert load_serve_env(path, {"A": "9", "B": ""}) == {"B": "2", "C": "3"}


def test_comments_quotes_and_export_are_understood() -> None:
    """What people write in such files beyond bare values reads as in a shell."""
    text = "# comment\n\nexport A=1  # why\nB=\"$A and ${A}\"\nC='$A'\nD=a#b\n"
    assert parse_serve_env(text, {}) == {"A": "1", "B": "1 and 1", "C": "$A", "D": "a#b"}


@pytest.mark.parametrize("line", ["A B", "=1", "A=$(date)", "A=`date`", "A=1 2", "A=1; B=2", 'A="1', "A=a\\ b"])
def test_more_of_the_shell_than_is_read_is_an_error(line: str) -> None:
    """A line that a shell would read otherwise is refused with its number, and never half understood."""
    with pytest.raises(InvalidRequest, match=r"serve\.env line 2"):
        parse_serve_env(f"X=1\n{line}\n", {})


@given(
    st.dictionaries(
        st.sampled_from("ABCDE"), st.text("abc$019_/:.-=~", max_size=12).filter(lambda text: "~" not in text[:1])
    )
)
def test_bare_values_read_as_in_a_shell(values: dict[str, str]) -> None:
    """For any file of bare values the parser and `sh` agree; `~` and `$` oddities are left to the shell."""
    values = {name: value for name, value in values.items() if "$" not in value and "~" not in value}
    text = "".join(f"{name}={value}\n" for name, value in values.items())
    assert parse_serve_env(text, {}) == values
