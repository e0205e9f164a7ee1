"""Reading bodies and headers: limits hold before the bytes are there."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from serve_app.errors import InvalidRequest, RequestCancelled, RequestTooLarge, Unsupported
from serve_app.ingress.body import (
    accepted_encoding,
    pack,
    pack_body,
    read_body,
    read_buffer,
    timeout_of,
    unpack,
)
from serve_app.ingress.middleware import KeepBudget
from tests.support.asgi import request

MIB = 1024 * 1024


class Client:
    """Sends chunks one by one and counts how many were taken."""

    def __init__(self, chunks: Iterable[bytes], *, goes_away: bool = False) -> None:
        self._chunks = list(chunks)
        self._goes_away = goes_away
        self.taken = 0

    async def receive(self) -> Message:
        if not self._chunks:
            return {"type": "http.disconnect"}
        self.taken += 1
        chunk = self._chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks) or self._goes_away}


async def test_a_body_arrives_whole_however_it_was_cut() -> None:
    """Chunked uploads are put together in order."""
    client = Client([b"ab", b"", b"c"])
    assert await read_body(Headers({}), client.receive, max_bytes=3) == b"abc"


async def test_a_declared_length_above_the_limit_is_refused_unread() -> None:
    """The client is told before a byte of it was read."""
    client = Client([b"x" * 100])
    with pytest.raises(RequestTooLarge, match="100 bytes, the limit is 10 bytes"):
        await read_body(Headers({"content-length": "100"}), client.receive, max_bytes=10)
    assert client.taken == 0


async def test_an_undeclared_length_is_refused_when_it_passes_the_limit() -> None:
    """A chunked upload is cut off at the limit, not read to its end."""
    client = Client([b"x" * 8] * 100)
    with pytest.raises(RequestTooLarge):
        await read_body(Headers({}), client.receive, max_bytes=10)
    assert client.taken == 2


async def test_a_client_that_leaves_half_way_is_a_cancelled_request() -> None:
    """Half a body is never taken for a whole one."""
    client = Client([b"half"], goes_away=True)
    with pytest.raises(RequestCancelled):
        await read_body(Headers({}), client.receive, max_bytes=10)


@given(st.binary(max_size=2000), st.sampled_from(["gzip", "deflate"]))
def test_unpack_undoes_pack(body: bytes, encoding: str) -> None:
    """Both encodings round-trip."""
    assert unpack(pack(body, encoding=encoding), encoding=encoding, max_bytes=2000) == body


def test_deflate_without_a_zlib_header_is_understood() -> None:
    """Some clients send raw deflate under that name."""
    packer = zlib.compressobj(wbits=-15)
    assert unpack(packer.compress(b"abc") + packer.flush(), encoding="deflate", max_bytes=3) == b"abc"


def test_a_bomb_is_refused_at_the_limit() -> None:
    """A megabyte of zeros packs into a kilobyte; it is not unpacked past the limit."""
    bomb = gzip.compress(b"\0" * 10_000_000)
    with pytest.raises(RequestTooLarge, match="unpacked request body"):
        unpack(bomb, encoding="gzip", max_bytes=1000)


@pytest.mark.parametrize("body", [b"", b"not gzip", gzip.compress(b"abc")[:-4], gzip.compress(b"abc") + b"more"])
def test_data_that_is_not_what_it_says_is_invalid(body: bytes) -> None:
    """Broken, cut off or followed by something else: 400, not 500."""
    with pytest.raises(InvalidRequest, match="gzip"):
        unpack(body, encoding="gzip", max_bytes=1000)


def test_other_encodings_are_unsupported() -> None:
    """As Triton answers: 501."""
    with pytest.raises(Unsupported, match="'br'"):
        unpack(b"", encoding="br", max_bytes=1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("gzip", "gzip"),
        ("deflate, gzip", "deflate"),
        ("br, gzip;q=0.5", "gzip"),
        ("gzip ; q=0.001", "gzip"),
        ("gzip;q=0", None),
        ("gzip; q=0.000", None),
        ("*", None),
    ],
)
def test_the_answer_is_packed_as_the_client_asks(value: str, expected: str | None) -> None:
    """Only encodings that are named are used."""
    assert accepted_encoding(Headers({"accept-encoding": value})) == expected


async def test_the_loop_goes_on_while_a_large_answer_is_packed() -> None:
    """Nobody's heartbeat waits for another client's gzip."""
    body = bytes(32 * 1024 * 1024)
    packing = asyncio.create_task(pack_body(body, encoding="gzip"))
    num_turns = 0
    while not packing.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 5
    assert unpack(await packing, encoding="gzip", max_bytes=len(body)) == body


@pytest.mark.parametrize("value", ["", "abc", "-1", "0", "nan", "inf"])
def test_a_timeout_that_is_none_is_refused(value: str) -> None:
    """A budget is a finite number of seconds above zero."""
    with pytest.raises(InvalidRequest, match="x-request-timeout-seconds"):
        timeout_of(Headers({"x-request-timeout-seconds": value}))


def test_a_budget_that_serve_has_not_seen_is_whole() -> None:
    """With the middleware the budget is what was asked for; without it, it ends just before Serve's own timeout."""
    assert timeout_of(Headers({"x-serve-app-budget-seconds": "0.3"})) == 0.3
    assert timeout_of(Headers({"x-request-timeout-seconds": "0.3"})) == pytest.approx(0.28)
    assert timeout_of(Headers({"x-request-timeout-seconds": "0.001"})) == 0.0005
    assert timeout_of(Headers({})) is None


async def test_the_middleware_takes_the_budget_past_serve() -> None:
    """The client's header is renamed, everything else passes as it is."""
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    headers = {"x-a": "1", "X-Request-Timeout-Seconds": "0.3", "x-b": "2"}
    await request(KeepBudget(app), "POST", "/v2", headers=headers)
    assert Headers(scope=seen[0]) == Headers({"x-a": "1", "x-serve-app-budget-seconds": "0.3", "x-b": "2"})


@pytest.mark.parametrize("declared", [{}, {"content-length": f"{3 * MIB}"}, {"content-length": "7"}])
async def test_a_large_body_is_gathered_in_one_buffer(declared: dict[str, str]) -> None:
    """Whatever length was declared, every byte is in its place."""
    body = bytes(range(256)) * (3 * MIB // 256)
    client = Client([body[start : start + 65_000] for start in range(0, len(body), 65_000)])
    gathered = await read_buffer(Headers(declared), client.receive, max_bytes=len(body))
    assert isinstance(gathered, memoryview)
    assert gathered == body


@settings(deadline=None)
@given(
    parts=st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.integers(1, 20_000)), max_size=4),
    encoding=st.sampled_from(["gzip", "deflate"]),
)
def test_what_is_unpacked_in_steps_is_whole(parts: list[tuple[bytes, int]], encoding: str) -> None:
    """However well it was packed, and exactly up to the limit."""
    body = b"".join(part * count for part, count in parts)
    packed = pack(body, encoding=encoding)
    assert unpack(packed, encoding=encoding, max_bytes=max(len(body), 1)) == body
    if len(body) > 1:
        with pytest.raises(RequestTooLarge):
            unpack(packed, encoding=encoding, max_bytes=len(body) - 1)
    with pytest.raises(InvalidRequest):
        unpack(packed[:-1], encoding=encoding, max_bytes=len(body) + 1)
