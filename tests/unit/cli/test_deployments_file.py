"""The launcher refuses a bad file before anything starts, and knows the addresses of a good one."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.cli.deployments_file import DeploymentsFile
from serve_app.errors import PreflightFailed
from serve_app.settings import LauncherSettings

# Raised once, by the import of Ray Serve's own schema.
pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field` is deprecated")

APPLICATION = "applications:\n- {name: a, import_path: 'm:build', route_prefix: /}\n"
MODELS = "applications:\n- name: models\n  import_path: 'serve_app.deployments.apps:model_server'\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "deployments.yaml"
    path.write_text(text)
    return path


def test_addresses_default_to_this_machine_alone(tmp_path: Path) -> None:
    """Without options HTTP is on 127.0.0.1:8000, and that is written down: HAProxy's own default is every address."""
    file = DeploymentsFile.read(write(tmp_path, APPLICATION), LauncherSettings())
    assert file.config["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert (file.host, file.http_port, file.grpc_port) == ("127.0.0.1", 8000, None)
    assert file.applications == ("a",)


def test_settings_override_the_file_and_nothing_else_of_it(tmp_path: Path) -> None:
    """A port given to the launcher wins over the file's; other options of the file stay."""
    text = (
        "http_options: {host: 0.0.0.0, port: 80, keep_alive_timeout_s: 7}\n"
        "grpc_options: {port: 90, grpc_servicer_functions: ['m:add']}\n" + APPLICATION
    )
    file = DeploymentsFile.read(write(tmp_path, text), LauncherSettings(http_port=81, grpc_port=91))
    assert file.config["http_options"] == {"host": "0.0.0.0", "port": 81, "keep_alive_timeout_s": 7}
    assert file.grpc_port == 91
    assert file.connect_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: [", "is not YAML"),
        ("- a", "holds no mapping"),
        ("http_options: 8000\n" + APPLICATION, "http_options holds no mapping"),
        ("applications: []", "has no applications"),
        ("{}", r"applications: Field required"),
        ("applications:\n- {name: a}\n", r"applications\.0\.import_path: Field required"),
        ("http_options: {port: x}\n" + APPLICATION, r"http_options\.port"),
        (
            "applications:\n- {name: f, import_path: 'serve_app.deployments.apps:triton_fleet', args: {num_gpu: 1}}\n",
            r"applications\.f\.args\.num_gpu: unknown key",
        ),
        (MODELS + "  args: {endpoint: []}\n", r"applications\.models\.args\.endpoint: unknown key"),
        (
            MODELS + "  args: {resolve_interval_s: 0}\n",
            r"applications\.models\.args\.resolve_interval_s: Input should be",
        ),
        (
            MODELS + "  deployments: [{name: ModelServer, user_config: {default: {timeout: 3}}}]\n",
            r"models\.deployments\.ModelServer\.user_config\.default\.timeout: unknown key",
        ),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    """Whatever is wrong is said in one line that names the place, with a fix, and never as a traceback."""
    with pytest.raises(PreflightFailed, match=message) as caught:
        DeploymentsFile.read(write(tmp_path, text), LauncherSettings()).fleet_args()
    assert "\n" not in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A launcher started in the wrong folder says which file it looked for."""
    with pytest.raises(PreflightFailed, match=r"nowhere\.yaml does not exist"):
        DeploymentsFile.read(tmp_path / "nowhere.yaml", LauncherSettings())


def test_applications_answer_below_their_route_prefixes(tmp_path: Path) -> None:
    """Ours are asked whether they are ready; of others only one, at the root."""
    ours = "import_path: 'serve_app.deployments.apps:model_server'"
    path = tmp_path / "deployments.yaml"
    path.write_text(
        f"applications:\n- {{name: a, {ours}}}\n- {{name: b, {ours}, route_prefix: /b}}\n"
        f"- {{name: c, {ours}, route_prefix: null}}\n- {{name: d, import_path: 'm:build', route_prefix: /d}}\n"
    )
    file = DeploymentsFile.read(path, LauncherSettings())
    assert (file.routed, file.routes) == (("a", "b", "d"), ("", "/b"))
    path.write_text("applications:\n- {name: d, import_path: 'm:build', route_prefix: null}\n")
    assert DeploymentsFile.read(path, LauncherSettings()).routes == ()
