"""A TCP link to a server that breaks on demand, in the middle of an answer if need be."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from types import TracebackType

_NO_LINGER = struct.pack("ii", 1, 0)


class FaultyLink:
    """Forwards connections to a server on 127.0.0.1.

    ```python
    async with FaultyLink(fake.address) as link:
        router.update([Endpoint.static(link.address)])
        link.cut_after(1000)   # the next 1000 bytes of answers pass, then every connection is reset
        link.reset()           # every connection is reset now
    ```

    Args:
        target: `host:port` of the server.
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._bytes_left: int | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_resets = 0
        self.address = ""

    async def __aenter__(self) -> FaultyLink:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut_after(self, num_bytes: int) -> None:
        """Reset every connection once so many more bytes have come from the server."""
        self._bytes_left = num_bytes

    def reset(self) -> None:
        """Reset every connection now (RST, not FIN)."""
        self._bytes_left = None
        self.num_resets += len(self._writers)
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            writer.transport.abort()
        self._writers.clear()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            theirs, ours = await asyncio.open_connection(self._host, self._port)
            self._writers |= {writer, ours}
            try:
                await asyncio.gather(
                    self._copy(reader, ours, is_answer=False), self._copy(theirs, writer, is_answer=True)
                )
            finally:
                self._writers -= {writer, ours}
                ours.transport.abort()
                writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        while data := await reader.read(16384):
            if is_answer and self._bytes_left is not None:
                passing, self._bytes_left = data[: self._bytes_left], self._bytes_left - len(data)
                writer.write(passing)
                if self._bytes_left <= 0:
                    await writer.drain()
                    self.reset()
                    return
            else:
                writer.write(data)
            await writer.drain()
        raise ConnectionResetError
