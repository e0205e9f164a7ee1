"""The elements of a tensor out of the pieces of its `data`, judged as `json_tensor.pack_json` judges them."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from serve_app.errors import InvalidRequest
from serve_app.protocol.datatypes import Datatype
from serve_app.protocol.json_pieces import JsonPieces, Piece
from serve_app.protocol.json_tensor import (
    JSON_FORMS,
    count_error,
    element_path,
    nesting_error,
    outer_nesting_error,
    range_error,
    value_error,
)
from serve_app.protocol.tensor import pack_bytes

_LENGTH = struct.Struct("<I")
_NO_FORM: tuple[frozenset[type], str, str] = (frozenset(), "binary data", "")  # its elements can only be counted


class ElementPacker:
    """Takes the pieces of an array in turn.

    What is wrong is held until all pieces have been seen, since of several errors the outer one counts, as it does
    where an array is judged as a whole: nesting, then the number of elements, their types, their ranges.

    Args:
        datatype: Where it does not travel as JSON, no element is right.
        shape: The tensor's shape; `None`: a flat array of any length.
        field: Path of the array for error texts.
        out: Is filled with the bytes of the elements, and has room for them; `None`: they are only judged.
    """

    def __init__(self, datatype: Datatype, shape: tuple[int, ...] | None, *, field: str, out: bytearray | None) -> None:
        self._kinds, self._what, self._code = JSON_FORMS.get(datatype.name, _NO_FORM)
        self._datatype, self._shape, self._field, self._out = datatype, shape, field, out
        self._axes = shape or (0,)
        self._filled = 0  # bytes of `out`
        self._is_nested: bool | None = None
        self._is_bare = False
        self._num_parts = [0] * len(self._axes)  # complete arrays at each depth
        self._lengths = [0] * len(self._axes)  # of the array that is open at each depth
        self._outer_length = 0
        self._error: Callable[[], InvalidRequest] | None = None
        self._error_axis = len(self._axes) + 2  # where the error is; behind the axes: types, ranges, none
        self.num_elements = 0

    def take(self, piece: Piece, pieces: JsonPieces) -> None:
        """The next piece of the array."""
        if self._is_nested is None:
            self._is_bare = type(piece.tree) is not list
            self._is_nested = not self._is_bare and bool(piece.tree) and type(piece.tree[0]) is list
        values: list[Any] | None
        if self._is_bare:
            values = [piece.tree]
        elif self._is_nested:
            values = self._inner(piece)
        else:
            values = piece.tree[1:] if piece.num_continued else piece.tree
        if values is not None:
            self._add(values, piece, pieces)

    def finish(self) -> None:
        """Judge what only the whole shows.

        Raises:
            TensorDatatypeMismatch: See `json_tensor.pack_json`.
            TensorShapeMismatch: See `json_tensor.pack_json`.
        """
        shape, error, self._error = self._shape, self._error, None
        if self._is_nested and shape is not None and (not shape or self._outer_length != shape[0]):
            raise outer_nesting_error(self._outer_length, shape, self._field)
        if error is not None and self._error_axis < len(self._axes):
            raise error()
        if shape is not None and self.num_elements != math.prod(shape):
            raise count_error(self.num_elements, shape, self._field)
        if error is not None:
            raise error()
        if self._out is not None:
            del self._out[self._filled :]

    def _inner(self, piece: Piece) -> list[Any] | None:
        """The elements in a piece of a nested array, or `None` where nesting is wrong already."""
        parts: list[Any] = [piece.tree]
        last = len(self._axes) - 1
        for axis in range(last + 1):
            if axis >= self._error_axis:
                return None
            goes_on, stays_open = piece.num_continued > axis, piece.num_open > axis
            if not self._measure(parts, axis, goes_on=goes_on, stays_open=stays_open):
                return None
            inner = list(chain.from_iterable(parts))
            # The first one is not new. It is an array that goes on and has to be followed, unless it only stands
            # for those before.
            if goes_on and (axis == last or piece.num_continued == axis + 1):
                del inner[0]
            parts = inner
        return parts

    def _measure(self, parts: list[Any], axis: int, *, goes_on: bool, stays_open: bool) -> bool:
        """Check the arrays at a depth: that they are arrays, and the lengths of those that end here."""
        if set(map(type, parts)) <= {list}:
            lengths = list(map(len, parts))
            if goes_on:
                lengths[0] += self._lengths[axis] - 1
            if stays_open:
                self._lengths[axis] = lengths.pop()
            if axis == 0:
                self._outer_length = lengths[0] if lengths else self._lengths[0]
                return True
            if set(lengths) <= {self._axes[axis]}:
                self._num_parts[axis] += len(lengths)
                return True
        self._hold_nesting_error(parts, axis, goes_on=goes_on, stays_open=stays_open)
        return False

    def _hold_nesting_error(self, parts: list[Any], axis: int, *, goes_on: bool, stays_open: bool) -> None:
        for index, part in enumerate(parts):
            length = None
            if type(part) is list:
                length = len(part) + (self._lengths[axis] - 1 if goes_on and not index else 0)
                if length == self._axes[axis] or (stays_open and index == len(parts) - 1):
                    continue
            place = self._num_parts[axis] + index
            self._error_axis = axis
            self._error = partial(nesting_error, place, part, length, self._axes, axis, self._field)
            return

    def _add(self, values: list[Any], piece: Piece, pieces: JsonPieces) -> None:
        first = self.num_elements
        self.num_elements += len(values)
        if not values or self._error_axis <= len(self._axes):
            return
        if not set(map(type, values)) <= self._kinds:
            index = next(i for i, value in enumerate(values) if type(value) not in self._kinds)
            got = values[index]
            self._hold(0, lambda: value_error(got, self._what, self._datatype, self._path(first + index)))
            return
        if self._error is not None:
            return
        if self._shape is not None and self.num_elements > math.prod(self._shape):
            self._out = None  # too many: from here on they are only judged
        if not self._code:
            self._add_strings(values, piece, pieces)
            return
        try:
            packed = struct.pack(f"<{len(values)}{self._code}", *values)
        except (struct.error, OverflowError):
            index = next(i for i, value in enumerate(values) if not self._fits(value))
            self._hold(1, lambda: range_error(self._datatype, self._path(first + index)))
            return
        self._put(packed)

    def _add_strings(self, values: list[Any], piece: Piece, pieces: JsonPieces) -> None:
        out = self._out
        if out is None:
            return
        if not piece.long_strings:
            self._put(pack_bytes(values, name=self._field))
            return
        for value in values:
            string = piece.long_strings.get(value)
            if string is None:
                self._put(pack_bytes((value,), name=self._field))
                continue
            start = self._filled
            self._filled += _LENGTH.size
            for part in pieces.string_parts(string):
                self._put(part)
            _LENGTH.pack_into(out, start, self._filled - start - _LENGTH.size)

    def _put(self, packed: bytes) -> None:
        if self._out is not None:
            end = self._filled + len(packed)
            self._out[self._filled : end] = packed
            self._filled = end

    def _hold(self, behind_nesting: int, error: Callable[[], InvalidRequest]) -> None:
        self._error_axis = len(self._axes) + behind_nesting
        self._error = error
        self._out = None

    def _fits(self, value: Any) -> bool:
        try:
            struct.pack(f"<{self._code}", value)
        except (struct.error, OverflowError):
            return False
        return True

    def _path(self, index: int) -> str:
        if self._is_bare and self._shape is not None:
            return self._field
        is_flat = not self._is_nested or len(self._axes) == 1
        return self._field + (f"[{index}]" if is_flat else element_path(index, self._axes))

    def __repr__(self) -> str:
        return f"<ElementPacker {self._field} {self._datatype.name} {self.num_elements} elements>"
