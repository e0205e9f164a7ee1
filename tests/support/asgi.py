"""Calls an ASGI application in process: what a test sees is what went over `send`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import ASGIApp, Message


@dataclass(frozen=True)
class Answer:
    """One HTTP answer.

    Attributes:
        status: Status code.
        headers: Names in lower case.
        body: All of it.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return orjson.loads(self.body)


async def request(
    app: ASGIApp,
    method: str,
    path: str,
    body: bytes | Iterable[bytes] = b"",
    headers: Mapping[str, str] | None = None,
    *,
    root_path: str = "",
    disconnect_after: int | None = None,
    leave: asyncio.Event | None = None,
    on_send: Callable[[Message], Awaitable[None]] | None = None,
) -> Answer:
    """Send one request to an application.

    Args:
        app: The application.
        method: For example `POST`.
        path: Path, without a query.
        body: Bytes, or chunks that arrive one by one.
        headers: Request headers.
        root_path: What a mount has taken off the front.
        disconnect_after: Chunks after which the client goes away.
        leave: When the client goes away after it has sent everything; at once when not given.
        on_send: Called with each message that the application sends; the application waits for it.
    """
    chunks = [body] if isinstance(body, bytes) else list(body)
    messages: list[Message] = [
        {"type": "http.request", "body": chunk, "more_body": index + 1 < len(chunks)}
        for index, chunk in enumerate(chunks)
    ]
    if disconnect_after is not None:
        messages = [*messages[:disconnect_after], {"type": "http.disconnect"}]
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        if leave is not None:
            await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if on_send is not None:
            await on_send(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": root_path,
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    await app(scope, receive, send)
    start = next(message for message in sent if message["type"] == "http.response.start")
    answered = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    data = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
    return Answer(start["status"], answered, data)
