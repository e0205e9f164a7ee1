"""Keys for tests of authentication, one of each kind, and the file that holds them."""

from __future__ import annotations

from pathlib import Path

import yaml

from serve_app.auth.key_store import KeyStore
from serve_app.auth.keys_file import hash_of
from serve_app.auth.scopes import Scope
from serve_app.clock import ManualClock

# By id: the secret, and what stands in the file beside its hash.
KEYS: dict[str, tuple[str, dict[str, object]]] = {
    "runner": ("sak_runner-secret-0001", {"scopes": ["infer"], "models": ["iden*"], "lane": "batch"}),
    "reader": ("sak_reader-secret-0002", {"scopes": ["read"]}),
    "loader": ("sak_loader-secret-0003", {"scopes": ["load"], "models": ["identity", "other"]}),
    "tuner": ("sak_tuner-secret-0004", {"scopes": ["settings"]}),
    "small-tuner": ("sak_small-tuner-secret-0005", {"scopes": ["settings"], "models": ["identity"]}),
    "mapper": ("sak_mapper-secret-0006", {"scopes": ["shared_memory", "infer"]}),
    "admin": ("sak_admin-secret-0007", {"scopes": ["admin"]}),
    "old": ("sak_old-secret-0008", {"scopes": ["admin"], "expires": "2020-01-01T00:00:00Z"}),
}
WRONG = "sak_wrong-secret-0009"
SECRETS = [secret for secret, _ in KEYS.values()] + [WRONG]


# A key with the scope that an operation needs, and one without it.
RIGHT = {
    Scope.READ: "reader",
    Scope.INFER: "runner",
    Scope.LOAD: "loader",
    Scope.SETTINGS: "tuner",
    Scope.SHARED_MEMORY: "mapper",
    Scope.ADMIN: "admin",
}
TOO_SMALL = {
    Scope.INFER: "reader",
    Scope.LOAD: "runner",
    Scope.SETTINGS: "loader",
    Scope.SHARED_MEMORY: "tuner",
    Scope.ADMIN: "tuner",
}


def key_of(key_id: str) -> str:
    """The secret of a key."""
    return KEYS[key_id][0]


def keys_text() -> str:
    """The content of a file with all of `KEYS`."""
    entries = [{"id": key_id, "sha256": hash_of(secret), **rest} for key_id, (secret, rest) in KEYS.items()]
    return yaml.safe_dump({"keys": entries})


def write_keys(folder: Path) -> Path:
    """That file, in a folder."""
    path = folder / "keys.yaml"
    path.write_text(keys_text(), encoding="utf-8")
    return path


def key_store() -> KeyStore:
    """The same without a file."""
    return KeyStore(text=keys_text(), where="the keys of the test", clock=ManualClock())
