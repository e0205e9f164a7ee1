"""The lock files hold what pyproject.toml asks for, and what is installed fits together."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ("requirements.lock", "requirements-dev.lock", "tests/clients/kserve.lock", "tests/clients/perf-analyzer.txt")


def asked_for(*, with_dev: bool) -> list[Requirement]:
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    texts = list(project["dependencies"])
    for extra in ("cpu", "samples", "build"):
        texts += project["optional-dependencies"][extra]
    return [Requirement(text) for text in (texts + groups["dev"] if with_dev else texts)]


def pinned(lock: str) -> list[Requirement]:
    """The pins of a lock file, without their hashes."""
    text = (ROOT / lock).read_text().replace("\\\n", " ")
    lines = [line.partition(" --hash=")[0].strip() for line in text.splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_pins_and_hashes_everything_and_names_no_registry(lock: str) -> None:
    """Each line is one exact version with hashes; where it comes from is the machine's matter."""
    text = (ROOT / lock).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) >= 1
    for line in lines:
        assert re.search(r"^[\w.\[\],-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line), line
        assert "://" not in line


@pytest.mark.parametrize(("lock", "with_dev"), [("requirements.lock", False), ("requirements-dev.lock", True)])
def test_a_lock_is_inside_the_ranges_asked_for(lock: str, with_dev: bool) -> None:
    """For each requirement there is a pin on every Python that it is for, and each pin is in its range."""
    pins = pinned(lock)
    for wanted in asked_for(with_dev=with_dev):
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        found = [pin for pin in pins if normal(pin.name) == normal(wanted.name)]
        found = [pin for pin in found if pin.marker is None or pin.marker.evaluate()]
        assert len(found) == 1, f"{lock} has {len(found)} pins of {wanted}"
        (specifier,) = found[0].specifier
        assert wanted.specifier.contains(specifier.version, prereleases=True), f"{lock}: {found[0]} is not {wanted}"


def test_what_is_installed_is_in_the_ranges_asked_for() -> None:
    """The environment that runs this test, whoever made it."""
    for wanted in asked_for(with_dev=True):
        if wanted.marker is None or wanted.marker.evaluate():
            assert wanted.specifier.contains(metadata.version(wanted.name), prereleases=True), str(wanted)


def test_what_is_installed_fits_together() -> None:
    """`pip check`: nothing lacks what it requires; numpy, protobuf and grpcio are where such conflicts come from."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
