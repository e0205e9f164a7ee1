"""The form in which keys are written down, and how a new key is made.

```yaml
keys:
  - id: search-team
    sha256: 8c6976e5b5410415bde908bd4dee15dfb167a9c873fc4bb8a81f6f2ab448a918
    scopes: [infer]
    models: ["minilm", "search-*"]
    lane: interactive                  # optional
    expires: 2027-01-31T00:00:00Z      # optional
```
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime
from typing import Annotated

import yaml
from pydantic import AwareDatetime, Field, StringConstraints, ValidationError

from serve_app.auth.principal import ALL_MODELS, Principal
from serve_app.auth.scopes import Scope
from serve_app.errors import PreflightFailed
from serve_app.settings import MIB, Name, Settings

MAX_FILE_BYTES = 4 * MIB
"""Some 20,000 keys."""

KEY_PREFIX = "sak_"
"""What made keys begin with, so that scanners of source code and logs can know them."""

_KEY_BYTES = 32

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ModelPattern = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._*?-]+$", max_length=128)]


class KeyEntry(Settings):
    """One key.

    Attributes:
        id: Name for logs and error texts.
        sha256: Hexadecimal SHA-256 of the key.
        scopes: What it is good for.
        models: Patterns of the model names it is good for.
        lane: The lane in which its requests wait.
        expires: From when on it is refused; with a time zone.
    """

    id: Name
    sha256: Sha256
    scopes: list[Scope] = Field(min_length=1)
    models: list[ModelPattern] = Field(default=[ALL_MODELS], min_length=1)
    lane: Name | None = None
    expires: AwareDatetime | None = None

    def principal(self) -> Principal:
        """The key without its hash."""
        return Principal(
            key_id=self.id,
            scopes=frozenset().union(*(scope.includes() for scope in self.scopes)),
            models=tuple(self.models),
            lane=self.lane,
            expires_at=None if self.expires is None else self.expires.timestamp(),
        )


class KeysDocument(Settings):
    """A whole file.

    Attributes:
        keys: No two with one id or one hash.
    """

    keys: list[KeyEntry]


def parse_keys(text: str, *, where: str) -> KeysDocument:
    """Read YAML or JSON.

    Args:
        text: The content.
        where: Its name, for error texts; they never quote the content, for it may be a key put in the wrong place.

    Raises:
        PreflightFailed: It is not what it must be; says where.
    """
    try:
        document = KeysDocument.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark is not None else ""
        raise _wrong(where, f"is neither YAML nor JSON{line}") from None
    except ValidationError as problem:
        first = problem.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        said = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise _wrong(where, f"is wrong at {place}: {said}") from None
    for what in ("id", "sha256"):
        seen: dict[str, str] = {}
        for entry in document.keys:
            if getattr(entry, what) in seen:
                raise _wrong(where, f"has two keys with one {what}: {seen[getattr(entry, what)]!r} and {entry.id!r}")
            seen[getattr(entry, what)] = entry.id
    return document


def _wrong(where: str, what: str) -> PreflightFailed:
    return PreflightFailed(f"{where} {what}.", "correct it; `serve-app keys check FILE` tells whether it is right.")


def hash_of(key: str) -> str:
    """What stands in the file for a key.

    A plain hash, since keys are random numbers of 256 bits: nobody guesses one, however fast the hash. Do not use
    it for passwords that people think up.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """A key that nobody has had before."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def entry_text(entry: KeyEntry, *, indent: str = "  ") -> str:
    """The lines for the file, after `indent`."""
    content: dict[str, object] = {
        "id": entry.id,
        "sha256": entry.sha256,
        "scopes": [scope.value for scope in entry.scopes],
        "models": entry.models,
    }
    if entry.lane is not None:
        content["lane"] = entry.lane
    if entry.expires is not None:
        content["expires"] = _iso(entry.expires)
    text: str = yaml.safe_dump([content], sort_keys=False, default_flow_style=None, width=1000)
    return "".join(f"{indent}{line}\n" for line in text.splitlines())


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")
