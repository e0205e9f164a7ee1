"""Whether every model answers, asked from outside as a client would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import quote, unquote

from serve_app.cli.http_call import Answer, call

V2_MODELS = "/v2/models/"
"""Start of a model's path; in a route prefix, of an application that serves that model alone."""

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
        paths: The HTTP path of each model that is served, by name, sorted.
    """

    state: ReadinessState
    detail: str = ""
    paths: Mapping[str, str] = field(default_factory=dict)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that are served, sorted."""
        return tuple(self.paths)


def look(host: str, port: int, routes: Sequence[str] = ("",), *, timeout_s: float = 5.0, key: str = "") -> Readiness:
    """Ask every application for its models and whether they are ready; blocks.

    Args:
        host: Where HTTP is.
        port: Where HTTP is.
        routes: Route prefixes of the applications, without a slash at the end.
        timeout_s: Of each call, in seconds.
        key: API key; none when empty.

    Returns:
        What holds it up, a failure first; or all models of all applications.
    """
    paths: dict[str, str] = {}
    waiting: Readiness | None = None
    for route in routes:
        found = _look_at(host, port, route, timeout_s, key)
        if found.state is ReadinessState.FAILED:
            return found
        if found.state is ReadinessState.WAITING:
            waiting = waiting or found
        paths = {**found.paths, **paths}
    return waiting or Readiness(ReadinessState.READY, paths=dict(sorted(paths.items())))


def _look_at(host: str, port: int, route: str, timeout_s: float, key: str) -> Readiness:
    """Ask one application: its health, its repository index, then each model.

    Models that the index calls unloaded on purpose are not waited for.
    """
    if V2_MODELS in route:
        name = unquote(route.rpartition(V2_MODELS)[2])
        return _models_are_ready(host, port, {name: route}, timeout_s, key)
    health = call("GET", host, port, f"{route}/v2/health/ready", timeout_s=timeout_s, key=key)
    if health is None or health.status != 200:
        return Readiness(ReadinessState.WAITING, f"{route}/v2/health/ready: {_reason(health)}")
    index = call("POST", host, port, f"{route}/v2/repository/index", timeout_s=timeout_s, body={}, key=key)
    if index is None or index.status != 200 or not isinstance(index.json, list):
        return Readiness(ReadinessState.WAITING, f"{route}/v2/repository/index: {_reason(index)}")
    names, failed = models_to_serve(index.json)
    paths = {name: f"{route}{V2_MODELS}{quote(name, safe='')}" for name in names}
    if failed:
        return Readiness(ReadinessState.FAILED, failed, paths)
    if not names:
        return Readiness(
            ReadinessState.WAITING, f"the repository index{f' of {route}' if route else ''} names no model"
        )
    return _models_are_ready(host, port, paths, timeout_s, key)


def _models_are_ready(host: str, port: int, paths: Mapping[str, str], timeout_s: float, key: str) -> Readiness:
    for name, path in paths.items():
        answer = call("GET", host, port, f"{path}/ready", timeout_s=timeout_s, key=key)
        if answer is None or answer.status != 200:
            return Readiness(ReadinessState.WAITING, f"model {name!r}: {_reason(answer)}", paths)
    return Readiness(ReadinessState.READY, paths=paths)


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
