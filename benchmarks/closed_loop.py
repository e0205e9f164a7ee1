"""A closed loop over HTTP/1.1 keep-alive: each connection sends its next request when it has the answer to the last.

Written on bare asyncio protocols, so that the generator costs little of the two cores that it shares with what it
measures. Every answer is compared with the first one.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field


@dataclass
class Measurement:
    """What one run of a closed loop saw.

    Attributes:
        seconds: From the first request to the last answer that counts.
        latencies_s: Of each answer that counts, in seconds.
        num_errors: Answers that were not 200, or not the same as the first.
        num_reconnects: Connections that the server closed and that were opened again (HAProxy does, when it takes
            over a new configuration).
    """

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    num_errors: int = 0
    num_reconnects: int = 0

    @property
    def requests_per_s(self) -> float:
        """Right answers per second."""
        return len(self.latencies_s) / self.seconds

    def percentile_ms(self, share: float) -> float:
        """A percentile of the latencies in milliseconds; `share` is 0 to 1. Not a number where nothing was right."""
        if not self.latencies_s:
            return math.nan
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3


class _Connection(asyncio.Protocol):
    """One connection; calls `on_answer(status_ok, body)` and sends the same request again until told to stop."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self._buffer = bytearray()
        self._sent_at = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._sent_at = time.perf_counter()
        self._transport.write(self._loop.request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        start = head.index(b"content-length:") + len(b"content-length:")
        length = int(head[start:].split(b"\r\n", 1)[0])
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        self._buffer.clear()
        if self._loop.take(head.startswith(b"http/1.1 200"), body, time.perf_counter() - self._sent_at):
            self._send()
        elif self._transport is not None:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._loop.leave()


class _Loop:
    """What all connections of a run share."""

    def __init__(self, address: str, request: bytes, num_connections: int, warm_up_s: float, seconds: float) -> None:
        host, port = address.rsplit(":", 1)
        self.request = request
        self.result = Measurement(seconds)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._host, self._port = host, int(port)
        self._left = num_connections
        self._starts_at = time.perf_counter() + warm_up_s
        self._ends_at = self._starts_at + seconds
        self._expected: bytes | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    def take(self, is_ok: bool, body: bytes, latency_s: float) -> bool:
        """Count an answer; false when it was the last."""
        now = time.perf_counter()
        if self._expected is None and is_ok:
            self._expected = body
        if self._starts_at <= now < self._ends_at:
            if is_ok and body == self._expected:
                self.result.latencies_s.append(latency_s)
            else:
                self.result.num_errors += 1
        return now < self._ends_at

    def leave(self) -> None:
        """A connection has ended; until the run is over another takes its place."""
        if time.perf_counter() < self._ends_at:
            self.result.num_reconnects += 1
            task = asyncio.ensure_future(self.connect())
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            return
        self._left -= 1
        if self._left == 0 and not self.done.done():
            self.done.set_result(None)

    async def connect(self) -> None:
        """Open a connection, which starts sending at once."""
        await asyncio.get_running_loop().create_connection(lambda: _Connection(self), self._host, self._port)


async def closed_loop(
    address: str, path: str, body: bytes, *, num_connections: int, seconds: float, warm_up_s: float = 1.0
) -> Measurement:
    """Post the same body over `num_connections` keep-alive connections for some seconds.

    Args:
        address: `host:port`.
        path: Of the URL.
        body: JSON.
        num_connections: Requests in flight.
        seconds: How long answers are counted, after `warm_up_s` in which they are not.
        warm_up_s: See above.
    """
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    loop = _Loop(address, head.encode() + body, num_connections, warm_up_s, seconds)
    await asyncio.gather(*(loop.connect() for _ in range(num_connections)))
    await asyncio.wait_for(loop.done, warm_up_s + seconds + 30)
    return loop.result
