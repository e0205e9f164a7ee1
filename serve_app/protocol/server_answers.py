"""What several servers answered to the same call, and what that means for who asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from serve_app.endpoint import Endpoint
from serve_app.errors import EndpointUnavailable, NoEndpoint, PoolClosed, ServeAppError


class ServerAnswer(NamedTuple):
    """One server's answer.

    Attributes:
        endpoint: The server.
        message: The response; `None` when there is an error.
        error: How the call ended instead.
    """

    endpoint: Endpoint
    message: Any = None
    error: ServeAppError | None = None

    @property
    def is_missed(self) -> bool:
        """Whether the server could not be asked at all, or was lost; what it would have said is not known."""
        return isinstance(self.error, (EndpointUnavailable, PoolClosed))


def messages_of(answers: Sequence[ServerAnswer]) -> list[Any]:
    """The responses of the servers that answered, for calls that read.

    Raises:
        NoEndpoint: No server was asked.
        ServeAppError: None answered; the first one's error.
    """
    messages = [answer.message for answer in answers if answer.error is None]
    if not messages:
        raise next((a.error for a in answers if a.error and not a.is_missed), None) or _outage(answers)
    return messages


def accepted_by_all(answers: Sequence[ServerAnswer]) -> Any:
    """The first response to a call that changes something, when no server refused it.

    Servers that could not be asked do not count: they are gone, or they are told when they are back.

    Raises:
        NoEndpoint: No server was asked.
        ServeAppError: One refused, or none could be asked; the first one's error.
    """
    for answer in answers:
        if answer.error is not None and not answer.is_missed:
            raise answer.error
    return messages_of(answers)[0]


def _outage(answers: Sequence[ServerAnswer]) -> ServeAppError:
    return next((answer.error for answer in answers if answer.error), None) or NoEndpoint(
        "Triton", "no server is known"
    )
