"""V2 requests whose JSON is too large to be parsed whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from serve_app.errors import InvalidRequest, ServeAppError
from serve_app.protocol.json_codec import parse_json, request_of
from serve_app.protocol.json_scan import CutPlace
from serve_app.protocol.large_json import LargeJson
from serve_app.protocol.messages import InferRequest, ModelSpec
from serve_app.protocol.output_plan import OutputPlan
from serve_app.protocol.validation import check_request
from serve_app.settings import LimitSettings

_READ_MEMBERS = ("name", "datatype", "shape", "parameters")  # of a tensor, beside its data


def large_request_of(
    text: memoryview,
    tail: memoryview,
    *,
    model_name: str,
    model_version: str,
    limits: LimitSettings,
    spec: ModelSpec | None,
    on_piece: Callable[[], None],
) -> tuple[InferRequest, OutputPlan]:
    """`request_of` for JSON that is too large to be parsed whole.

    Args:
        text: The JSON.
        tail: The bytes behind it.
        model_name: As for `request_of`.
        model_version: As for `request_of`.
        limits: As for `request_of`.
        spec: The model, if known: tensors that are large beside their text are made only when it takes them.
        on_piece: Called before each piece of the text; what it raises ends the work.

    Raises:
        InvalidRequest: As for `parse_json` and `request_of`.
        RequestTooLarge: As for `request_of`, or too much JSON beside the data of the tensors.
        ServeAppError: As for `validation.check_request`, where it has been asked.
    """
    large, document = cut_json(text, CutPlace.TENSOR_MEMBER, on_piece)
    try:
        _put_back(document, large)
        found = request_of(document, tail, model_name=model_name, model_version=model_version, limits=limits)
    except ServeAppError:
        large.check()
        raise
    large.check()
    outlines = None if spec is None else large.outlines(found[0].inputs)
    if spec is not None and outlines is not None:
        check_request(replace(found[0], inputs=outlines), spec, limits)
    large.make()
    return found


def cut_json(text: memoryview, place: CutPlace, on_piece: Callable[[], None]) -> tuple[LargeJson, dict[str, Any]]:
    """A large JSON object without its long values, for which there are tokens, and these values.

    Raises:
        InvalidRequest: As for `parse_json`, as far as it shows without the long values.
        RequestTooLarge: Too much beside the long values.
    """
    if bytes(text[:64]).lstrip()[:1] not in (b"{", b""):
        raise InvalidRequest("body", "JSON that begins otherwise", "a JSON object")
    large = LargeJson(text, place, on_piece=on_piece)
    return large, parse_json(large.rest, field="body")


def _put_back(document: dict[str, Any], large: LargeJson) -> None:
    """Long values in the place of their tokens, so that only the data of tensors is one that has not been parsed."""
    for member in document.values():
        for entry in member if type(member) is list else ():
            for key, token in entry.items() if type(entry) is dict else ():
                value = large.value_of(token)
                if value is not None:
                    entry[key] = value.whole() if key in _READ_MEMBERS else value
