"""The keys in force: read at the start, read again when their file changes, asked once per request."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from serve_app.auth.keys_file import MAX_FILE_BYTES, KeyEntry, parse_keys
from serve_app.auth.principal import Principal
from serve_app.clock import Clock
from serve_app.errors import PreflightFailed

logger = logging.getLogger(__name__)

# A file that was changed so shortly before it was read may be changed again with no new time stamp.
_UNSETTLED_S = 2.0

_Signature = tuple[int, int, int, int]


class KeySet:
    """Keys by their hashes; does not change.

    Args:
        entries: No two with one hash.
    """

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        # By part of the hash, so that the time a look-up takes says no more than that part of a hash, which is no
        # help in finding a key; the rest is compared in constant time.
        self._keys: dict[bytes, list[tuple[bytes, Principal]]] = {}
        self._by_id: dict[str, Principal] = {}
        for entry in entries:
            digest, principal = bytes.fromhex(entry.sha256), entry.principal()
            self._keys.setdefault(digest[:4], []).append((digest, principal))
            self._by_id[entry.id] = principal

    def find(self, key: str) -> Principal | None:
        """Whose key this is; `None` when it is nobody's."""
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        found = None
        for known, principal in self._keys.get(digest[:4], ()):
            if hmac.compare_digest(known, digest):
                found = principal
        return found

    def get(self, key_id: str) -> Principal | None:
        """The key of that name."""
        return self._by_id.get(key_id)

    def __len__(self) -> int:
        return len(self._by_id)


class KeyStore:
    """Where keys are looked up.

    A file is looked at again when a request comes and the last look is old enough: by its target's identity, size and
    time, so that one which is replaced by renaming, by writing, or as Kubernetes replaces a mounted secret (by
    pointing a link elsewhere) is read again. A file that has become wrong, or has gone, leaves the keys that are in
    force as they are, and the log says so; to take every key away write `keys: []`.

    Args:
        path: The file; `None` where `text` is given.
        text: The keys themselves, which then never change.
        where: What the source is called in error texts.
        clock: For the time between two looks.
        check_interval_s: Between two looks, in seconds.
        more: Keys beside those of the source.
        now: Seconds since the epoch, for keys that expire.

    Raises:
        PreflightFailed: The keys cannot be read, or are not what they must be.
    """

    def __init__(
        self,
        *,
        path: Path | None = None,
        text: str = "",
        where: str,
        clock: Clock,
        check_interval_s: float = 1.0,
        more: Sequence[KeyEntry] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._where = where
        self._clock = clock
        self._check_interval_s = check_interval_s
        self._now = now
        self._more = more
        self._signature: _Signature | None = None
        self._num_loads = 0
        self._problem = ""
        self._keys = self._read() if path is not None else KeySet([*more, *parse_keys(text, where=where).keys])
        self._checked_at = clock.now()

    def find(self, key: str) -> Principal | None:
        """Whose key this is now; `None` when it is nobody's, or has expired."""
        self._refresh()
        return self._unless_expired(self._keys.find(key))

    def get(self, key_id: str) -> Principal | None:
        """The key of that name as it is now; for calls that outlast a change of the file."""
        self._refresh()
        return self._unless_expired(self._keys.get(key_id))

    def _unless_expired(self, found: Principal | None) -> Principal | None:
        if found is not None and found.expires_at is not None and self._now() >= found.expires_at:
            return None
        return found

    def _refresh(self) -> None:
        if self._path is None or self._clock.now() - self._checked_at < self._check_interval_s:
            return
        self._checked_at = self._clock.now()
        try:
            if _signature(os.stat(self._path)) == self._signature:
                self._problem = ""
                return
            before, self._keys = len(self._keys), self._read()
        except (OSError, PreflightFailed) as problem:
            said = problem.problem if isinstance(problem, PreflightFailed) else f"{self._where} cannot be read."
            if said != self._problem:
                logger.error("%s The %d keys in force stay.", said, len(self._keys))
            self._problem = said
            return
        self._problem = ""
        if self._signature is not None:
            logger.info("%s read again: %d keys, %d before", self._where, len(self._keys), before)

    def _read(self) -> KeySet:
        path, where = self._path, self._where
        assert path is not None
        self._signature = None
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                content = file.read(MAX_FILE_BYTES + 1)
            text = content.decode()
        except OSError as problem:
            fix = "name a file that this user can read in `auth.keys_file`."
            raise PreflightFailed(f"{where} cannot be read ({problem.strerror}).", fix) from None
        except UnicodeDecodeError:
            raise PreflightFailed(f"{where} is not UTF-8 text.", "write it as YAML or JSON.") from None
        if len(content) > MAX_FILE_BYTES:
            raise PreflightFailed(f"{where} has more than {MAX_FILE_BYTES} bytes.", "name a file of keys.")
        if stat.S_IMODE(status.st_mode) & stat.S_IWOTH:
            raise PreflightFailed(f"{where} can be written by every user.", f"run `chmod o-w {path}`.")
        keys = KeySet([*self._more, *parse_keys(text, where=where).keys])
        if self._now() - status.st_mtime > _UNSETTLED_S:
            self._signature = _signature(status)
        self._num_loads += 1
        return keys

    def statistics(self) -> dict[str, object]:
        """How many keys are in force, how often they were read, and what is wrong with the file now."""
        return {"num_keys": len(self._keys), "num_loads": self._num_loads, "problem": self._problem}

    def __repr__(self) -> str:
        return f"<KeyStore {self._where} [{'stale' if self._problem else 'ok'}] {len(self._keys)} keys>"


def _signature(status: os.stat_result) -> _Signature:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
