"""Finds the long values in large JSON, by brackets and quotes alone, so that the rest can be parsed by itself."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from serve_app.errors import InvalidRequest, RequestTooLarge

WHOLE_BYTES = 256 * 1024
"""JSON of at most this is parsed whole, which takes up to 36 times its size (9 MiB); of larger JSON what is beside its
long values. Parsing so much takes a few milliseconds, about as long as a request may keep the event loop busy."""

WINDOW_BYTES = 64 * 1024
"""Read at a time: large enough that the cost of Python around it does not count, small enough for a CPU's cache."""

# Shorter values stay where they are: an array of this length is hardly longer than what would stand in its place.
CUT_BYTES = 64

# orjson's own limit.
_MAX_DEPTH = 1024

_WHITESPACE = b" \t\n\r"
_QUOTE, _BACKSLASH, _COLON = b'"'[0], b"\\"[0], b":"[0]
_OPENERS, _CLOSERS = b"[{", b"]}"

_DELTA = np.zeros(256, np.int8)
_DELTA[list(_OPENERS)] = 1
_DELTA[list(_CLOSERS)] = -1
_IS_EVENT = bytes(1 if code in b'"[]{}' else 0 for code in range(256))


class CutPlace(Enum):
    """Where values are long: the containers around them."""

    TENSOR_MEMBER = b"{[{"  # `data` of a tensor in `inputs`
    MEMBER = b"{"  # an input in a flat object


@dataclass(frozen=True, slots=True)
class CutSpan:
    """Where a long value lies.

    Attributes:
        token: The string that stands for it in what is left; nobody outside can know it.
        start: Offset of its bracket or quote.
        end: Offset behind its other bracket or quote.
    """

    token: str
    start: int
    end: int


def blank_escapes(window: bytes) -> bytes:
    """The window with two other characters for each escaped backslash and quote; it begins outside of an escape."""
    if _BACKSLASH not in window:
        return window
    return window.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def end_of_window(view: memoryview, start: int, stop: int) -> bytes:
    """The window from `start` to `stop` or one less, so that the next one does not begin with an escaped character."""
    window = bytes(view[start:stop])
    if stop < len(view) and window.endswith(b"\\"):
        run = len(window) - len(window.rstrip(b"\\"))
        if run % 2 and len(window) > 1:
            return window[:-1]
    return window


class JsonScanner:
    """One walk over a large JSON text.

    Only brackets and quotes are looked at; whether it is JSON shows when the parts are parsed.

    Args:
        text: The whole of it.
        place: Which values to cut out.
        on_window: Called before each window; what it raises ends the walk.
    """

    def __init__(self, text: memoryview, place: CutPlace, on_window: Callable[[], None]) -> None:
        self._text, self._place, self._on_window = text, place, on_window
        self._level = len(place.value)
        self._secret = secrets.token_hex(8)
        self._stack = bytearray()  # the containers that are open, to one below the level
        self._depth, self._in_string = 0, False
        self._string_at = self._cut_at = -1
        self._rest, self._kept = bytearray(), 0
        self.spans: list[CutSpan] = []

    def scan(self) -> bytes:
        """Find the long values, which are then in `spans`.

        Returns:
            The text with a token in the place of each long value.

        Raises:
            InvalidRequest: Nested too deeply, or it ends too early.
            RequestTooLarge: What is left is more than `WHOLE_BYTES`.
        """
        position, size = 0, len(self._text)
        while position < size:
            self._on_window()
            window = end_of_window(self._text, position, min(position + WINDOW_BYTES, size))
            if self._in_string or any(char in window for char in (b'"', b"[", b"]", b"{", b"}")):
                self._read(window, position)
            position += len(window)
            if self._cut_at < 0 and not (self._string_at >= 0 and self._is_value(self._string_at)):
                self._check_rest(position)
        if self._cut_at >= 0 or self._in_string:
            raise InvalidRequest("body", "invalid JSON (unexpected end of data)", "a JSON object")
        self._rest += self._text[self._kept :]
        return bytes(self._rest)

    def _read(self, window: bytes, position: int) -> None:
        codes = np.frombuffer(blank_escapes(window), np.uint8)
        at = np.flatnonzero(np.frombuffer(codes.tobytes().translate(_IS_EVENT), np.uint8))
        if not at.size:
            return
        codes = codes[at]
        is_quote = codes == _QUOTE
        inside = (np.cumsum(is_quote) + self._in_string) & 1
        delta = np.where(inside, 0, _DELTA[codes])
        after = np.cumsum(delta, dtype=np.int64) + self._depth
        if after.max() > _MAX_DEPTH:
            raise InvalidRequest("body", f"invalid JSON (more than {_MAX_DEPTH} levels)", "a JSON object")
        chosen = (np.minimum(after, after - delta) <= self._level) & (is_quote | (delta != 0))
        self._depth, self._in_string = int(after[-1]), bool(inside[-1])
        for offset, code in zip((at[chosen] + position).tolist(), codes[chosen].tolist(), strict=True):
            self._take(offset, code)

    def _take(self, offset: int, code: int) -> None:
        """One quote or bracket that is outside of every value that may be long, or at its edge."""
        if code == _QUOTE:
            if self._string_at < 0:
                self._string_at = offset
                return
            start, self._string_at = self._string_at, -1
            if offset - start >= CUT_BYTES and self._is_value(start):
                self._cut(start, offset + 1)
        elif code in _OPENERS:
            if code == _OPENERS[0] and bytes(self._stack) == self._place.value:
                self._cut_at = offset
            self._stack.append(code)
        else:
            if self._stack:
                self._stack.pop()
            if self._cut_at >= 0 and len(self._stack) == self._level:
                start, self._cut_at = self._cut_at, -1
                if offset - start >= CUT_BYTES:
                    self._cut(start, offset + 1)

    def _is_value(self, start: int) -> bool:
        """Whether the string at `start` is a value in the place of long ones, and no key."""
        if bytes(self._stack) != self._place.value:
            return False
        before = b""
        while start > 0 and not before:
            before = bytes(self._text[max(0, start - 64) : start]).rstrip(_WHITESPACE)
            start -= 64
        return before.endswith(b":")

    def _cut(self, start: int, end: int) -> None:
        span = CutSpan(f"{self._secret}:{len(self.spans)}", start, end)
        self._rest += self._text[self._kept : start]
        self._rest += f'"{span.token}"'.encode()
        self._kept = end
        self.spans.append(span)
        self._check_rest(end)

    def _check_rest(self, position: int) -> None:
        size = len(self._rest) + position - self._kept
        if size > WHOLE_BYTES:
            raise RequestTooLarge("JSON beside the data of the tensors", size, WHOLE_BYTES)

    def __repr__(self) -> str:
        return f"<JsonScanner {len(self._text)} bytes, {len(self.spans)} long values, {len(self._rest)} bytes beside>"
