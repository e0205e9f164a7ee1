"""Who may do what, as a table."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.auth.decision import Verdict, decide
from serve_app.auth.principal import Principal
from serve_app.auth.scopes import OF_ONE_MODEL, REQUIRED_SCOPE, Operation, Scope


def principal(*scopes: Scope, models: tuple[str, ...] = ("*",)) -> Principal:
    return Principal("k", frozenset().union(*(scope.includes() for scope in scopes)), models)


READS = {
    Operation.HEALTH,
    Operation.SERVER_METADATA,
    Operation.DOCUMENTS,
    Operation.LIST_MODELS,
    Operation.READ_MODEL,
}
GRANTS = {
    Scope.READ: READS,
    Scope.INFER: READS | {Operation.INFER},
    Scope.LOAD: READS | {Operation.LOAD_MODEL},
    Scope.SETTINGS: READS | {Operation.MODEL_SETTINGS, Operation.SERVER_SETTINGS},
    Scope.SHARED_MEMORY: READS | {Operation.SHARED_MEMORY},
    Scope.ADMIN: set(Operation),
}


@pytest.mark.parametrize(("scope", "operation"), [*itertools.product(Scope, Operation)])
def test_a_scope_grants_what_it_says_and_no_more(scope: Scope, operation: Operation) -> None:
    """Every scope against every operation, with all models allowed; a refusal names the scope that is missing."""
    decision = decide(principal(scope), operation, "m")
    if operation in GRANTS[scope]:
        assert decision.verdict is Verdict.ALLOW
    else:
        assert decision.verdict is Verdict.FORBIDDEN
        assert REQUIRED_SCOPE[operation].value in decision.reason
        assert "'k'" in decision.reason


@pytest.mark.parametrize("operation", list(Operation))
def test_without_a_key_there_is_health_only(operation: Operation) -> None:
    """And not even that where the setting says so."""
    is_open = operation is Operation.HEALTH
    assert decide(None, operation).verdict is (Verdict.ALLOW if is_open else Verdict.UNAUTHENTICATED)
    assert decide(None, operation, is_health_open=False).verdict is Verdict.UNAUTHENTICATED


@pytest.mark.parametrize("operation", list(Operation))
def test_models_beyond_the_pattern_are_refused(operation: Operation) -> None:
    """For each operation on a model; a change of the whole server needs a key of all models."""
    key = principal(Scope.ADMIN, models=("a*", "b?"))
    verdicts = {name: decide(key, operation, name).verdict for name in ("abc", "b1", "b", "b12", "xa", "")}
    refused = {name for name, verdict in verdicts.items() if verdict is Verdict.FORBIDDEN}
    if operation in OF_ONE_MODEL:
        assert refused == {"b", "b12", "xa", ""}
    elif operation is Operation.SERVER_SETTINGS:
        assert refused == set(verdicts)
    else:
        assert refused == set()


@given(name=st.text(), prefix=st.text("ab._-", min_size=1, max_size=3))
def test_a_pattern_matches_whole_names(name: str, prefix: str) -> None:
    """No part of a name, and no character in it (a line end, say), gets one past a pattern."""
    key = principal(Scope.INFER, models=(f"{prefix}*",))
    assert (decide(key, Operation.INFER, name).verdict is Verdict.ALLOW) == name.startswith(prefix)
