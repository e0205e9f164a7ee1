"""Reading a request's body and headers off ASGI, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import zlib
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Receive

from serve_app.admission import Admission
from serve_app.batching.replica_load import Share
from serve_app.errors import InvalidRequest, Overloaded, RequestCancelled, RequestTooLarge, Unsupported
from serve_app.ingress.middleware import BUDGET_HEADER, SERVE_TIMEOUT_HEADER

# Above this a body is gathered in one buffer instead of pieces that are joined in the end.
_GATHER_ABOVE_BYTES = 1024 * 1024

# How much is unpacked at once.
_STEP_BYTES = 256 * 1024

# Above this much data to unpack or pack, that leaves the event loop for a thread (zlib releases the GIL).
_THREAD_ABOVE_BYTES = 256 * 1024

_ZERO_QUALITY = re.compile(r"q=0(\.0*)?")

# How long before Ray Serve's own timeout ours has to end to be the one that answers.
_LEAD_S = 0.02


async def read_body(headers: Headers, receive: Receive, *, max_bytes: int, share: Share | None = None) -> bytes:
    """The whole body, unpacked, as `bytes`; see `read_buffer`."""
    return bytes(await read_buffer(headers, receive, max_bytes=max_bytes, share=share))


async def read_buffer(
    headers: Headers, receive: Receive, *, max_bytes: int, share: Share | None = None
) -> bytes | memoryview:
    """The whole body, unpacked, held once: a large one is gathered in a buffer of its own, which is a view here.

    A packed one is held beside what comes out of it until all of it has.

    Args:
        headers: The request's headers.
        receive: ASGI's `receive` of a request whose body has not been read.
        max_bytes: Most bytes, before and after unpacking.
        share: Holds the bytes against the replica's bound as they come.

    Raises:
        Overloaded: The replica has no room for what was declared, or for what has come.
        RequestTooLarge: The declared, received or unpacked size is above `max_bytes`; raised as soon as known.
        InvalidRequest: The body is not what `Content-Encoding` says.
        Unsupported: Another encoding than gzip, deflate or identity.
        RequestCancelled: The client went away before it had sent everything.
    """
    declared = headers.get("content-length", "")
    declared_bytes = int(declared) if declared.isdigit() else 0
    if declared_bytes > max_bytes:
        raise RequestTooLarge("request body", declared_bytes, max_bytes)
    if share is not None:
        share.expect(declared_bytes)
    chunks: list[bytes] = []
    gathered: bytearray | None = None
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestCancelled("request body")
        chunk = message.get("body", b"")
        if chunk:
            start, size = size, size + len(chunk)
            if size > max_bytes:
                raise RequestTooLarge("request body", size, max_bytes)
            if share is not None:
                share.hold(size)
            if gathered is not None:
                gathered[start:size] = chunk
            else:
                chunks.append(chunk)
                if size > _GATHER_ABOVE_BYTES and len(chunks) > 1:
                    gathered = _gather(chunks, max(size, declared_bytes))
        more = message.get("more_body", False)
    if gathered is not None:
        body: bytes | memoryview = memoryview(gathered)[:size]
    else:
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    encoding = headers.get("content-encoding", "").strip().lower()
    if not encoding or encoding == "identity":
        return body

    def on_step(num_bytes: int) -> None:
        if share is not None:
            share.hold(size + num_bytes)

    if len(body) > _THREAD_ABOVE_BYTES:
        unpacked = await asyncio.to_thread(unpack, body, encoding=encoding, max_bytes=max_bytes, on_step=on_step)
    else:
        unpacked = unpack(body, encoding=encoding, max_bytes=max_bytes, on_step=on_step)
    if share is not None:
        share.hold(len(unpacked))
    return memoryview(unpacked)


def check_plain(
    admission: Admission, name: str, version: str, body: bytes | memoryview, *, timeout_s: float | None
) -> None:
    """Refuse a request that asks for no priority, when its model's queue is full, without parsing it.

    Before its body came it might have asked for one that makes others leave.

    Raises:
        Overloaded: It has to be refused.
    """
    try:
        admission.check_more(name, version, timeout_s=timeout_s, asked_priority=0)
    except Overloaded:
        # A large body, which is a view, is parsed to be sure: that is done in pieces, and few are read at a time.
        if isinstance(body, bytes) and b"priority" not in body and b"\\u" not in body:
            raise


def _gather(chunks: list[bytes], size_bytes: int) -> bytearray:
    """What has come of a body, at the start of a buffer for all of it; takes the pieces out of the list."""
    body = bytearray(size_bytes)  # zeros that the system makes as they are written over
    start = 0
    for chunk in chunks:
        body[start : start + len(chunk)] = chunk
        start += len(chunk)
    chunks.clear()
    return body


def unpack(
    body: bytes | memoryview,
    *,
    encoding: str,
    max_bytes: int,
    on_step: Callable[[int], None] = lambda num_bytes: None,
) -> bytearray:
    """Undo `Content-Encoding`, never producing more than `max_bytes`; see `read_buffer` for the errors.

    Args:
        body: Packed.
        encoding: `gzip` or `deflate`.
        max_bytes: Most bytes of the result.
        on_step: Told now and then how many bytes there are; what it raises ends the work.
    """
    # wbits: 31 is a gzip header, 15 a zlib one (what HTTP calls deflate), -15 none (what some clients send).
    if encoding == "gzip":
        wbits = 31
    elif encoding == "deflate":
        wbits = 15 if body[:1] == b"\x78" else -15
    else:
        raise Unsupported(f"Content-Encoding {encoding!r}", "use gzip, deflate or none")
    unpacker = zlib.decompressobj(wbits)
    unpacked, at, rest = bytearray(), 0, b""
    with contextlib.suppress(zlib.error):
        while not unpacker.eof:
            if not rest:
                rest, at = bytes(body[at : at + _STEP_BYTES]), at + _STEP_BYTES
            step = unpacker.decompress(rest, min(_STEP_BYTES, max_bytes + 1 - len(unpacked)))
            if not rest and not step:
                break
            unpacked += step
            rest = unpacker.unconsumed_tail
            if len(unpacked) > max_bytes:
                raise RequestTooLarge("unpacked request body", len(unpacked), max_bytes)
            on_step(len(unpacked))
        if unpacker.eof and not unpacker.unused_data and at >= len(body):
            return unpacked
    raise InvalidRequest("body", f"data that is not {encoding}", f"a whole {encoding} stream and nothing after it")


def pack(body: bytes, *, encoding: str) -> bytes:
    """Apply a `Content-Encoding` of `gzip` or `deflate`, at zlib's fastest level."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    return packer.compress(body) + packer.flush()


