"""JSON that is too large to be parsed whole: its long values are cut out and turned into tensors in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from serve_app.errors import InvalidRequest, RequestTooLarge
from serve_app.protocol import json_scan
from serve_app.protocol.datatypes import Datatype
from serve_app.protocol.json_elements import ElementPacker
from serve_app.protocol.json_pieces import JsonPieces
from serve_app.protocol.json_scan import CutPlace, CutSpan, JsonScanner
from serve_app.protocol.json_tensor import check_has_json
from serve_app.protocol.parameters import json_type
from serve_app.protocol.tensor import Buffer, Tensor

_LARGE_ABOVE_BYTES = json_scan.WHOLE_BYTES

# Tensors are made as they are read until there are so many bytes of them for each byte of JSON. Those that would take
# more are judged to their end first, so that a request is not refused after all that has been allocated.
_EAGER_RATIO = 1.5


def is_large(size_bytes: int) -> bool:
    """Whether JSON of a size is read in pieces; that takes long enough for a thread of its own."""
    return size_bytes > _LARGE_ABOVE_BYTES


class _Reading:
    """What the long values of a text share: the text, and what they may allocate."""

    __slots__ = ("_reserved_bytes", "_whole_bytes", "on_piece", "text")

    def __init__(self, text: memoryview, on_piece: Callable[[], None]) -> None:
        self.text, self.on_piece = text, on_piece
        self._reserved_bytes = self._whole_bytes = 0

    def reserve(self, size_bytes: int) -> bool:
        """Whether a tensor of that size may be made while others have not been judged yet."""
        if self._reserved_bytes + size_bytes > _EAGER_RATIO * len(self.text):
            return False
        self._reserved_bytes += size_bytes
        return True

    def take_whole(self, size_bytes: int) -> None:
        """Count a value that is parsed whole.

        Raises:
            RequestTooLarge: They are too large together.
        """
        self._whole_bytes += size_bytes
        if self._whole_bytes > json_scan.WHOLE_BYTES:
            raise RequestTooLarge("JSON beside the data of the tensors", self._whole_bytes, json_scan.WHOLE_BYTES)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A tensor to be made when all is judged."""

    datatype: Datatype
    shape: tuple[int, ...] | None
    field: str
    size_bytes: int


