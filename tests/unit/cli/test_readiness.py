"""Ready means that every model says so, asked as a client would."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.cli import readiness
from serve_app.cli.http_call import Answer
from serve_app.cli.readiness import ReadinessState, look, models_to_serve


def entry(name: str, state: str = "READY", reason: str = "", version: str = "1") -> dict[str, str]:
    return {"name": name, "version": version, "state": state, "reason": reason}


def test_unloaded_models_are_not_waited_for() -> None:
    """A model that lies in the repository and was not asked for holds nothing up."""
    index = [entry("b"), entry("a", "LOADING"), entry("c", "UNAVAILABLE", "unloaded"), {"name": "d"}]
    assert models_to_serve(index) == (("a", "b"), "")


def test_a_load_failure_is_told_with_its_reason() -> None:
    """The model and Triton's reason are named in one line."""
    index = [entry("a"), entry("b", "UNAVAILABLE", "no file\nmodel.onnx\n\nAt:\n  /srv/x.py(3): load\n")]
    assert models_to_serve(index) == (("a", "b"), "model 'b' failed to load: no file model.onnx")


def test_one_ready_version_is_enough() -> None:
    """An old version that does not load is no failure of a model that serves another."""
    index = [entry("a"), entry("a", "UNAVAILABLE", "broken", version="2")]
    assert models_to_serve(index) == (("a",), "")


class Server:
    """Answers by path; 404 elsewhere."""

    def __init__(self, answers: dict[str, Answer | None]) -> None:
        self._answers = answers

    def call(self, method: str, host: str, port: int, path: str, **options: Any) -> Answer | None:
        return self._answers.get(path, Answer(404, b'{"error": "nothing here"}'))


HEALTHY = {
    "/v2/health/ready": Answer(200, b""),
    "/v2/repository/index": Answer(200, b'[{"name": "a b", "version": "1", "state": "READY", "reason": ""}]'),
    "/v2/models/a%20b/ready": Answer(200, b""),
}


@pytest.mark.parametrize(
    ("change", "state", "detail"),
    [
        ({}, ReadinessState.READY, ""),
        ({"/v2/health/ready": None}, ReadinessState.WAITING, "/v2/health/ready: no answer"),
        ({"/v2/health/ready": Answer(503, b"<html>")}, ReadinessState.WAITING, "/v2/health/ready: 503"),
        ({"/v2/repository/index": Answer(404, b"")}, ReadinessState.WAITING, "/v2/repository/index: 404"),
        ({"/v2/repository/index": Answer(200, b"[]")}, ReadinessState.WAITING, "the repository index names no model"),
        (
            {"/v2/models/a%20b/ready": Answer(503, b'{"error": "loading\\nmore"}')},
            ReadinessState.WAITING,
            "model 'a b': 503 loading",
        ),
    ],
)
def test_one_look(
    change: dict[str, Answer | None], state: ReadinessState, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is missing on the way to readiness is named; only all of it is ready."""
    monkeypatch.setattr(readiness, "call", Server({**HEALTHY, **change}).call)
    found = look("127.0.0.1", 8000)
    assert (found.state, found.detail) == (state, detail)


APPS = {
    **HEALTHY,
    **{f"/apps/x{path}": answer for path, answer in HEALTHY.items()},
    "/v2/models/alone/ready": Answer(200, b""),
}
ROUTES = ("", "/apps/x", "/v2/models/alone")


@pytest.mark.parametrize(
    ("missing", "detail"),
    [
        ("", ""),
        ("/v2/repository/index", "/v2/repository/index: 404 nothing here"),
        ("/apps/x/v2/health/ready", "/apps/x/v2/health/ready: 404 nothing here"),
        ("/apps/x/v2/models/a%20b/ready", "model 'a b': 404 nothing here"),
        ("/v2/models/alone/ready", "model 'alone': 404 nothing here"),
    ],
)
def test_every_application_is_asked_below_its_own_route(
    missing: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at the root, one with a prefix, and one whose prefix is the path of its only model."""
    answers: dict[str, Answer | None] = {path: answer for path, answer in APPS.items() if path != missing}
    monkeypatch.setattr(readiness, "call", Server(answers).call)
    found = look("127.0.0.1", 8000, ROUTES)
    assert (found.detail, found.state is ReadinessState.READY) == (detail, not missing)
    if not missing:
        assert found.paths == {"a b": "/v2/models/a%20b", "alone": "/v2/models/alone"}
