"""Keys in force: found by their hashes, and read again when their file changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from serve_app.auth.key_store import KeyStore
from serve_app.auth.keys_file import hash_of
from serve_app.clock import ManualClock
from serve_app.errors import PreflightFailed


def text_of(*keys: str, **more: object) -> str:
    return yaml.safe_dump({"keys": [{"id": key, "sha256": hash_of(key), "scopes": ["infer"], **more} for key in keys]})


class Files:
    """A folder with a keys file and a store over it, whose time is the test's."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.yaml"
        self.path.write_text(text_of("first"))
        self.clock, self.wall = ManualClock(), 2e9
        self.store = KeyStore(path=self.path, where="the file", clock=self.clock, now=lambda: self.wall)

    def finds(self, *keys: str) -> list[bool]:
        self.clock.advance(1.5)
        return [self.store.find(key) is not None for key in keys]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_a_key_is_found_by_its_hash(files: Files) -> None:
    """The very key, and nothing like it."""
    found = files.store.find("first")
    assert found is not None
    assert found.key_id == "first"
    assert [files.store.find(key) for key in ("firs", "first ", "", "FIRST", hash_of("first"), "\udcff")] == [None] * 6


def write(path: Path, text: str) -> None:
    path.write_text(text)


def rename(path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)


@pytest.mark.parametrize("change", [write, rename])
def test_a_changed_file_is_read_again(files: Files, change: Callable[[Path, str], None]) -> None:
    """Written in place or replaced; looked at once a second, and read only when it has changed."""
    assert files.finds("first", "second") == [True, False]
    assert files.store.statistics()["num_loads"] == 1
    change(files.path, text_of("second"))
    assert files.finds("first", "second") == [False, True]
    assert files.store.get("first") is None
    assert files.finds("second") == [True]
    assert files.store.statistics()["num_loads"] == 2


def test_a_mounted_secret_is_read_again(tmp_path: Path) -> None:
    """Kubernetes swaps the link to a folder in which the file lies; size and time may be the same."""
    for version, key in (("v1", "one"), ("v2", "two")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys.yaml").write_text(text_of(key))
        os.utime(tmp_path / version / "keys.yaml", (1e9, 1e9))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    clock = ManualClock()
    store = KeyStore(path=tmp_path / "keys.yaml", where="the file", clock=clock)
    assert store.find("one") is not None
    (tmp_path / "..data_tmp").symlink_to("v2")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    clock.advance(1.5)
    assert (store.find("one"), store.find("two") is not None) == (None, True)


def test_a_file_that_was_just_written_is_looked_at_once_more(files: Files) -> None:
    """Two changes within one tick of the file system's clock leave one time stamp."""
    status = files.path.stat()
    files.wall = status.st_mtime + 0.5
    files.path.write_text(text_of("other"))
    assert files.finds("other") == [True]
    files.path.write_text(text_of("again"))
    os.utime(files.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert files.finds("other", "again") == [False, True]


@pytest.mark.parametrize("content", [None, "keys: [", "keys: [{id: x}]", "\0" * 10, "x" * (5 * 1024 * 1024)])
def test_a_file_that_has_become_wrong_changes_nothing(
    files: Files, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A slip locks nobody out and lets nobody in; it is said once, and forgotten when the file is right again."""
    if content is None:
        files.path.unlink()
    else:
        files.path.write_text(content)
    assert files.finds("first", "second") == [True, False]
    assert files.finds("first", "second") == [True, False]
    assert files.store.statistics()["problem"]
    assert "[stale]" in repr(files.store)
    assert len(caplog.records) == 1
    files.path.write_text(text_of("second"))
    assert files.finds("first", "second") == [False, True]
    assert not files.store.statistics()["problem"]


def test_an_empty_list_takes_every_key_away(files: Files) -> None:
    """How to lock everybody out."""
    files.path.write_text("keys: []")
    assert files.finds("first") == [False]


def test_a_key_expires(tmp_path: Path) -> None:
    """At that very second, with no change of the file."""
    now = [1e9]
    text = text_of("key", expires="2001-09-09T01:46:45Z")
    store = KeyStore(text=text, where="it", clock=ManualClock(), now=lambda: now[0])
    assert store.find("key") is not None
    now[0] += 5.0
    assert store.find("key") is None
    assert store.get("key") is None


def test_a_start_without_readable_keys_fails(tmp_path: Path) -> None:
    """Nothing is served rather than everything to everybody."""
    path = tmp_path / "keys.yaml"
    with pytest.raises(PreflightFailed, match="cannot be read"):
        KeyStore(path=path, where="the file", clock=ManualClock())
    path.write_text("keys: 1")
    with pytest.raises(PreflightFailed, match="wrong at keys"):
        KeyStore(path=path, where="the file", clock=ManualClock())


def test_a_file_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    """Whoever writes it has every right there is."""
    path = tmp_path / "keys.yaml"
    path.write_text(text_of("a"))
    path.chmod(0o666)
    with pytest.raises(PreflightFailed, match="written by every user"):
        KeyStore(path=path, where="the file", clock=ManualClock())
