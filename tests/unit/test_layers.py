"""Who may import whom: a file imports only from lower layers, and some packages only where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import serve_app

PACKAGE = Path(serve_app.__file__).parent

# Names on one line do not import each other.
LAYERS = [
    {"__init__"},
    {"errors", "settings", "clock", "endpoint"},
    {"protocol"},
    {"metrics"},
    {"triton", "batching", "fleet", "autoscaling", "samples", "auth"},
    {"runner", "served_models", "fleet_control", "shared_memory", "admission"},
    {"dataplane"},
    {"ingress"},
    {"deployments", "client"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

ONLY_IN = {
    "ray": {"deployments", "client", "cli"},
    "starlette": {"ingress", "deployments"},
    "grpc": {"triton", "fleet", "ingress", "client"},
    "typer": {"cli", "samples"},  # `python -m serve_app.samples` is a command of its own
}


def sources() -> list[Path]:
    # What lies in `backends` runs inside Triton's python stub and is no part of the package.
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "backends" not in path.parts]


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            if node.module == "serve_app":
                yield from ((f"serve_app.{alias.name}", node.lineno) for alias in node.names)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_lower_layers(path: Path) -> None:
    """The folders are an architecture only as long as their arrows point one way."""
    layer = layer_of(path)
    assert layer in RANK, f"{layer} has no place in LAYERS yet"
    for module, line in imports_of(path):
        parts = module.split(".")
        if parts[0] == "serve_app" and len(parts) > 1 and parts[1] != "__version__":
            other = parts[1]
            assert other == layer or RANK[other] < RANK[layer], f"{path}:{line} imports {module}"
        allowed = ONLY_IN.get(parts[0])
        assert allowed is None or layer in allowed, f"{path}:{line} imports {module}"


def test_importing_every_module_starts_nothing() -> None:
    """No import starts threads, opens sockets or changes the environment."""
    import subprocess
    import sys

    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in sources()
        if path.name != "__main__.py" and layer_of(path) not in {"deployments", "client", "cli"}
    ]
    script = (
        "import importlib, os, threading\n"
        "environ = dict(os.environ)\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert dict(os.environ) == environ\n"
        "assert 'ray' not in __import__('sys').modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=PACKAGE.parent)
