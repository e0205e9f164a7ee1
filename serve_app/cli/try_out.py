"""What to try once the models are ready: lines that can be pasted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# fmt: off
DIGITS_PIXELS = (
    0, 0, 5, 13, 9, 1, 0, 0,      0, 0, 13, 15, 10, 15, 5, 0,  0, 3, 15, 2, 0, 11, 8, 0,  0, 4, 12, 0, 0, 8, 8, 0,
    0, 5, 8, 0, 0, 9, 8, 0,       0, 4, 11, 0, 1, 12, 7, 0,    0, 2, 14, 5, 10, 12, 0, 0, 0, 0, 6, 13, 10, 0, 0, 0,
)
"""Item 0 of scikit-learn's digits (UCI, public domain): a handwritten zero of 8 x 8 pixels."""
# fmt: on


def curl_line(url: str, models: Mapping[str, str], metadata: Mapping[str, Any] | None) -> str:
    """A curl command for one of the models.

    Args:
        url: Where HTTP is, without a slash at the end.
        models: The HTTP path of each model that is served; may be empty.
        metadata: Model metadata of `digits` where it is served: the line is only made for the model it was made for.
    """
    if _is_digits(metadata):
        body = (
            '{"inputs":[{"name":"pixels","datatype":"FP32","shape":[1,64],"data":[%s]}],"outputs":[{"name":"label"}]}'
        )
        return f"curl -s {url}{models['digits']}/infer -d '{body % ','.join(map(str, DIGITS_PIXELS))}'"
    if models:
        return f"curl -s {url}{next(iter(models.values()))}"
    return f"curl -s {url}/v2/health/ready -w '%{{http_code}}\\n'"


def summary(
    *,
    url: str,
    models: Mapping[str, str],
    metadata: Mapping[str, Any] | None,
    grpc: str | None,
    applications: Sequence[str] = (),
    dashboard: str,
    deployments: Path,
    driver_env: Path,
    logs: Path,
    commands: str = "",
    run_dir: Path | None = None,
) -> str:
    """The text that `serve-app up` prints when all is ready.

    Args:
        url: Where HTTP is, without a slash at the end.
        models: The HTTP path of each model that is served; may be empty.
        metadata: See `curl_line`.
        grpc: Where gRPC is; `None` where it is off.
        applications: Names of those that answer; where there are several, gRPC clients have to choose.
        dashboard: Where the dashboard is, with its scheme.
        deployments: What was deployed.
        driver_env: File of switches for programs.
        logs: Folder of Ray's logs.
        commands: What stands before `serve` and `serve-app`: nothing, or their folder if it is not on the path.
        run_dir: The run folder where it is not the default, which other commands have to be told.
    """
    choice = f", with metadata `application`: {' or '.join(applications)}" if len(applications) > 1 else ""
    where = f"SERVE_APP_RUN_DIR={run_dir} " if run_dir else ""
    rows = [
        ("Models", ", ".join(_name_and_place(*entry) for entry in models.items()) or "not asked for"),
        ("HTTP", url),
        ("gRPC", f"{grpc}{choice}" if grpc else "off (no grpc_servicer_functions in the file)"),
        ("Dashboard", dashboard),
        ("Logs", str(logs)),
        ("Change", f"edit {deployments.name}, then: {commands}serve deploy -a {dashboard} {deployments}"),
        ("Python", f". {driver_env}, then {commands}python: ray.init() finds this Ray"),
        ("Stop", f"Ctrl-C here, or `{where}{commands}serve-app down` elsewhere"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join(["", *lines, "", "Try:", f"  {curl_line(url, models, metadata)}", ""])


def _name_and_place(name: str, path: str) -> str:
    route = path.rpartition("/v2/models/")[0]
    return f"{name} (below {route})" if route else name


def _is_digits(metadata: Mapping[str, Any] | None) -> bool:
    inputs = (metadata or {}).get("inputs")
    return (
        isinstance(inputs, list)
        and len(inputs) == 1
        and inputs[0].get("name") == "pixels"
        and list(map(int, inputs[0].get("shape", []))) == [-1, 64]
    )
