"""How a key travels in a request, over HTTP and over gRPC alike."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

MAX_KEY_CHARACTERS = 1024
"""Longer than any key; more is not even hashed."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client sent.

    Attributes:
        key: The key, in the clear.
        is_basic: Whether it came by HTTP's Basic scheme, which browsers send along by themselves.
    """

    key: str = field(repr=False)
    is_basic: bool = False


def parse_credentials(api_key: str | None, authorization: str | None) -> Credentials | None:
    """The key that a request carries; `None` when there is none, or in no form that is known.

    Args:
        api_key: The value of `X-API-Key`; it counts before the other, which a gateway may have set for itself.
        authorization: The value of `Authorization`: `Bearer <key>`, or `Basic` with the key as the password (or as
            the user, without a password), for clients and browsers that have no other way.
    """
    if api_key is not None:
        return _of(api_key.strip())
    if authorization is None:
        return None
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return _of(value.strip())
    if scheme.lower() == "basic":
        try:
            user, _, password = base64.b64decode(value.strip(), validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            return None
        return _of(password or user, is_basic=True)
    return None


def _of(key: str, *, is_basic: bool = False) -> Credentials | None:
    return Credentials(key, is_basic) if 0 < len(key) <= MAX_KEY_CHARACTERS else None
