"""Whether every model answers, asked from outside as a client would."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import quote

from serve_app.cli.http_call import Answer, call

LOADING_STATES = ("LOADING", "UNLOADING")


class ReadinessState(str, Enum):
    """What one look found."""

    WAITING = "waiting"
    """Not yet; look again."""

    FAILED = "failed"
    """A model could not be loaded. It may recover, but nothing points to it."""

    READY = "ready"
    """Every model answers that it is ready."""


@dataclass(frozen=True)
class Readiness:
    """What one look found.

    Attributes:
        state: See `ReadinessState`.
        detail: What is waited for, or what failed, for people.
        models: Names of the models that are served, sorted.
    """

    state: ReadinessState
    detail: str = ""
    models: tuple[str, ...] = ()


def look(host: str, port: int, *, timeout_s: float = 5.0) -> Readiness:
    """Ask `GET /v2/health/ready`, then the repository index, then each model; blocks.

    Models that the index calls unloaded on purpose are not waited for.
    """
    health = call("GET", host, port, "/v2/health/ready", timeout_s=timeout_s)
    if health is None or health.status != 200:
        return Readiness(ReadinessState.WAITING, f"/v2/health/ready: {_reason(health)}")
    index = call("POST", host, port, "/v2/repository/index", timeout_s=timeout_s, body={})
    if index is None or index.status != 200 or not isinstance(index.json, list):
        return Readiness(ReadinessState.WAITING, f"/v2/repository/index: {_reason(index)}")
    names, failed = models_to_serve(index.json)
    if failed:
        return Readiness(ReadinessState.FAILED, failed, names)
    for name in names:
        answer = call("GET", host, port, f"/v2/models/{quote(name, safe='')}/ready", timeout_s=timeout_s)
        if answer is None or answer.status != 200:
            return Readiness(ReadinessState.WAITING, f"model {name!r}: {_reason(answer)}", names)
    if not names:
        return Readiness(ReadinessState.WAITING, "the repository index names no model")
    return Readiness(ReadinessState.READY, models=names)


def models_to_serve(index: list[Any]) -> tuple[tuple[str, ...], str]:
    """From a repository index, the models that are or will be served, and why one of them never will.

    Args:
        index: Entries with `name`, `version`, `state` and `reason`, as Triton gives them.

    Returns:
        Names, sorted and each once; and the first load failure in words, empty without one. A model of which one
        version is ready has not failed.
    """
    entries = [entry for entry in index if isinstance(entry, dict) and entry.get("name")]
    ready = {entry["name"] for entry in entries if entry.get("state") == "READY"}
    loading = {entry["name"] for entry in entries if entry.get("state") in LOADING_STATES}
    failed = {
        entry["name"]: _cause(str(entry["reason"]))
        for entry in entries
        if entry.get("state") == "UNAVAILABLE"
        and entry.get("reason") not in (None, "", "unloaded")
        and entry["name"] not in ready | loading
    }
    names = tuple(sorted(ready | loading | set(failed)))
    return names, next((f"model {name!r} failed to load: {reason[:300]}" for name, reason in failed.items()), "")


def _cause(reason: str) -> str:
    """Triton's reason in one line, without the Python traceback that follows the words " At:"."""
    return " ".join(reason.split()).partition(" At: ")[0]


def _reason(answer: Answer | None) -> str:
    if answer is None:
        return "no answer"
    content = answer.json
    text = content.get("error") if isinstance(content, dict) else None
    return f"{answer.status} {str(text or '').splitlines()[0] if text else ''}".strip()