class LongValue:
    """A long array or string that has been cut out of a JSON text.

    Attributes:
        is_array: Whether it is an array; else a string.
    """

    __slots__ = ("_data", "_is_checked", "_plan", "_reading", "_span", "is_array")

    def __init__(self, reading: _Reading, span: CutSpan) -> None:
        self._reading, self._span = reading, span
        self.is_array = reading.text[span.start] == ord("[")
        self._is_checked = False
        self._plan: _Plan | None = None
        self._data = bytearray()  # of the plan

    @property
    def size_bytes(self) -> int:
        """Length of its text."""
        return self._span.end - self._span.start

    @property
    def is_postponed(self) -> bool:
        """Whether its tensor is to be made by `make`."""
        return self._plan is not None

    def pack(self, *, datatype: Datatype, shape: tuple[int, ...], field: str) -> Buffer:
        """What `json_tensor.pack_json` makes of the value, and its errors.

        Returns:
            The tensor's bytes; a tensor that is large beside its text gets them when `make` is called.
        """
        check_has_json(datatype, field)
        if not self.is_array and shape:
            raise InvalidRequest(field, json_type(""), "an array")
        size = self._packed_bytes(datatype, math.prod(shape))
        if self._reading.reserve(size):
            data = bytearray(size)
            self._read(datatype, shape, field, data).finish()
            return data
        self._read(datatype, shape, field, None).finish()
        self._plan = _Plan(datatype, shape, field, size)
        return self._data

    def judge(self, *, datatype: Datatype, field: str) -> ElementPacker:
        """Its elements as those of a flat array of any length, or one string; for the caller to finish."""
        return self._read(datatype, None, field, None)

    def pack_flat(self, num_elements: int, *, datatype: Datatype, field: str) -> Buffer:
        """The bytes of what `judge` found right; they are there when `make` has been called."""
        self._plan = _Plan(datatype, None, field, self._packed_bytes(datatype, num_elements))
        return self._data

    def outline(self, tensor: Tensor) -> Tensor:
        """The tensor if it is not this value's, else one as large as this one will be, whatever is in it."""
        if self._plan is None or tensor.data is not self._data:
            return tensor
        zeros = np.broadcast_to(np.zeros(1, np.uint8), (self._plan.size_bytes,))  # one byte, over and over
        return replace(tensor, data=memoryview(zeros))  # type: ignore[arg-type]  # stubs lack __buffer__

    @property
    def has_outline(self) -> bool:
        """Whether `outline` can show its tensor: the inside of `BYTES` would be looked at."""
        return self._plan is not None and self._plan.datatype.size_bytes is not None

    def make(self) -> None:
        """Make the tensor that was postponed, if it was."""
        plan = self._plan
        if plan is not None:
            self._data += b"\0"
            self._data *= plan.size_bytes
            self._read(plan.datatype, plan.shape, plan.field, self._data).finish()

    def whole(self) -> Any:
        """The value parsed whole, for where no long one belongs.

        Raises:
            InvalidRequest: It is not JSON.
            RequestTooLarge: It is too large for that.
        """
        self._reading.take_whole(self.size_bytes)
        self.check()
        return orjson.loads(self._reading.text[self._span.start : self._span.end])

    def check(self) -> None:
        """Check that it is JSON.

        Raises:
            InvalidRequest: It is not.
        """
        if not self._is_checked:
            for _ in self._pieces():
                pass
            self._is_checked = True

    def _packed_bytes(self, datatype: Datatype, num_elements: int) -> int:
        """The tensor's size, for `BYTES` the most it can be: four bytes for the two quotes and the comma of each."""
        if datatype.size_bytes is None:
            return self.size_bytes + num_elements + 1
        return num_elements * datatype.size_bytes

    def _pieces(self) -> JsonPieces:
        span, reading = self._span, self._reading
        return JsonPieces(reading.text, span.start, span.end, token=span.token, on_piece=reading.on_piece)

    def _read(
        self, datatype: Datatype, shape: tuple[int, ...] | None, field: str, out: bytearray | None
    ) -> ElementPacker:
        packer = ElementPacker(datatype, shape, field=field, out=out)
        pieces = self._pieces()
        for piece in pieces:
            packer.take(piece, pieces)
        self._is_checked = True
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
        rest: The JSON that is left, with a token for each long value.

    Raises:
        InvalidRequest: It ends too early, or is nested too deeply.
        RequestTooLarge: More than `json_scan.WHOLE_BYTES` are left.
    """

    def __init__(self, text: memoryview, place: CutPlace, *, on_piece: Callable[[], None]) -> None:
        scanner = JsonScanner(text, place, on_piece)
        self.rest = scanner.scan()
        reading = _Reading(text, on_piece)
        self._values = {span.token: LongValue(reading, span) for span in scanner.spans}

    def value_of(self, found: Any) -> LongValue | None:
        """The long value that a token stands for, `None` for everything else."""
        return self._values.get(found) if type(found) is str else None

    def check(self) -> None:
        """Check the long values that nobody has read: what is no JSON is refused for that, whatever else is wrong.

        Raises:
            InvalidRequest: One of them is not JSON.
        """
        for value in self._values.values():
            value.check()

    def outlines(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Tensors as large as these will be, where some have been postponed and all of those can be shown."""
        postponed = [value for value in self._values.values() if value.is_postponed]
        if not postponed or not all(value.has_outline for value in postponed):
            return None
        shown = list(tensors)
        for value in postponed:
            shown = [value.outline(tensor) for tensor in shown]
        return shown

    def make(self) -> None:
        """Make the tensors that were postponed."""
        for value in self._values.values():
            value.make()

    def __repr__(self) -> str:
        return f"<LargeJson {len(self._values)} long values, {len(self.rest)} bytes beside>"
