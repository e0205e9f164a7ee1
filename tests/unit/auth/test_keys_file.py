"""The form of a file of keys, and what is said of a wrong one."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest
import yaml

from serve_app.auth.keys_file import KEY_PREFIX, KeyEntry, entry_text, hash_of, new_key, parse_keys
from serve_app.auth.scopes import Scope
from serve_app.errors import PreflightFailed

HASH = "a" * 64


def test_yaml_and_json_are_read() -> None:
    """With what is optional left out."""
    document = {"keys": [{"id": "a", "sha256": HASH, "scopes": ["infer"]}]}
    for text in (yaml.safe_dump(document), json.dumps(document)):
        (entry,) = parse_keys(text, where="it").keys
        assert (entry.models, entry.lane, entry.expires) == (["*"], None, None)
        assert entry.principal().scopes == {Scope.INFER, Scope.READ}


def test_a_made_key_can_be_written_down() -> None:
    """Random, long, known by its beginning; what is printed for the file is what the file takes."""
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(KEY_PREFIX) and len(key) >= 43 for key in keys)
    expires = datetime(2030, 1, 2, tzinfo=timezone.utc)
    entry = KeyEntry(
        id="a", sha256=hash_of(keys.pop()), scopes=[Scope.INFER, Scope.LOAD], models=["x*"], lane="l", expires=expires
    )
    assert parse_keys("keys:\n" + entry_text(entry), where="it").keys == [entry]


SECRET = "sak_in-the-wrong-place"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys: [", "neither YAML nor JSON"),
        (f"keys:\n- {SECRET}: [\n", "neither YAML nor JSON"),
        ("", "wrong at the document"),
        ("[]", "wrong at the document"),
        (f"keys: [{SECRET}]", "wrong at keys.0"),
        (f"keys: [{{id: a, sha256: {SECRET}, scopes: [infer]}}]", "wrong at keys.0.sha256"),
        (f"keys: [{{id: a, key: {SECRET}, sha256: {HASH}, scopes: [infer]}}]", "wrong at keys.0.key: unknown key"),
        (f"keys: [{{id: a, sha256: {HASH}, scopes: [everything]}}]", "wrong at keys.0.scopes.0"),
        (f"keys: [{{id: a, sha256: {HASH}, scopes: []}}]", "wrong at keys.0.scopes"),
        (f"keys: [{{id: a, sha256: {HASH}, scopes: [infer], models: []}}]", "wrong at keys.0.models"),
        (f"keys: [{{id: a, sha256: {HASH}, scopes: [infer], models: ['[a-z]']}}]", "wrong at keys.0.models.0"),
        (f"keys: [{{id: a b, sha256: {HASH}, scopes: [infer]}}]", "wrong at keys.0.id"),
        (f"keys: [{{id: a, sha256: {HASH}, scopes: [infer], expires: 2030-01-01T00:00:00}}]", "keys.0.expires"),
        (
            f"keys: [{{id: a, sha256: {HASH}, scopes: [infer]}}, {{id: b, sha256: {HASH}, scopes: [infer]}}]",
            "two keys with one sha256: 'a' and 'b'",
        ),
        (
            f"keys: [{{id: a, sha256: {HASH}, scopes: [infer]}}, {{id: a, sha256: {'b' * 64}, scopes: [infer]}}]",
            "two keys with one id",
        ),
    ],
)
def test_a_wrong_file_is_refused_without_quoting_it(text: str, said: str) -> None:
    """The place is named; the content is not, for a key may stand where its hash belongs."""
    with pytest.raises(PreflightFailed) as raised:
        parse_keys(text, where="keys.yaml")
    assert said in raised.value.problem
    assert raised.value.problem.startswith("keys.yaml")
    assert SECRET not in str(raised.value)
