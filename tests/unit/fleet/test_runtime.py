"""Where tritonserver is looked for, and what is put together around it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from serve_app.errors import PreflightFailed
from serve_app.fleet import install, runtime
from serve_app.fleet.runtime import RuntimeSource, TritonRuntime

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(autouse=True)
def _no_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run inside NVIDIA's container must not find its binary."""
    monkeypatch.setattr(runtime, "CONTAINER_BINARY", tmp_path / "no" / "tritonserver")


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    """A file that may be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def wheel(root: Path, *, python: str = PYTHON) -> Path:
    """An installed release under `root`, with the wheel's layout and empty binaries."""
    release = root / install.release_name()
    home = release / "pytriton" / "tritonserver"
    executable(home / "bin" / "tritonserver")
    executable(home / "python_backend_stubs" / python / runtime.STUB)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        executable(home / "backends" / "python" / name)
    (home / "caches").mkdir()
    (release / install.STAMP).write_text(install.requirement() + "\n", encoding="utf-8")
    return home


def container(home: Path, *, native: bool) -> Path:
    """NVIDIA's layout."""
    executable(home / "bin" / "tritonserver")
    executable(home / "backends" / "python" / runtime.STUB)
    executable(home / "backends" / "python" / "libtriton_python.so")
    executable(home / "backends" / "tensorrt" / "libtriton_tensorrt.so")
    (home / "TRITON_VERSION").write_text("2.61.0\n", encoding="utf-8")
    if native:
        executable(home / "backends" / "onnxruntime" / "libtriton_onnxruntime.so")
    return home


def test_order(tmp_path: Path) -> None:
    """The setting wins over TRITON_SERVER_PATH, which wins over PATH, which wins over the installed wheel."""
    environ = {"SERVE_APP_TRITON_RUNTIME": str(tmp_path / "wheel"), "PATH": ""}
    with pytest.raises(PreflightFailed, match=r"No tritonserver on this machine.*serve_app\.fleet\.install"):
        TritonRuntime.find(environ=environ)
    wheel(tmp_path / "wheel")
    assert TritonRuntime.find(environ=environ).source is RuntimeSource.WHEEL
    on_path = executable(tmp_path / "bin" / "tritonserver")
    environ["PATH"] = str(tmp_path / "bin")
    found = TritonRuntime.find(environ=environ)
    assert (found.source, found.tritonserver) == (RuntimeSource.PATH, on_path)
    named = executable(tmp_path / "named" / "bin" / "tritonserver")
    environ["TRITON_SERVER_PATH"] = str(tmp_path / "named")
    found = TritonRuntime.find(environ=environ)
    assert (found.source, found.tritonserver) == (RuntimeSource.ENVIRONMENT, named)
    found = TritonRuntime.find(str(on_path), environ=environ)
    assert (found.source, found.tritonserver) == (RuntimeSource.SETTING, on_path)
    with pytest.raises(PreflightFailed, match="the setting `tritonserver` is '/nowhere'"):
        TritonRuntime.find("/nowhere", environ=environ)


def test_the_wheels_backend_directory(tmp_path: Path) -> None:
    """The stub of this Python is linked, the backend's library copied, our onnxruntime added; once, however often."""
    home = wheel(tmp_path)
    environ = {"SERVE_APP_TRITON_RUNTIME": str(tmp_path), "PATH": ""}
    found = TritonRuntime.find(environ=environ)
    python = found.backend_directory / "python"
    assert (python / runtime.STUB).is_symlink()
    assert (python / runtime.STUB).resolve() == home / "python_backend_stubs" / PYTHON / runtime.STUB
    assert not (python / "libtriton_python.so").is_symlink()
    assert "class TritonPythonModel" in (found.backend_directory / "onnxruntime" / "model.py").read_text()
    assert found.python_executable == Path(sys.executable)
    assert found.cache_directory == home / "caches"
    assert TritonRuntime.find(environ=environ) == found
    assert not list(home.glob(".assembling-*"))


def test_a_python_without_a_stub_is_refused(tmp_path: Path) -> None:
    """The error lists the Pythons that there are stubs for."""
    wheel(tmp_path, python="3.10" if PYTHON != "3.10" else "3.11")
    with pytest.raises(PreflightFailed, match=rf"no stub for Python {PYTHON}\. Fix: use one of Python 3\.1"):
        TritonRuntime.find(environ={"SERVE_APP_TRITON_RUNTIME": str(tmp_path), "PATH": ""})


