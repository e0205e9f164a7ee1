"""Puts the pinned `tritonserver` binary into a folder of its own: `python -m serve_app.fleet.install [folder]`.

The wheel's Python dependencies are left out: only its binaries are used, and they need none.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

from serve_app.errors import PreflightFailed

REQUIREMENTS = "triton-runtime.txt"
"""Package data of `serve_app.fleet`: the pin and its hashes."""

STAMP = "installed.txt"
"""File in an installed runtime that holds the requirement it was installed from; written last."""


def requirement() -> str:
    """The pinned requirement line, with its hashes."""
    text = resources.files("serve_app.fleet").joinpath(REQUIREMENTS).read_text(encoding="utf-8")
    return next(line for line in text.splitlines() if line and not line.startswith("#"))


def runtime_roots(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Folders that may hold the installed runtime, in the order in which they are looked into.

    `SERVE_APP_TRITON_RUNTIME` alone where it is set; else `triton-runtime` in the virtual environment, and the
    user's cache folder for environments that cannot be written to.
    """
    if chosen := environ.get("SERVE_APP_TRITON_RUNTIME"):
        return [Path(chosen).expanduser()]
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [Path(sys.prefix) / "triton-runtime", cache / "serve_app" / "triton-runtime"]


def release_name() -> str:
    """Folder name of the pinned release, so that an upgrade never mixes files of two releases."""
    pin = requirement()
    return f"{pin.split()[0].replace('==', '-')}-{hashlib.sha256(pin.encode()).hexdigest()[:8]}"


def installed_release(root: Path) -> Path | None:
    """The complete installation of the pinned release under `root`, if there is one."""
    release = root / release_name()
    stamp = release / STAMP
    return release if stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == requirement() else None


def install_runtime(
    root: Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Install the pinned release, unless it is there already. Blocks; about 3 s after a download of 55 MB.

    Unpacks into a temporary folder beside the target and renames it, so that whoever looks sees all of it or
    nothing; of two installing at once, one wins and both succeed.

    Args:
        root: Parent folder of releases; by default the first of `runtime_roots` that can be written to.
        environ: Environment for `runtime_roots` and for pip (which takes its index and proxy from there).
        report: Called with a line for each step that takes time.

    Returns:
        The folder of the release.

    Raises:
        PreflightFailed: No folder can be written to, there is no installer, or it failed.
    """
    roots = [root] if root is not None else runtime_roots(environ)
    for candidate in roots:
        if (release := installed_release(candidate)) is not None:
            report(f"Triton runtime is installed: {release}")
            return release
    chosen = next((candidate for candidate in roots if _can_write(candidate)), None)
    if chosen is None:
        raise PreflightFailed(
            f"The Triton runtime cannot be installed: no write access to {' or '.join(map(str, roots))}.",
            "set SERVE_APP_TRITON_RUNTIME to a folder that can be written to.",
        )
    target = chosen / release_name()
    unpacked = Path(tempfile.mkdtemp(prefix=".installing-", dir=chosen))
    try:
        report(f"Installing {requirement().split()[0]} (55 MB) into {target}")
        _run_installer(unpacked, environ=environ)
        (unpacked / STAMP).write_text(requirement() + "\n", encoding="utf-8")
        unpacked.chmod(0o755)
        if target.exists() and installed_release(chosen) is None:
            shutil.rmtree(target)  # Without a stamp: the remains of something else.
        try:
            unpacked.rename(target)
        except OSError:
            if installed_release(chosen) is None:
                raise
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    report(f"Triton runtime installed: {target}")
    return target


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _run_installer(target: Path, *, environ: Mapping[str, str]) -> None:
    with resources.as_file(resources.files("serve_app.fleet").joinpath(REQUIREMENTS)) as requirements:
        options = ["--no-deps", "--require-hashes", "--target", str(target), "-r", str(requirements)]
        if importlib.util.find_spec("pip") is not None:
            command = [sys.executable, "-m", "pip", "install", "--only-binary=:all:", "--no-compile"]
            command += ["--disable-pip-version-check", *options]
        elif uv := shutil.which("uv", path=environ.get("PATH")):
            command = [uv, "pip", "install", "--python", sys.executable, *options]
        else:
            raise PreflightFailed(
                "The Triton runtime cannot be installed: this Python has neither pip nor uv.",
                f"run `{sys.executable} -m ensurepip`.",
            )
        # Output goes straight to the terminal: the installer's own progress bar is the best there is.
        status = subprocess.run(command, env=dict(environ), check=False).returncode
    if status != 0:
        raise PreflightFailed(
            f"The Triton runtime could not be installed: the installer ended with status {status}.",
            "see its message above; a network, proxy or package index that is not reachable is the usual cause.",
        )


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `python -m serve_app.fleet.install`; 0 when the runtime is there."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.fleet.install", description=main.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="parent folder of releases (default: in the venv)")
    root = parser.parse_args(arguments).folder

    def report(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        install_runtime(root, report=report)
    except PreflightFailed as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
