"""One JSON value of any length, parsed in pieces: orjson judges every piece in the place where it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from serve_app.errors import InvalidRequest
from serve_app.protocol import json_scan
from serve_app.protocol.json_scan import blank_escapes, end_of_window

# Between two commas, strings apart: no number and no run of brackets is that long.
_MAX_GAP_BYTES = 256 * 1024

_QUOTE = b'"'[0]
_BLANK = ord("_")
_NO_BRACKETS = bytes(code for code in range(256) if code not in b"[]{}")
_OPENERS = b"[{"
# How containers that are open where a piece ends are closed, the innermost one with an element that stands for those
# to come, and how they are opened again, with one that stands for those before: so that a comma too many is found.
_CLOSE = {b"["[0]: b"]", b"{"[0]: b"}"}
_CLOSE_LAST = {b"["[0]: b",0]", b"{"[0]: b',"":0}'}
_REOPEN = {b"["[0]: b"[", b"{"[0]: b'{"":'}
_REOPEN_LAST = {b"["[0]: b"[0,", b"{"[0]: b'{"":0,'}
_HIGH_SURROGATES = (b"\\ud8", b"\\ud9", b"\\uda", b"\\udb")
_UNIT_BYTES = 6  # of `\\uXXXX`


@dataclass(frozen=True, slots=True)
class LongString:
    """A string that is longer than a window: where its text lies, between the quotes."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a value.

    Attributes:
        tree: Containers that go on from the piece before are opened again around it. The first element of each of
            them is no new one: it stands for all that came before, or is the container that goes on itself.
        num_continued: Containers that go on from the piece before.
        num_open: Containers that go on in the next piece.
        long_strings: By the strings that stand for them in `tree`.
    """

    tree: Any
    num_continued: int
    num_open: int
    long_strings: dict[str, LongString]


class JsonPieces:
    """The pieces of a value.

    Args:
        text: The whole JSON.
        start: Where the value begins.
        end: Where it ends.
        token: A string that no value can be equal to.
        on_piece: Called before each piece; what it raises ends the walk.
    """

    def __init__(self, text: memoryview, start: int, end: int, *, token: str, on_piece: Callable[[], None]) -> None:
        self._text, self._start, self._end = text[:end], start, end
        self._token, self._on_piece = token, on_piece

    def __iter__(self) -> Iterator[Piece]:
        """One after the other; each is freed before the next one is read if the caller does not keep it.

        Raises:
            InvalidRequest: The value is not JSON.
        """
        position, stack = self._start, b""
        while position < self._end:
            self._on_piece()
            begun = position
            text, brackets, strings, position = self._next(position)
            after = _stack_after(stack, brackets) if position < self._end else b""
            opened = b"".join([_REOPEN[code] for code in stack[:-1]] + [_REOPEN_LAST[code] for code in stack[-1:]])
            closed = b"".join([_CLOSE_LAST[code] for code in after[-1:]] + [_CLOSE[code] for code in after[-2::-1]])
            tree = _parse(b"".join((opened, text, closed)), begun)
            _drop_last(tree, after)
            yield Piece(tree, len(stack), len(after), strings)
            del tree
            stack = after

    def _next(self, position: int) -> tuple[bytes, bytes, dict[str, LongString], int]:
        """A piece up to a comma between elements: its text, the brackets in it, and where the next one begins."""
        parts: list[bytes] = []
        strings: dict[str, LongString] = {}
        brackets, size = b"", 0
        while True:
            window = bytes(self._text[position : position + json_scan.WINDOW_BYTES])
            outside, is_string_open = _outside_strings(window)
            if position + len(window) == self._end:
                if is_string_open:
                    raise _invalid("unexpected end of data", self._end)
                parts.append(window)
                return b"".join(parts), brackets, strings, self._end  # nothing goes on: brackets do not matter
            comma = outside.rfind(b",")
            if comma >= 0:
                parts.append(window[:comma])
                brackets += outside[:comma].translate(None, _NO_BRACKETS)
                return b"".join(parts), brackets, strings, position + comma + 1
            if is_string_open:
                quote = blank_escapes(window).rfind(b'"')
                string = self._long_string(position + quote + 1)
                token = f"{self._token}:{len(strings)}"
                strings[token] = string
                parts.append(window[:quote] + f'"{token}"'.encode())
                brackets += outside[:quote].translate(None, _NO_BRACKETS)
                position = string.end + 1
            else:
                parts.append(window if b'"' in window else _squeeze(window))
                brackets += outside.translate(None, _NO_BRACKETS)
                position += len(window)
            size += len(parts[-1])
            if size > _MAX_GAP_BYTES:
                raise _invalid(f"{size} bytes without a comma", position)

    def _long_string(self, start: int) -> LongString:
        """The string whose text begins at `start`; it is checked."""
        position = start
        while position < self._end:
            window = end_of_window(self._text, position, min(position + json_scan.WINDOW_BYTES, self._end))
            quote = blank_escapes(window).find(b'"')
            if quote >= 0:
                string = LongString(start, position + quote)
                for _ in self.string_parts(string):
                    pass
                return string
            position += len(window)
        raise _invalid("unexpected end of data", self._end)

    def string_parts(self, string: LongString) -> Iterator[bytes]:
        """What a long string stands for, as UTF-8, in parts.

        Raises:
            InvalidRequest: It is no JSON string.
        """
        position = string.start
        while position < string.end:
            self._on_piece()
            stop = min(position + json_scan.WINDOW_BYTES, string.end)
            window = bytes(self._text[position:stop])
            if stop < string.end:
                window = window[: _string_cut(window, self._text[stop])]
            yield _parse(b'"' + window + b'"', position).encode()
            position += len(window)


def _string_cut(window: bytes, following: int) -> int:
    """How much of a string's window to take so that no escape, surrogate pair or character is cut."""
    escapes = window.replace(b"\\\\", b"__")
    cut, last = len(window), escapes.rfind(b"\\")

    def is_high(at: int) -> bool:
        return at >= 0 and escapes[at : at + 4].lower() in _HIGH_SURROGATES

    if last >= 0 and (last + _UNIT_BYTES > cut or (last + _UNIT_BYTES == cut and is_high(last))):
        cut = last - _UNIT_BYTES if is_high(last - _UNIT_BYTES) else last
    else:
        for _ in range(3):
            if following & 0xC0 != 0x80:  # it begins a character
                break
            cut -= 1
            following = window[cut]
    return cut if cut > 0 else len(window)