async def pack_body(body: bytes, *, encoding: str) -> bytes:
    """`pack`, beside the event loop where it takes long."""
    if len(body) > _THREAD_ABOVE_BYTES:
        return await asyncio.to_thread(pack, body, encoding=encoding)
    return pack(body, encoding=encoding)


def accepted_encoding(headers: Headers) -> str | None:
    """`gzip` or `deflate` when the client asks for one of them by name, else `None`.

    A client that also names encodings we do not have (browsers do) still gets one that we have; `*` alone and
    a quality of 0 get none.
    """
    for part in headers.get("accept-encoding", "").split(","):
        name, _, quality = part.lower().replace(" ", "").partition(";")
        if name in ("gzip", "deflate") and not _ZERO_QUALITY.fullmatch(quality):
            return name
    return None


def timeout_of(headers: Headers) -> float | None:
    """The budget in seconds that `x-request-timeout-seconds` asks for, or `None`.

    Where Ray Serve has seen that header too (its middleware is not installed), it answers 408 itself at that very
    moment; the budget is then cut short by as much as it takes to answer 504 before that.

    Raises:
        InvalidRequest: The header is not a number above zero.
    """
    text, lead_s = headers.get(BUDGET_HEADER), 0.0
    if text is None:
        text, lead_s = headers.get(SERVE_TIMEOUT_HEADER), _LEAD_S
        if text is None:
            return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not (math.isfinite(timeout_s) and timeout_s > 0.0):
        raise InvalidRequest(f"header {SERVE_TIMEOUT_HEADER}", repr(text[:32]), "a number of seconds above 0")
    return max(timeout_s - lead_s, timeout_s / 2)
