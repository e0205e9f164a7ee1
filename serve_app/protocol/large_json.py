"""JSON that is too large to be parsed whole: its long values are cut out and turned into tensors in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson

from serve_app.errors import InvalidRequest, RequestTooLarge
from serve_app.protocol import json_scan
from serve_app.protocol.datatypes import Datatype
from serve_app.protocol.json_elements import ElementPacker
from serve_app.protocol.json_pieces import JsonPieces
from serve_app.protocol.json_scan import CutPlace, CutSpan, JsonScanner
from serve_app.protocol.json_tensor import check_has_json
from serve_app.protocol.parameters import json_type
from serve_app.protocol.tensor import Buffer

_LARGE_ABOVE_BYTES = json_scan.WHOLE_BYTES

# Tensors are made as they are read until there are so many bytes of them for each byte of JSON. Those that would take
# more are judged to their end first, so that a request is not refused after all that has been allocated.
_EAGER_RATIO = 1.5


def is_large(size_bytes: int) -> bool:
    """Whether JSON of a size is read in pieces; that takes long enough for a thread of its own."""
    return size_bytes > _LARGE_ABOVE_BYTES


class LongValue:
    """A long array or string that has been cut out of a JSON text.

    Attributes:
        is_array: Whether it is an array; else a string.
        is_checked: Whether all of it is known to be JSON.
    """

    __slots__ = ("_json", "_span", "is_array", "is_checked")

    def __init__(self, json: LargeJson, span: CutSpan) -> None:
        self._json, self._span = json, span
        self.is_array = json.text[span.start] == ord("[")
        self.is_checked = False

    @property
    def size_bytes(self) -> int:
        """Length of its text."""
        return self._span.end - self._span.start

    def pack(self, *, datatype: Datatype, shape: tuple[int, ...], field: str) -> Buffer:
        """What `json_tensor.pack_json` makes of the value, and its errors.

        Returns:
            The tensor's bytes; a tensor that is large beside its text gets them when `LargeJson.finish` is called.
        """
        check_has_json(datatype, field)
        if not self.is_array and shape:
            raise InvalidRequest(field, json_type(""), "an array")
        size = self._packed_bytes(datatype, math.prod(shape))
        if self._json.reserve(size):
            out = bytearray(size)
            self._read(datatype, shape, field, out).finish()
            return out
        self._read(datatype, shape, field, None).finish()
        return self._postpone(datatype, shape, field, size)

    def pack_flat(self, num_elements: int, *, datatype: Datatype, field: str) -> Buffer:
        """The bytes of what `judge` found right; they are there when `LargeJson.finish` has been called."""
        return self._postpone(datatype, None, field, self._packed_bytes(datatype, num_elements))

    def _packed_bytes(self, datatype: Datatype, num_elements: int) -> int:
        """The tensor's size, for `BYTES` the most it can be: four bytes for the two quotes and the comma of each."""
        if datatype.size_bytes is None:
            return self.size_bytes + num_elements + 1
        return num_elements * datatype.size_bytes

    def _postpone(self, datatype: Datatype, shape: tuple[int, ...] | None, field: str, size_bytes: int) -> bytearray:
        out = bytearray()

        def make() -> None:
            out.extend(bytes(size_bytes))
            self._read(datatype, shape, field, out).finish()

        self._json.postpone(make)
        return out

    def judge(self, *, datatype: Datatype, field: str) -> ElementPacker:
        """Its elements as those of a flat array of any length, or one string; for the caller to finish."""
        return self._read(datatype, None, field, None)

    def whole(self) -> Any:
        """The value parsed whole, for where no long one belongs.

        Raises:
            InvalidRequest: It is not JSON.
            RequestTooLarge: It is too large for that.
        """
        self._json.take_whole(self.size_bytes)
        self.check()
        return orjson.loads(self._json.text[self._span.start : self._span.end])

    def check(self) -> None:
        """Check that it is JSON.

        Raises:
            InvalidRequest: It is not.
        """
        if not self.is_checked:
            for _ in self._pieces():
                pass
            self.is_checked = True

    def _pieces(self) -> JsonPieces:
        span = self._span
        return JsonPieces(self._json.text, span.start, span.end, token=span.token, on_piece=self._json.on_piece)

    def _read(
        self, datatype: Datatype, shape: tuple[int, ...] | None, field: str, out: bytearray | None
    ) -> ElementPacker:
        packer = ElementPacker(datatype, shape, field=field, out=out)
        pieces = self._pieces()
        for piece in pieces:
            packer.take(piece, pieces)
        self.is_checked = True
        return packer

    def __repr__(self) -> str:
        return f"<LongValue {'array' if self.is_array else 'string'} {self.size_bytes} bytes>"


class LargeJson:
    """A JSON text without its long values, and these.

    Args:
        text: All of it; borrowed.
        place: Where long values are.
        on_piece: Called now and then while the text is read; what it raises ends the reading.

    Attributes:
        text: As given.
        on_piece: As given.
        rest: The JSON that is left, with a token for each long value.

    Raises:
        InvalidRequest: It ends too early, or is nested too deeply.
        RequestTooLarge: More than `json_scan.WHOLE_BYTES` are left.
    """

    def __init__(self, text: memoryview, place: CutPlace, *, on_piece: Callable[[], None]) -> None:
        self.text, self.on_piece = text, on_piece
        scanner = JsonScanner(text, place, on_piece)
        self.rest = scanner.scan()
        self._values = {span.token: LongValue(self, span) for span in scanner.spans}
        self._reserved_bytes = self._whole_bytes = 0
        self._postponed: list[Callable[[], object]] = []

    def value_of(self, found: Any) -> LongValue | None:
        """The long value that a token stands for, `None` for everything else."""
        return self._values.get(found) if type(found) is str else None

    def reserve(self, size_bytes: int) -> bool:
        """Whether a tensor of that size may be made while others have not been judged yet."""
        if self._reserved_bytes + size_bytes > _EAGER_RATIO * len(self.text):
            return False
        self._reserved_bytes += size_bytes
        return True

    def postpone(self, make: Callable[[], object]) -> None:
        """Have a tensor made by `finish`."""
        self._postponed.append(make)

    def take_whole(self, size_bytes: int) -> None:
        """Count a value that is parsed whole.

        Raises:
            RequestTooLarge: They are too large together.
        """
        self._whole_bytes += size_bytes
        if self._whole_bytes > json_scan.WHOLE_BYTES:
            raise RequestTooLarge("JSON beside the data of the tensors", self._whole_bytes, json_scan.WHOLE_BYTES)

    def check(self) -> None:
        """Check the long values that nobody has read: what is no JSON is refused for that, whatever else is wrong.

        Raises:
            InvalidRequest: One of them is not JSON.
        """
        for value in self._values.values():
            value.check()

    def finish(self) -> None:
        """Check the rest, and make the tensors that were postponed.

        Raises:
            InvalidRequest: A long value that nobody has read is not JSON.
        """
        self.check()
        for make in self._postponed:
            make()

    def __repr__(self) -> str:
        return f"<LargeJson {len(self.text)} bytes, {len(self._values)} long values, {len(self.rest)} bytes beside>"