def _outside_strings(window: bytes) -> tuple[bytes, bool]:
    """The window with the text of strings blanked, and whether a string is open at its end; none is at its start."""
    if _QUOTE not in window:
        return window, False
    codes = np.frombuffer(blank_escapes(window), np.uint8)
    inside = np.cumsum(codes == _QUOTE, dtype=np.uint8) & 1
    return np.where(inside, np.uint8(_BLANK), codes).tobytes(), bool(inside[-1])


def _squeeze(window: bytes) -> bytes:
    """The window with one space for each run of whitespace."""
    head = b" " if window[:1].isspace() else b""
    tail = b" " if window[-1:].isspace() else b""
    # Not all that `split` takes for whitespace is whitespace in JSON.
    return window if b"\v" in window or b"\f" in window else head + b" ".join(window.split()) + tail


def _drop_last(tree: Any, open_containers: bytes) -> None:
    """Take out the element that stands for those to come; not below an object, into which nobody looks."""
    if open_containers and b"{" not in open_containers:
        for _ in open_containers[1:]:
            tree = tree[-1]
        del tree[-1]


def _stack_after(stack: bytes, brackets: bytes) -> bytes:
    """The containers that are open after some brackets; whether their kinds match is for orjson to judge."""
    if not brackets:
        return stack
    codes = np.frombuffer(brackets, np.uint8)
    is_opener = (codes == _OPENERS[0]) | (codes == _OPENERS[1])
    depths = np.cumsum(np.where(is_opener, 1, -1))
    lowest_from = np.minimum.accumulate(depths[::-1])[::-1]
    closed = max(0, -int(lowest_from[0]))
    stays: bytes = codes[is_opener & (lowest_from == depths)].tobytes()
    return stack[: max(0, len(stack) - closed)] + stays


def _parse(text: bytes, position: int) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        note = "; NaN and infinities are not JSON, send them as binary data"
        has_words = b"NaN" in text or b"Infinity" in text
        reason = f"{error.msg}, behind byte {position}"
    raise InvalidRequest("body", f"invalid JSON ({reason})", f"a JSON object{note if has_words else ''}")


def _invalid(reason: str, position: int) -> InvalidRequest:
    return InvalidRequest("body", f"invalid JSON ({reason}, before byte {position})", "a JSON object")
