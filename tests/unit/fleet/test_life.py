"""Names that tell whether their owner still lives, and the sweep of those whose owner does not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from serve_app.errors import PreflightFailed
from serve_app.fleet.life import LifeTag, make_private, prune_logs, sweep


def stale(number: int = 0) -> LifeTag:
    """A tag of this process id, from an owner that had it before."""
    own = LifeTag.new()
    return LifeTag(own.pid_namespace, own.owner_pid, own.owner_start - 1, number)


def test_tags() -> None:
    """Tags are unique, read back from names they begin, and stale only when their owner is gone for certain."""
    first, second = LifeTag.new(), LifeTag.new()
    assert first != second
    assert LifeTag.parse(f"{first.shm_prefix}abc") == first
    assert LifeTag.parse("serve_app_x") is None
    assert LifeTag.parse(f"other_{first}") is None
    assert not first.is_stale()
    assert stale().is_stale()
    # A container with its own process ids shares our /dev/shm: we cannot know whether its owner lives.
    assert not LifeTag(first.pid_namespace + 1, 2**22 + 1, 1, 0).is_stale()
    assert len(str(first)) < 60


def test_sweep_removes_what_is_stale_and_nothing_else(tmp_path: Path) -> None:
    """Shared memory and sockets of dead owners go; those of the living, of other programs, and logs stay."""
    shm, state = tmp_path / "shm", tmp_path / "state"
    for folder in (shm, state):
        folder.mkdir()
    dead, living = stale(), LifeTag.new()
    for path in (
        shm / f"{dead.shm_prefix}1",
        shm / f"{living.shm_prefix}1",
        shm / "somebody_elses",
        state / f"{dead}.sock:8001",
        state / f"{living}.sock:8001",
        state / f"{dead}.log",
    ):
        path.touch()
    removed = sweep(state, shm_dir=shm)
    assert sorted(removed) == sorted([f"{dead.shm_prefix}1", f"{dead}.sock:8001"])
    assert {path.name for path in shm.iterdir()} == {f"{living.shm_prefix}1", "somebody_elses"}
    assert {path.name for path in state.iterdir()} == {f"{living}.sock:8001", f"{dead}.log"}
    assert sweep(tmp_path / "nowhere", shm_dir=shm) == []


def test_old_logs_are_pruned(tmp_path: Path) -> None:
    """The newest logs of ended servers are kept; logs of other living processes are not touched."""
    other = LifeTag(LifeTag.new().pid_namespace + 1, 1, 1, 1)
    (tmp_path / f"{other}.log").touch()
    now = time.time()
    for number in range(5):
        path = tmp_path / f"{stale(number)}.log"
        path.touch()
        os.utime(path, (now - number, now - number))
    prune_logs(tmp_path, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {f"{stale(0)}.log", f"{stale(1)}.log", f"{other}.log"}


def test_the_folder_is_this_users_alone(tmp_path: Path) -> None:
    """Sockets and logs lie in it; one that somebody else could have made is not used."""
    folder = tmp_path / "a" / "state"
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(PreflightFailed, match="not a folder of this user"):
        make_private(link)
