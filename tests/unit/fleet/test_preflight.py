"""Each check refuses what would fail later, with the problem and the fix, and passes on this machine."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from serve_app.errors import PreflightFailed
from serve_app.fleet import preflight
from serve_app.fleet.runtime import RuntimeSource, TritonRuntime


def test_this_machine_passes(tmp_path: Path) -> None:
    """The defaults look at the machine itself, and a machine that runs these tests is good enough."""
    preflight.check_python()
    preflight.check_architecture()
    preflight.check_glibc()
    preflight.check_shared_memory()
    preflight.check_memory()
    preflight.check_disk(tmp_path / "new" / "folder")
    preflight.check_port("127.0.0.1", 0)
    preflight.check_socket_path(str(tmp_path)[:60])


@pytest.mark.parametrize("version", [(3, 9), (3, 14), (2, 7)])
def test_python(version: tuple[int, int]) -> None:
    """Pythons without Ray or without a stub are refused by their number."""
    with pytest.raises(PreflightFailed, match=rf"Python {version[0]}\.{version[1]}\. Fix: use Python 3\.10"):
        preflight.check_python(version)


@pytest.mark.parametrize(("machine", "system"), [("riscv64", "Linux"), ("arm64", "Darwin"), ("AMD64", "Windows")])
def test_architecture(machine: str, system: str) -> None:
    """Machines that the wheel is not built for are refused; servers elsewhere are the way out."""
    with pytest.raises(PreflightFailed, match=rf"{system} on {machine}.*endpoints:"):
        preflight.check_architecture(machine, system)


@pytest.mark.parametrize(("version", "is_good"), [("2.35", True), ("3.0", True), ("2.34", False), ("", False)])
def test_glibc(version: str, is_good: bool) -> None:
    """An older C library, or none from GNU, is refused before the loader fails on it."""
    if is_good:
        preflight.check_glibc(version)
    else:
        with pytest.raises(PreflightFailed, match=r"glibc.* Fix: use"):
            preflight.check_glibc(version)


def test_shared_memory(tmp_path: Path) -> None:
    """A /dev/shm that is full, or that cannot be written to, is refused."""
    with pytest.raises(PreflightFailed, match=r"MiB free; at least .*--shm-size"):
        preflight.check_shared_memory(tmp_path, min_bytes=2**62)
    with pytest.raises(PreflightFailed, match="cannot be written to"):
        preflight.check_shared_memory(tmp_path / "nowhere")


def test_memory_and_disk(tmp_path: Path) -> None:
    """Too little of either is refused with both numbers."""
    with pytest.raises(PreflightFailed, match="100 MiB of memory are available; at least 512 MiB"):
        preflight.check_memory(100 * 2**20)
    with pytest.raises(PreflightFailed, match=r"MiB free; at least"):
        preflight.check_disk(tmp_path, min_bytes=2**62)
    (tmp_path / "file").touch()
    with pytest.raises(PreflightFailed, match="cannot be written to"):
        preflight.check_disk(tmp_path / "file" / "below")


def test_a_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a container, what is left of its limit is what is available, page cache given back included."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    assert preflight.available_memory_bytes(tmp_path) == 10_000
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 200\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.available_memory_bytes(tmp_path) == 10_000
    (tmp_path / "memory.max").write_text("1000\n")
    assert preflight.available_memory_bytes(tmp_path) == 500


def test_ports() -> None:
    """A port that something listens on is refused by name, and with the process that has it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PreflightFailed, match=rf"HTTP 127\.0\.0\.1:{port} is taken by process \d+ \("):
            preflight.check_port("127.0.0.1", port, what="HTTP")
    preflight.check_port("127.0.0.1", port)
    with pytest.raises(PreflightFailed, match="cannot be used"):
        preflight.check_port("192.0.2.1", 0)


def test_socket_paths() -> None:
    """The kernel's limit of a socket path is known before the bind fails."""
    preflight.check_socket_path("/" + "x" * 106)
    with pytest.raises(PreflightFailed, match="has 108 bytes; the kernel takes 107"):
        preflight.check_socket_path("/" + "x" * 107)


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (
            {"libpython3.12.so.1.0": None},
            r"libpython3\.12\.so\.1\.0 is not on this machine.*apt install libpython3\.12",
        ),
        ({"libcudart-1.so": None, "libc.so.6": "/lib/libc.so.6"}, r"lacks the shared libraries libcudart-1\.so"),
    ],
)
def test_stub_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: dict[str, str | None], text: str
) -> None:
    """A stub that cannot be loaded is refused with the name of what it lacks: tritonserver would hang on it."""
    stub = tmp_path / "stub"
    runtime = TritonRuntime(tmp_path, tmp_path, RuntimeSource.SETTING, stub=stub)
    with pytest.raises(PreflightFailed, match="stub is missing"):
        preflight.check_stub(runtime)
    stub.touch()
    monkeypatch.setattr(preflight, "loaded_objects", lambda binary, environ: missing)
    with pytest.raises(PreflightFailed, match=text):
        preflight.check_stub(runtime)
    monkeypatch.setattr(preflight, "loaded_objects", lambda binary, environ: {"libc.so.6": "/lib/libc.so.6"})
    preflight.check_stub(runtime)
    preflight.check_stub(TritonRuntime(tmp_path, tmp_path, RuntimeSource.SETTING))
