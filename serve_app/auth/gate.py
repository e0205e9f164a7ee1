"""Lets calls in or refuses them, and counts; what HTTP and gRPC both ask."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from serve_app.auth.credentials import Credentials
from serve_app.auth.decision import Verdict, decide
from serve_app.auth.key_store import KeyStore
from serve_app.auth.keys_file import KeyEntry
from serve_app.auth.principal import Principal
from serve_app.auth.scopes import Operation, Scope
from serve_app.clock import Clock
from serve_app.errors import PermissionDenied, PreflightFailed, Unauthenticated
from serve_app.settings import AuthSettings, home, process_environment

logger = logging.getLogger(__name__)

LAUNCHER_KEY = "SERVE_APP_LAUNCHER_KEY_SHA256"
"""Variable with the hash of a key of scope `read`, with which `serve-app up` and `status` look at what they started."""

_AUDITED = frozenset(
    {Operation.LOAD_MODEL, Operation.MODEL_SETTINGS, Operation.SERVER_SETTINGS, Operation.SHARED_MEMORY}
)


class Keys(Protocol):
    """What a gate asks of keys. `KeyStore` is one."""

    def find(self, key: str) -> Principal | None:
        """Whose key this is."""
        ...

    def get(self, key_id: str) -> Principal | None:
        """The key of that name."""
        ...


class Gate:
    """Decides on each call, by the keys in force at that moment.

    Args:
        keys: Borrowed.
        is_health_open: Whether the server's health is told without a key.
    """

    def __init__(self, keys: Keys, *, is_health_open: bool = True) -> None:
        self._keys = keys
        self._is_health_open = is_health_open
        self._num_allowed = self._num_unauthenticated = self._num_forbidden = 0

    def admit(self, credentials: Credentials | None, operation: Operation, model_name: str = "") -> Principal | None:
        """Let a call in.

        Args:
            credentials: What the client sent.
            operation: What it asks.
            model_name: Of which model.

        Returns:
            Whose call it is; `None` for a call that needs no key and brought none.

        Raises:
            Unauthenticated: No valid key came, and one is needed.
            PermissionDenied: The key is not good for this.
        """
        principal = None if credentials is None else self._keys.find(credentials.key)
        self._decide(principal, operation, model_name)
        return principal

    def admit_again(self, principal: Principal | None, operation: Operation, model_name: str = "") -> Principal | None:
        """Let one more call of a stream in, if the key that opened it is still good for it; as `admit`."""
        principal = None if principal is None else self._keys.get(principal.key_id)
        self._decide(principal, operation, model_name)
        return principal

    def _decide(self, principal: Principal | None, operation: Operation, model_name: str) -> None:
        decision = decide(principal, operation, model_name, is_health_open=self._is_health_open)
        if decision.verdict is Verdict.ALLOW:
            self._num_allowed += 1
            if operation in _AUDITED and principal is not None:
                logger.info("key %r: %s %s", principal.key_id, operation.value, repr(model_name) if model_name else "")
        elif decision.verdict is Verdict.UNAUTHENTICATED:
            self._num_unauthenticated += 1
            raise Unauthenticated(decision.reason)
        else:
            self._num_forbidden += 1
            logger.info("refused: %s", decision.reason)
            raise PermissionDenied(decision.reason)

    def refuse_forgery(self, principal: Principal | None) -> None:
        """Refuse a call that a browser made on behalf of another site with the key that it keeps.

        Raises:
            PermissionDenied: Always.
        """
        self._num_forbidden += 1
        name = "" if principal is None else f" (key {principal.key_id!r})"
        raise PermissionDenied(f"a page of another site may not use the browser's key{name}; send it as a Bearer token")

    def statistics(self) -> dict[str, int]:
        """Calls let in, those without a valid key, and those whose key was too small."""
        return {
            "num_allowed": self._num_allowed,
            "num_unauthenticated": self._num_unauthenticated,
            "num_forbidden": self._num_forbidden,
        }

    def __repr__(self) -> str:
        return (
            f"<Gate {self._keys!r} Calls: {self._num_allowed} allowed, {self._num_unauthenticated} without a key, "
            f"{self._num_forbidden} forbidden>"
        )


def open_gate(settings: AuthSettings, *, clock: Clock, environ: Mapping[str, str] | None = None) -> Gate | None:
    """The gate that the settings ask for; `None` when everyone may call.

    Args:
        settings: Where keys come from.
        clock: See `KeyStore`.
        environ: The environment of the replicas; this process's own when not given.

    Raises:
        PreflightFailed: The keys cannot be read, or are not what they must be.
    """
    environ = process_environment() if environ is None else environ
    if settings.keys_file is not None:
        path = (
            home(environ) / Path(settings.keys_file).expanduser()
        )  # not resolved: a mounted secret is a link that moves
        where = f"the keys file {path}"
        interval_s = settings.reload_interval_s
        keys = KeyStore(path=path, where=where, clock=clock, check_interval_s=interval_s, more=_launchers(environ))
    elif settings.keys_env is not None:
        text = environ.get(settings.keys_env)
        if text is None:
            raise PreflightFailed(
                f"The environment variable {settings.keys_env} is not set.",
                "set it for the replicas to the content of a keys file, or name a file in `auth.keys_file`.",
            )
        where = f"the variable {settings.keys_env}"
        keys = KeyStore(text=text, where=where, clock=clock, more=_launchers(environ))
    else:
        return None
    return Gate(keys, is_health_open=settings.is_health_open)


def _launchers(environ: Mapping[str, str]) -> list[KeyEntry]:
    sha256 = environ.get(LAUNCHER_KEY)
    return [KeyEntry(id="serve-app-up", sha256=sha256, scopes=[Scope.READ])] if sha256 else []
