"""The environment and command line that make a Ray of our own, apart from any other on the machine."""

from __future__ import annotations

import sys
from pathlib import Path

from serve_app.cli.ray_head import driver_environment, head_command, head_environment
from serve_app.cli.run_folder import RunFolder
from serve_app.settings import LauncherSettings

FOLDER = RunFolder(Path("/tmp/sa-test"))


def environment(environ: dict[str, str], switches: dict[str, str]) -> dict[str, str]:
    return head_environment(
        environ, switches, folder=FOLDER, instance="/tmp/sa-test#1", home=Path("/srv/app"), metrics_port=5
    )


def test_nothing_lies_in_a_shared_place() -> None:
    """Two instances, or another Ray, on one machine never meet in a file or a socket."""
    result = environment({}, {})
    paths = {name: value for name, value in result.items() if name.startswith("RAY_SERVE_HAPROXY_")}
    assert len(paths) == 5
    assert all(path.startswith("/tmp/sa-test/h") for path in paths.values())
    assert result["TMPDIR"] == "/tmp/sa-test/t"


def test_another_ray_of_the_user_is_left_behind() -> None:
    """Variables that point to another cluster do not reach ours; the rest of the environment does."""
    result = environment(
        {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_TMPDIR": "/x", "AWS_PROFILE": "p"}, {"RAY_AUTH_MODE": "x"}
    )
    assert "RAY_ADDRESS" not in result
    assert "RAY_TMPDIR" not in result
    assert (result["AWS_PROFILE"], result["RAY_AUTH_MODE"]) == ("p", "x")


def test_import_paths_start_at_the_home_folder() -> None:
    """Modules beside deployments.yaml are found on the cluster, then what the user's PYTHONPATH has."""
    folders = environment({"PYTHONPATH": "/a:/b"}, {})["PYTHONPATH"].split(":")
    assert folders[0] == "/srv/app"
    assert folders[-2:] == ["/a", "/b"]
    assert environment({"PATH": "/bin"}, {})["PATH"] == f"{Path(sys.executable).parent}:/bin"


def test_a_driver_gets_what_it_needs_and_no_marker() -> None:
    """A program that sources driver.env connects, and is never killed as a part of the instance."""
    result = driver_environment(
        environment({"HOME": "/h"}, {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_AUTH_MODE": "disabled"}),
        gcs_address="127.0.0.1:7",
    )
    assert result == {"RAY_ADDRESS": "127.0.0.1:7", "RAY_AUTH_MODE": "disabled", "RAY_SERVE_ENABLE_HA_PROXY": "1"}


def test_the_head_listens_where_it_is_told() -> None:
    """Ports that would clash with another Ray are chosen free; the dashboard is where the settings say."""
    command = head_command(LauncherSettings(dashboard_port=7, num_cpus=3), FOLDER, agent_port=9)
    for expected in ("--port=0", "--dashboard-port=7", "--dashboard-agent-listen-port=9", "--num-cpus=3", "--block"):
        assert expected in command
    assert "--temp-dir=/tmp/sa-test/r" in command
