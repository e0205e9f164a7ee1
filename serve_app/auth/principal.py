"""Whose call is being answered, and what that key may do."""

from __future__ import annotations

import fnmatch
import re
from contextvars import ContextVar
from dataclasses import dataclass, field

from serve_app.auth.scopes import Scope

ALL_MODELS = "*"


@dataclass(frozen=True, slots=True)
class Principal:
    """A key that is known, without its secret.

    Attributes:
        key_id: Name of the key, for logs and error texts.
        scopes: What it grants, those that are included in others too.
        models: Patterns of model names: `*` is any text, `?` any character.
        lane: The lane in which its requests wait; `None`: the default.
        expires_at: Seconds since the epoch; `None`: never.
    """

    key_id: str
    scopes: frozenset[Scope]
    models: tuple[str, ...] = (ALL_MODELS,)
    lane: str | None = None
    expires_at: float | None = None
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = "|".join(fnmatch.translate(pattern) for pattern in self.models)
        object.__setattr__(self, "_pattern", re.compile(text))

    def has_scope(self, scope: Scope) -> bool:
        """Whether the key grants a scope."""
        return scope in self.scopes

    def can_use(self, model_name: str) -> bool:
        """Whether a model is one of the key's."""
        return self._pattern.fullmatch(model_name) is not None

    def can_use_all(self) -> bool:
        """Whether every model is the key's, whatever its name."""
        return ALL_MODELS in self.models


CALLER: ContextVar[Principal | None] = ContextVar("serve_app_caller", default=None)
"""Whose request this task answers.

`None` where nobody asked for a key: authentication is off, the operation is open, or the call came by a handle from
inside the cluster, which is trusted.
"""


def is_visible(model_name: str) -> bool:
    """Whether the caller may learn of a model."""
    caller = CALLER.get()
    return caller is None or caller.can_use(model_name)
