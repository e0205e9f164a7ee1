"""Where `tritonserver` and its backends are on this node, and the environment that they need."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from pathlib import Path

from serve_app.errors import PreflightFailed
from serve_app.fleet.install import installed_release, requirement, runtime_roots

MALLOC_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "67108864", "MALLOC_TRIM_THRESHOLD_": "536870912"}
"""Keeps glibc from mapping and faulting in a new buffer for every large tensor: 2.8 times the rate at 600 KB."""

CONTAINER_BINARY = Path("/opt/tritonserver/bin/tritonserver")
"""Where NVIDIA's container image has it."""

STUB = "triton_python_backend_stub"


class RuntimeSource(str, Enum):
    """Who told where the binary is."""

    SETTING = "setting"
    ENVIRONMENT = "environment"
    PATH = "path"
    WHEEL = "wheel"


@dataclass(frozen=True, slots=True)
class TritonRuntime:
    """One `tritonserver` that can be started.

    Attributes:
        tritonserver: The binary.
        backend_directory: For `--backend-directory`.
        source: How it was found.
        version: Release as far as known without starting it, for people; empty when not known.
        stub: The python backend's stub that will run Python models; `None` where there is no python backend.
        library_directory: Goes to the front of `LD_LIBRARY_PATH`: holds the libpython of the running Python.
        python_executable: For `PYTHONEXECUTABLE`, so that the stub uses this Python's packages; `None` where the
            stub is built for another Python.
        cache_directory: For `--cache-directory`; `None` for the binary's own default.
    """

    tritonserver: Path
    backend_directory: Path
    source: RuntimeSource
    version: str = ""
    stub: Path | None = None
    library_directory: Path | None = None
    python_executable: Path | None = None
    cache_directory: Path | None = None

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment for `tritonserver`: `environ` with what the binary and its stubs need."""
        result = dict(environ)
        if self.library_directory is not None:
            rest = result.get("LD_LIBRARY_PATH")
            result["LD_LIBRARY_PATH"] = f"{self.library_directory}:{rest}" if rest else str(self.library_directory)
        if self.python_executable is not None:
            # Python 3.11 and later take the one, Python 3.10 looks for `python3` in the other.
            result["PYTHONEXECUTABLE"] = str(self.python_executable)
            result["PATH"] = f"{self.python_executable.parent}:{result.get('PATH') or os.defpath}"
        for name, value in MALLOC_ENVIRONMENT.items():
            result.setdefault(name, value)
        return result

    @classmethod
    def find(cls, tritonserver: str | None = None, *, environ: Mapping[str, str] = os.environ) -> TritonRuntime:
        """Find a runtime, and put its backend directory together where it needs that. Blocks for some file copies.

        Looks at `tritonserver`, `TRITON_SERVER_PATH`, `PATH` and NVIDIA's container path, then at the installed
        wheel (`python -m serve_app.fleet.install`).

        Raises:
            PreflightFailed: There is none, or the one that was named is not there.
        """
        named = [
            (tritonserver, RuntimeSource.SETTING, "the setting `tritonserver`"),
            (environ.get("TRITON_SERVER_PATH"), RuntimeSource.ENVIRONMENT, "TRITON_SERVER_PATH"),
        ]
        for path, source, what in named:
            if not path:
                continue
            binary = _binary_at(Path(path).expanduser())
            if binary is None:
                raise PreflightFailed(
                    f"{what} is {path!r}, where there is no executable tritonserver.",
                    "correct it, or remove it to use the installed runtime.",
                )
            return _runtime_of(binary, source, environ)
        on_path = shutil.which("tritonserver", path=environ.get("PATH"))
        binary = Path(on_path) if on_path else _binary_at(CONTAINER_BINARY)
        if binary is not None:
            return _runtime_of(binary, RuntimeSource.PATH, environ)
        for root in runtime_roots(environ):
            release = installed_release(root)
            if release is not None:
                return _runtime_of(release / "pytriton/tritonserver/bin/tritonserver", RuntimeSource.WHEEL, environ)
        raise PreflightFailed(
            "No tritonserver on this machine.",
            f"run `{sys.executable} -m serve_app.fleet.install`, or set TRITON_SERVER_PATH.",
        )


def _binary_at(path: Path) -> Path | None:
    for candidate in (path, path / "tritonserver", path / "bin" / "tritonserver"):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate.absolute()
    return None


def _runtime_of(binary: Path, source: RuntimeSource, environ: Mapping[str, str]) -> TritonRuntime:
    """Complete what is known from the layout around a binary: the wheel's, or that of NVIDIA's container."""
    home = binary.resolve().parent.parent
    stubs = home / "python_backend_stubs"
    backends = home / "backends"
    if stubs.is_dir():
        return _wheel_runtime(binary, source, environ)
    stub = backends / "python" / STUB
    has_python = stub.is_file()
    native_onnx = (backends / "onnxruntime" / "libtriton_onnxruntime.so").is_file()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    is_our_python = has_python and stub_python_version(stub, environ) == python
    version_file = home / "TRITON_VERSION"
    return TritonRuntime(
        binary,
        backends if native_onnx or not has_python else _assemble(backends, stub.resolve(), None, environ),
        source,
        version=version_file.read_text(encoding="utf-8").strip() if version_file.is_file() else "",
        stub=stub if has_python else None,
        python_executable=Path(sys.executable) if is_our_python and source is not RuntimeSource.WHEEL else None,
    )


def _wheel_runtime(binary: Path, source: RuntimeSource, environ: Mapping[str, str]) -> TritonRuntime:
    home = binary.resolve().parent.parent
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "python_backend_stubs" / python / STUB
    if not stub.is_file():
        known = [f"3.{m}" for m in range(10, 14) if (home / "python_backend_stubs" / f"3.{m}" / STUB).is_file()]
        raise PreflightFailed(
            f"The Triton runtime at {home} has no stub for Python {python}.",
            f"use one of Python {', '.join(known)}.",
        )
    libpython = find_libpython()
    backend_directory = _assemble(home / "backends", stub, libpython, environ, repairs=("numpy2.py",))
    return TritonRuntime(
        binary,
        backend_directory,
        source,
        version=requirement().split()[0] if source is RuntimeSource.WHEEL else "",
        stub=backend_directory / "python" / STUB,
        library_directory=backend_directory / "lib" if libpython is not None else None,
        python_executable=Path(sys.executable),
        cache_directory=home / "caches" if (home / "caches").is_dir() else None,
    )


def find_libpython() -> Path | None:
    """The shared library of the running Python, where its own installation has one.

    Without it the dynamic loader may still find one of the same version among the system's libraries.
    """
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    folders = [sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"]
    return next((Path(folder) / name for folder in folders if folder and (Path(folder) / name).is_file()), None)


def loaded_objects(binary: Path, environ: Mapping[str, str]) -> dict[str, str | None]:
    """Shared libraries of a binary by name, with the path each is found at, or `None`.

    Asks the dynamic loader itself, in the environment given, so that run paths are resolved as they will be when
    the binary runs (`ldd` on a symbolic link resolves them differently). The binary's own code does not run.
    """
    output = subprocess.run(
        [str(binary)],
        env={**environ, "LD_TRACE_LOADED_OBJECTS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    objects: dict[str, str | None] = {}
    for line in output.stdout.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        if arrow:
            objects[name] = None if rest.startswith("not found") else rest.rsplit(" (", 1)[0]
    return objects


def stub_python_version(stub: Path, environ: Mapping[str, str]) -> str:
    """Python release a stub is linked with, as in `3.12`; empty when the loader does not say."""
    for name in loaded_objects(stub, environ):
        if name.startswith("libpython3.") and ".so" in name:
            return name.removeprefix("libpython").split(".so")[0]
    return ""


def _assemble(
    backends: Path,
    stub: Path,
    libpython: Path | None,
    environ: Mapping[str, str],
    *,
    repairs: tuple[str, ...] = (),
) -> Path:
    """Put together a backend directory with a python backend and, where there is no native one, our onnxruntime.

    The stub is linked, not copied: its run path to its libraries is relative to where it really is. The python
    backend's library is copied: Triton refuses a python-based backend whose library is outside the directory.
    libpython is linked alone into a folder of its own, so that nothing else of its folder gets into
    `tritonserver`'s library path. `repairs` are files of ours that are appended to the python backend's utilities.
    """
    own = resources.files("serve_app.fleet").joinpath("backends")
    repair = b"".join(b"\n\n" + own.joinpath(name).read_bytes() for name in repairs)
    model = own.joinpath("onnxruntime").joinpath("model.py").read_bytes()
    inputs = [__file__, backends, stub, libpython, sys.version_info[:2], platform.machine()]
    key = hashlib.sha256(repr(inputs).encode() + Path(__file__).read_bytes() + model + repair).hexdigest()[:16]
    parent = _assembly_parent(backends, environ)
    target = parent / f"backends-{key}"
    if target.is_dir():
        return target
    work = Path(tempfile.mkdtemp(prefix=".assembling-", dir=parent))
    try:
        for backend in backends.iterdir():
            if backend.is_dir() and backend.name != "python":
                (work / backend.name).symlink_to(backend)
        python = work / "python"
        python.mkdir()
        for source in (backends / "python").iterdir():
            if source.is_file() and source.name != STUB:
                shutil.copy2(source, python / source.name)
        if repair:
            with (python / "triton_python_backend_utils.py").open("ab") as utilities:
                utilities.write(repair)
        (python / STUB).symlink_to(stub)
        if not (work / "onnxruntime").exists():
            (work / "onnxruntime").mkdir()
            (work / "onnxruntime" / "model.py").write_bytes(model)
        (work / "lib").mkdir()
        if libpython is not None:
            (work / "lib" / libpython.name).symlink_to(libpython)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # Not the loser of a race: somebody else has assembled the same.
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _assembly_parent(backends: Path, environ: Mapping[str, str]) -> Path:
    """The installed release itself, or the cache folder where that cannot be written to."""
    home = backends.parent
    candidates = [home, *(root for root in runtime_roots(environ))]
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise PreflightFailed(
        f"Triton's backend directory cannot be put together: no write access to {' or '.join(map(str, candidates))}.",
        "set SERVE_APP_TRITON_RUNTIME to a folder that can be written to.",
    )
