"""An open loop over HTTP/1.1: requests go out by the clock, whatever has become of those before them.

That is how a crowd behaves, and the only way to offer more than is answered. Latency counts from the moment at which
a request was due, so that a generator or a server that falls behind cannot hide it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

WARM_UP_S = 1.0


@dataclass
class Crowd:
    """What one crowd of callers saw.

    Attributes:
        seconds: How long requests were sent.
        num_sent: Requests.
        statuses: Answers by status; 0 is a connection that ended without one.
        num_wrong: Answers of 200 that were not the caller's own.
        num_hung: Requests without an answer when the patience ended.
        num_in_time: Answers of 200 that came between the end of the first second and the end of the sending.
        accepted_s: Latencies of the answers of 200, in seconds, in the order of the answers.
        refused_s: Those of 429.
        num_without_delay: Answers of 429 without `Retry-After`.
    """

    seconds: float
    num_sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    num_wrong: int = 0
    num_hung: int = 0
    num_in_time: int = 0
    accepted_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    num_without_delay: int = 0

    @property
    def goodput(self) -> float:
        """Answers of 200 a second, once the first second is over and as long as requests come."""
        return self.num_in_time / (self.seconds - WARM_UP_S)

    @property
    def num_strange(self) -> int:
        """Answers that are neither 200 nor 429 nor 503."""
        return sum(count for status, count in self.statuses.items() if status not in (200, 429, 503))


def percentile_ms(latencies_s: list[float], share: float) -> float:
    """A percentile in milliseconds; not a number where there is nothing."""
    if not latencies_s:
        return math.nan
    ordered = sorted(latencies_s)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3


class _Connection(asyncio.Protocol):
    """One keep-alive connection, with one request on it at a time."""

    def __init__(self, on_free: Callable[[_Connection], None]) -> None:
        self._on_free = on_free
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes) -> asyncio.Future[tuple[int, bytes, bytes]]:
        """The answer to a request: its status, head and body; status 0 when the connection ends before it."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._end()
        else:
            self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        start = head.index(b"content-length:") + len(b"content-length:")
        stop = end + 4 + int(head[start:].split(b"\r\n", 1)[0])
        if len(self._buffer) < stop:
            return
        body, answer = bytes(self._buffer[end + 4 : stop]), self._answer
        self._buffer.clear()
        self._answer = None
        if answer is not None and not answer.done():
            answer.set_result((int(head.split(b" ", 2)[1]), head, body))
        if self._transport is not None and not self._transport.is_closing():
            self._on_free(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((0, b"", b""))

    def close(self) -> None:
        """End it."""
        if self._transport is not None:
            self._transport.close()

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent on it."""
        return self._transport is not None and not self._transport.is_closing()


async def open_loop(
    address: str,
    path: str,
    body_of: Callable[[int], bytes],
    is_right: Callable[[int, bytes], bool],
    *,
    rate: float,
    seconds: float,
    headers: str = "",
    patience_s: float = 60.0,
) -> Crowd:
    """Post requests at a steady rate for some seconds, and wait for every answer.

    Args:
        address: `host:port`.
        path: Of the URL.
        body_of: The body of the request of that number.
        is_right: Whether a body of 200 is the answer to the request of that number.
        rate: Requests a second.
        seconds: How long.
        headers: More lines of the head, each with its line break.
        patience_s: How long the last answers are waited for.
    """
    host, port = address.rsplit(":", 1)
    crowd = Crowd(seconds)
    free: deque[_Connection] = deque()
    connections: list[_Connection] = []
    loop = asyncio.get_running_loop()

    async def connection() -> _Connection:
        while free:
            candidate = free.popleft()
            if candidate.is_open:
                return candidate
        _, made = await loop.create_connection(lambda: _Connection(free.append), host, int(port))
        connections.append(made)
        return made

    async def ask(number: int, due: float) -> None:
        body = body_of(number)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            status, answered, text = await (await connection()).send(head.encode() + body)
        except OSError:
            status, answered, text = 0, b"", b""
        latency_s = loop.time() - due
        crowd.statuses[status] += 1
        if status == 200:
            crowd.accepted_s.append(latency_s)
            crowd.num_in_time += WARM_UP_S <= due + latency_s - starts_at < seconds
            crowd.num_wrong += not is_right(number, text)
        elif status == 429:
            crowd.refused_s.append(latency_s)
            crowd.num_without_delay += b"\r\nretry-after:" not in answered

    starts_at = loop.time()
    tasks: set[asyncio.Task[None]] = set()
    while (due := starts_at + crowd.num_sent / rate) < starts_at + seconds:
        await asyncio.sleep(max(due - loop.time(), 0.0))
        tasks.add(asyncio.create_task(ask(crowd.num_sent, due)))
        crowd.num_sent += 1
    _, hung = await asyncio.wait(tasks, timeout=patience_s)
    crowd.num_hung = len(hung)
    for task in hung:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for made in connections:
        made.close()
    return crowd
