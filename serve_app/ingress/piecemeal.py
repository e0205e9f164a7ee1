"""Large answers over HTTP, handed to the server piece by piece so that they are never held a second time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.protocol.binary import EncodedBody
from serve_app.protocol.tensor import Buffer

PIECE_BYTES = 1024 * 1024
"""Size of a piece, and of the answers above which there is more than one."""


class PiecemealResponse(Response):
    """An answer of which the server gets the next piece when it has sent most of the one before.

    Args:
        encoded: The body; its buffers are let go as they are sent.
        headers: More headers.
    """

    def __init__(self, encoded: EncodedBody, headers: Mapping[str, str]) -> None:
        super().__init__(
            None, 200, {**headers, "content-length": f"{encoded.size_bytes}"}, media_type=encoded.media_type
        )
        self._chunks: list[Buffer] = list(encoded.chunks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; once only."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in _pieces(self._chunks):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _pieces(chunks: list[Buffer]) -> Iterator[bytes]:
    while chunks:
        view = memoryview(chunks.pop(0)).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])