@pytest.mark.parametrize("native", [True, False])
def test_nvidias_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """A native onnxruntime backend is used as it is; where there is none, ours is put beside the others."""
    home = container(tmp_path / "triton", native=native)
    monkeypatch.setattr(runtime, "loaded_objects", lambda binary, environ: {"libpython3.99.so.1.0": "/x"})
    found = TritonRuntime.find(str(home), environ={"PATH": ""})
    assert found.version == "2.61.0"
    assert found.python_executable is None  # The stub is another Python's.
    if native:
        assert found.backend_directory == home / "backends"
    else:
        assert (found.backend_directory / "onnxruntime" / "model.py").is_file()
        assert (found.backend_directory / "tensorrt").resolve() == home / "backends" / "tensorrt"
    monkeypatch.setattr(runtime, "loaded_objects", lambda binary, environ: {f"libpython{PYTHON}.so.1.0": "/x"})
    assert TritonRuntime.find(str(home), environ={"PATH": ""}).python_executable == Path(sys.executable)


def test_environment(tmp_path: Path) -> None:
    """Ours comes first in the library path, the user's choices for malloc stay, and the rest is passed on."""
    found = TritonRuntime(
        tmp_path, tmp_path, RuntimeSource.WHEEL, library_directory=Path("/lib/py"), python_executable=Path("/v/python")
    )
    environ = {
        "LD_LIBRARY_PATH": "/cuda",
        "MALLOC_TRIM_THRESHOLD_": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "PATH": "/usr/bin",
    }
    assert found.environment(environ) == {
        "LD_LIBRARY_PATH": "/lib/py:/cuda",
        "PYTHONEXECUTABLE": "/v/python",
        "PATH": "/v:/usr/bin",
        "MALLOC_TRIM_THRESHOLD_": "1",
        "MALLOC_MMAP_THRESHOLD_": "67108864",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    assert found.environment({})["LD_LIBRARY_PATH"] == "/lib/py"


def test_the_loader_is_asked_and_not_the_program() -> None:
    """Libraries come from the dynamic loader; the binary's own code does not run."""
    objects = runtime.loaded_objects(Path("/bin/sh"), {})
    assert "libc.so.6" in objects
    assert os.path.isabs(objects["libc.so.6"] or "")


def test_the_pin_is_one_line_with_hashes() -> None:
    """One exact version with a sha256 for each architecture, in package data."""
    assert re.fullmatch(r"nvidia-pytriton==[\d.]+( --hash=sha256:[0-9a-f]{64}){2}", install.requirement())


def test_install_is_idempotent_and_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed install leaves nothing, a good one is stamped last, and a second one does not run the installer."""
    runs: list[Path] = []

    def unpack(target: Path, *, environ: object) -> None:
        runs.append(target)
        (target / "file").touch()
        if len(runs) == 1:
            raise PreflightFailed("no network", "get one")

    monkeypatch.setattr(install, "_run_installer", unpack)
    with pytest.raises(PreflightFailed, match="no network"):
        install.install_runtime(tmp_path)
    assert list(tmp_path.iterdir()) == []
    lines: list[str] = []
    release = install.install_runtime(tmp_path, report=lines.append)
    assert install.installed_release(tmp_path) == release
    assert (release / "file").exists()
    assert install.install_runtime(tmp_path, report=lines.append) == release
    assert len(runs) == 2
    assert "Installing nvidia-pytriton==" in lines[0]
    assert "is installed" in lines[-1]
    assert [path.name for path in tmp_path.iterdir()] == [release.name]
    (release / install.STAMP).unlink()
    assert install.install_runtime(tmp_path) == release
    assert len(runs) == 3


def test_install_says_when_it_has_nowhere_to_go(tmp_path: Path) -> None:
    """No folder to write to is a sentence and not a stack trace, also on the command line."""
    (tmp_path / "file").touch()
    with pytest.raises(PreflightFailed, match=r"no write access to .*SERVE_APP_TRITON_RUNTIME"):
        install.install_runtime(environ={"SERVE_APP_TRITON_RUNTIME": str(tmp_path / "file" / "x")})
    assert install.main([str(tmp_path / "file" / "x")]) == 1
