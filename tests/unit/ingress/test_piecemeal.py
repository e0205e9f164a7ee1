"""Large answers leave piece by piece, and whole."""

from __future__ import annotations

from starlette.types import Message

from serve_app.ingress.piecemeal import PIECE_BYTES, PiecemealResponse
from serve_app.protocol.binary import EncodedBody


async def never() -> Message:
    raise AssertionError("nothing is received")


async def test_pieces_make_up_the_answer() -> None:
    """In order, none larger than a piece, under one declared length, whatever buffers they come from."""
    tensors = (bytes(range(256)) * (PIECE_BYTES // 100), memoryview(bytearray(b"x" * (PIECE_BYTES + 1))), b"")
    encoded = EncodedBody((b"{}", *tensors), 2)
    response = PiecemealResponse(encoded, {"Inference-Header-Content-Length": "2"})
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await response({"type": "http"}, never, send)
    start, *pieces = sent
    headers = dict(start["headers"])
    assert headers[b"content-length"] == b"%d" % encoded.size_bytes
    assert headers[b"content-type"] == b"application/octet-stream"
    assert headers[b"inference-header-content-length"] == b"2"
    assert max(len(piece["body"]) for piece in pieces) == PIECE_BYTES
    assert b"".join(piece["body"] for piece in pieces) == encoded.body
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
