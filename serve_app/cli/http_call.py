"""One HTTP call with a bound on its time, for Ray's REST API and our own V2 addresses."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        status: HTTP status.
        body: The body as it came.
    """

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON, `None` where it is none."""
        try:
            return json.loads(self.body) if self.body else None
        except ValueError:
            return None


def call(
    method: str, host: str, port: int, path: str, *, timeout_s: float, body: Any = None, key: str = ""
) -> Answer | None:
    """Make one call on a connection of its own; blocks.

    Proxies named in the environment are not used: the address is this machine's.

    Args:
        method: HTTP method.
        host: Host name or address.
        port: TCP port.
        path: With a leading slash, already quoted.
        timeout_s: Longest wait for each step (connect, send, receive), in seconds.
        body: Sent as JSON when not `None`.
        key: API key; none when empty.

    Returns:
        `None` where nobody listens, the connection broke or the time ran out.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        if key:
            headers["X-API-Key"] = key
        connection.request(method, path, body=data, headers=headers)
        response = connection.getresponse()
        return Answer(response.status, response.read())
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
