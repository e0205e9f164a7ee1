"""The one translator from what a gRPC call to Triton ends with to this package's errors.

Triton puts much of the meaning into the text, so status and text are looked at together. The texts are those of
tritonserver 2.51 and grpc 1.85, seen by running them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from serve_app.errors import (
    BackendFailed,
    DeadlineExceeded,
    EndpointUnavailable,
    EndpointUnreachable,
    ModelCrashed,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    RequestCancelled,
    RequestRejected,
    RequestTooLarge,
    ServeAppError,
    SharedMemoryNotFound,
    Unsupported,
)

MAX_TEXT_CHARS = 512
"""Longest text taken over from Triton; its details can carry whole stack traces."""

QUEUE_RETRY_AFTER_S = 1.0
"""When to come back to a full queue of Triton's; it does not say."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """What is known of a call besides how it ended.

    Attributes:
        address: The endpoint's address.
        model_name: The model asked for; empty for calls that concern the server.
        model_version: The version asked for; empty for the server's choice.
        timeout_s: The budget that the call had.
    """

    address: str
    model_name: str = ""
    model_version: str = ""
    timeout_s: float = 0.0

    @property
    def model(self) -> str:
        """The model as error texts name it."""
        return f"model {self.model_name!r}" if self.model_name else "Triton"

    @property
    def endpoint(self) -> str:
        """The endpoint as error texts name it."""
        return f"Triton at {self.address}"


_Build = Callable[[CallContext, str], ServeAppError]


def telling_line(text: str) -> str:
    """The one line of Triton's text that says what happened, at most `MAX_TEXT_CHARS` long.

    A Python traceback is reduced to its exception; Triton's prefixes that repeat the request id or the instance
    are dropped.
    """
    if "Traceback (most recent call last)" in text:
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
        text = lines[-1] if lines else text
    text = re.sub(r"^\[request id: [^\]]*\] ", "", text.strip())
    text = re.sub(r"^Failed to process the request\(s\) for model '[^']*', message: ", "", text)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= MAX_TEXT_CHARS else line[: MAX_TEXT_CHARS - 3] + "..."


def _message_size(context: CallContext, text: str) -> ServeAppError:
    sizes = re.search(r"\((\d+) vs\. (\d+)\)", text)
    if sizes is None or "CLIENT: Received" in text or "SERVER: Sent" in text:
        return BackendFailed(context.model_name, f"its answer is too large to receive: {text}")
    return RequestTooLarge("gRPC message to Triton", int(sizes[1]), int(sizes[2]))


def _not_triton(context: CallContext, text: str) -> ServeAppError:
    status = re.search(r"http2 header with status: (\d+)", text)
    answer = f"HTTP status {status[1]}" if status else "no gRPC status"
    return EndpointUnavailable(context.endpoint, f"something that is not Triton answered with {answer}")


def _unavailable(context: CallContext, text: str) -> ServeAppError:
    return EndpointUnavailable(context.endpoint, text)


def _unreachable(context: CallContext, text: str) -> ServeAppError:
    last = text.rpartition("last error: ")[2]
    return EndpointUnreachable(context.endpoint, last)


def _not_ready(context: CallContext, text: str) -> ServeAppError:
    return ModelNotReady(context.model, text)


def _not_found(context: CallContext, text: str) -> ServeAppError:
    return ModelNotFound(context.model_name, context.model_version)


def _no_region(context: CallContext, text: str) -> ServeAppError:
    return SharedMemoryNotFound(text)


def _crashed(context: CallContext, text: str) -> ServeAppError:
    return ModelCrashed(context.model, text)


def _overloaded(context: CallContext, text: str) -> ServeAppError:
    return Overloaded(context.model, f"its queue in Triton is full ({text})", QUEUE_RETRY_AFTER_S)


def _deadline(context: CallContext, text: str) -> ServeAppError:
    return DeadlineExceeded(f"waiting for {context.model}", context.timeout_s)


def _cancelled(context: CallContext, text: str) -> ServeAppError:
    return RequestCancelled(f"request to {context.model}")


def _rejected(context: CallContext, text: str) -> ServeAppError:
    return RequestRejected(context.model_name, text)


def _unsupported(context: CallContext, text: str) -> ServeAppError:
    return Unsupported(f"this call to {context.model}", text)


def _failed(context: CallContext, text: str) -> ServeAppError:
    return BackendFailed(context.model_name, text)


_CODE = grpc.StatusCode
_ANY = frozenset(grpc.StatusCode)
_UNAVAILABLE = frozenset({_CODE.UNAVAILABLE})
_BROKEN = frozenset({_CODE.INTERNAL, _CODE.UNKNOWN, _CODE.CANCELLED})


def _row(
    codes: frozenset[grpc.StatusCode] | grpc.StatusCode, pattern: str, build: _Build
) -> tuple[frozenset[grpc.StatusCode], re.Pattern[str], _Build]:
    known = codes if isinstance(codes, frozenset) else frozenset({codes})
    return known, re.compile(pattern, re.IGNORECASE), build


# First match wins; an empty pattern is any text.
_TABLE = (
    # What grpc says when there is no Triton at the other end, or no longer.
    _row(_ANY, r"^received http2 header with status", _not_triton),
    _row(_UNAVAILABLE, r"failed to connect to all addresses|connections to all backends failing", _unreachable),
    _row(_UNAVAILABLE, r"errors resolving|dns resolution failed|domain name not found", _unreachable),
    _row(_UNAVAILABLE, r"socket closed|connection reset|broken pipe|stream removed|goaway|rst_stream", _unavailable),
    _row(_UNAVAILABLE, r"(endpoint|transport|channel) closed|cancelling all calls|recvmsg|sendmsg", _unavailable),
    _row(_UNAVAILABLE, r"timed out|no route to host|keepalive|too[_ ]many[_ ]pings|upstream", _unavailable),
    _row(_BROKEN, r"^(received rst_stream|stream removed|socket closed|recvmsg|goaway)", _unavailable),
    # What Triton says.
    _row(_CODE.INTERNAL, r"stub process .*is not healthy", _crashed),
    _row(_UNAVAILABLE, r"maximum queue size", _overloaded),
    _row(_UNAVAILABLE, r"request timeout expired", _deadline),
    _row(_UNAVAILABLE, r"not allowed if polling is enabled", _unsupported),
    _row(_UNAVAILABLE, r"protocol is restricted", _failed),
    _row(_CODE.NOT_FOUND, r"has no available versions", _not_ready),
    _row(_CODE.NOT_FOUND, r"unknown model", _not_found),
    _row(_CODE.NOT_FOUND, r"shared memory region", _no_region),
    _row(_CODE.ALREADY_EXISTS, r"shared memory region", _rejected),
    _row(_CODE.INTERNAL, r"^(unable to open|invalid) shared memory region", _rejected),
    _row(_CODE.INVALID_ARGUMENT, r"^requested model( '.*'| version) is not available", _not_found),
    _row(_CODE.INVALID_ARGUMENT, r"^request for unknown model", _not_found),
    _row(_CODE.INTERNAL, r"failed to poll from model repository", _rejected),
    _row(_CODE.INVALID_ARGUMENT, r"", _rejected),
    _row(_CODE.RESOURCE_EXHAUSTED, r"message larger than max", _message_size),
    _row(_CODE.RESOURCE_EXHAUSTED, r"", _overloaded),
    _row(_CODE.DEADLINE_EXCEEDED, r"", _deadline),
    _row(_CODE.CANCELLED, r"^(cancelled)?$", _unavailable),  # a server that stops; our callers are not asked here
    _row(_CODE.CANCELLED, r"", _cancelled),
    _row(_CODE.UNIMPLEMENTED, r"", _unsupported),
    # A text that is not grpc's came from Triton or from the model: the connection is fine, the model is not.
    _row(_UNAVAILABLE, r"", _not_ready),
    _row(_ANY, r"", _failed),
)


def translate(code: grpc.StatusCode, text: str | None, context: CallContext) -> ServeAppError:
    """The error of ours for a gRPC status.

    Args:
        code: What the call ended with; not OK.
        text: Its details.
        context: What the call was.

    Returns:
        One of: `EndpointUnavailable` (connection lost; `EndpointUnreachable` when there was none to begin with),
        `ModelNotReady` (`ModelCrashed` when its process died), `ModelNotFound`, `SharedMemoryNotFound`,
        `RequestRejected`, `RequestTooLarge`, `Overloaded`, `DeadlineExceeded`, `RequestCancelled`, `Unsupported`,
        `BackendFailed`.
    """
    text = text or ""
    for codes, pattern, build in _TABLE:
        if code in codes and pattern.search(text):
            return build(context, telling_line(text))
    raise AssertionError("the last row matches everything")


def _texts(pattern: str, code: grpc.StatusCode) -> tuple[re.Pattern[str], grpc.StatusCode]:
    return re.compile(pattern, re.IGNORECASE), code


_CODES_OF_TEXTS = (
    _texts(r"^unable to find (system )?shared memory region", _CODE.NOT_FOUND),
    _texts(r"^invalid offset .*for shared memory region", _CODE.INVALID_ARGUMENT),
    _texts(r"stub process .*is not healthy", _CODE.INTERNAL),
    _texts(r"has no available versions|unknown model", _CODE.NOT_FOUND),
    _texts(r"maximum queue size|request timeout expired", _CODE.UNAVAILABLE),
    _texts(r"^requested model '.*' is not available", _CODE.INVALID_ARGUMENT),
    _texts(r"inference (input|output)|input tensor|expected \d+ inputs", _CODE.INVALID_ARGUMENT),
    _texts(r"unexpected shape|byte size mismatch|batch-size|correlation id", _CODE.INVALID_ARGUMENT),
    _texts(r"doesn't support|does not support|not supported", _CODE.UNIMPLEMENTED),
)


def code_of(text: str) -> grpc.StatusCode:
    """The status that Triton would have given to an error of which it sent the text alone, as it does in streams."""
    return next((code for pattern, code in _CODES_OF_TEXTS if pattern.search(text)), _CODE.INTERNAL)
