"""How a key travels."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.auth.credentials import MAX_KEY_CHARACTERS, Credentials, parse_credentials


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("api_key", "authorization", "key"),
    [
        (None, None, None),
        ("k", None, "k"),
        (" k ", None, "k"),
        (None, "Bearer k", "k"),
        (None, "bearer  k ", "k"),
        (None, basic("anyone:k"), "k"),
        (None, basic("anyone:k:l"), "k:l"),
        (None, basic("k:"), "k"),
        (None, basic("k"), "k"),
        ("k", "Bearer a-gateways-own", "k"),
        ("", "Bearer k", None),
        (None, "Bearer", None),
        (None, "Bearer ", None),
        (None, "k", None),
        (None, "Digest k", None),
        (None, "Basic ???", None),
        (None, "Basic /w==", None),
        ("k" * (MAX_KEY_CHARACTERS + 1), None, None),
    ],
)
def test_forms_of_a_key(api_key: str | None, authorization: str | None, key: str | None) -> None:
    """Header of ours, Bearer, Basic; what is none of these is no key."""
    found = parse_credentials(api_key, authorization)
    assert (found and found.key) == key


@given(st.text(), st.text())
def test_no_text_is_an_error(api_key: str, authorization: str) -> None:
    """Clients send anything."""
    parse_credentials(None, authorization)
    parse_credentials(api_key, authorization)


def test_a_key_is_not_printed() -> None:
    """Where credentials get into a log by mistake, the key does not."""
    assert "secret" not in repr(Credentials("secret"))
