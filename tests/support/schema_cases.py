"""What schema-driven tests ask the front for: both schemas, and requests that are right, or right but for one part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from tests.support.schema_front import DECOUPLED, GENERATOR, HAS_TEXT, IDENTITIES, SPARE

SCHEMAS_VARIABLE = "SERVE_APP_SCHEMAS"
"""Names the folder that has the Open Inference Protocol's `open_inference_rest.yaml` and `generate_rest.yaml`."""

Document = dict[str, Any]

MODELS = [*IDENTITIES, DECOUPLED, SPARE, *([GENERATOR] if HAS_TEXT else []), "nothing"]

_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
_SCALAR = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), _TEXT)
JUNK = st.recursive(
    st.none() | _SCALAR,
    lambda some: st.lists(some, max_size=3) | st.dictionaries(_TEXT, some, max_size=3),
    max_leaves=5,
)
_PARAMETER_NAMES = st.sampled_from(
    ["priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "binary_data_output", "own", "triton_x"]
)
_ELEMENTS: dict[str, st.SearchStrategy[Any]] = {
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "BOOL": st.booleans(),
    "BYTES": _TEXT,
}


def open_inference_schema() -> Document | None:
    """Both published schemas as one, or `None` where `SCHEMAS_VARIABLE` is not set.

    Their paths are written `${MODEL_NAME}`, and of each only the form with a version is there; the protocol makes the
    version optional, so the one without is added.
    """
    folder = os.environ.get(SCHEMAS_VARIABLE)
    if not folder:
        return None
    schema, generate = (
        yaml.safe_load((Path(folder) / name).read_text()) for name in ("open_inference_rest.yaml", "generate_rest.yaml")
    )
    schema["components"]["schemas"].update(generate["components"]["schemas"])
    paths = {path.replace("$", ""): methods for path, methods in (schema["paths"] | generate["paths"]).items()}
    for path, methods in list(paths.items()):
        if "/versions/{MODEL_VERSION}" in path:
            paths[path.replace("/versions/{MODEL_VERSION}", "")] = _without_version(methods)
    schema["paths"] = paths
    return dict(schema)


def _without_version(methods: Document) -> Document:
    found: Document = {}
    for name, value in methods.items():
        if name == "parameters":
            found[name] = [each for each in value if each["name"] != "MODEL_VERSION"]
        else:
            found[name] = _without_version(value) if name in ("get", "post") else value
    if "operationId" in found:
        found["operationId"] += "-latest"
    return found


def _tensor(datatype: str, rows: int, columns: int) -> st.SearchStrategy[Any]:
    row = st.lists(_ELEMENTS[datatype], min_size=columns, max_size=columns)
    nested = st.lists(row, min_size=rows, max_size=rows)
    return nested | nested.map(lambda some: [value for row in some for value in row])


@st.composite
def infer_documents(draw: st.DrawFn, model: str) -> Any:
    """The body of an infer request; every other one has something else in place of one of its parts."""
    datatype = IDENTITIES.get(model, "FP32")
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(0, 4))
    tensor = {
        "name": "INPUT0",
        "datatype": datatype,
        "shape": [rows, columns],
        "data": draw(_tensor(datatype, rows, columns)),
    }
    document: Document = {"inputs": [tensor]}
    if draw(st.booleans()):
        document["id"] = draw(_TEXT)
    if draw(st.booleans()):
        document["parameters"] = draw(st.dictionaries(_PARAMETER_NAMES, _SCALAR, max_size=2))
    if draw(st.booleans()):
        parameters = draw(
            st.dictionaries(
                st.sampled_from(["binary_data", "classification", "own"]), st.booleans() | st.integers(0, 5), max_size=2
            )
        )
        document["outputs"] = [{"name": "OUTPUT0", "parameters": parameters}]
    return _damaged(draw, document) if draw(st.booleans()) else document


@st.composite
def generate_documents(draw: st.DrawFn, model: str) -> Any:
    """The body of a generate request of the Open Inference Protocol; as `infer_documents`."""
    document: Document = {"text_input": draw(_TEXT)}
    if model == DECOUPLED:
        document = {"COUNT": draw(st.integers(0, 4))}
    elif model != GENERATOR:
        document = {"INPUT0": draw(st.lists(_ELEMENTS[IDENTITIES.get(model, "FP32")], max_size=3))}
    if draw(st.booleans()):
        some = {"temperature": st.floats(0, 2), "top_p": st.floats(0, 1), "max_tokens": st.integers(1, 100)}
        document["parameters"] = draw(st.fixed_dictionaries({}, optional={**some, "details": st.booleans()}))
    document = _damaged(draw, document) if draw(st.booleans()) else document
    if isinstance(document.get("COUNT"), (int, float, list)):  # no endless ones
        document["COUNT"] = draw(st.integers(-1, 20))
    return document


def _damaged(draw: st.DrawFn, document: Document) -> Any:
    place: Any = document
    while True:
        key = draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
        if isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
            place = place[key]
            continue
        place[key] = draw(JUNK)
        return document


SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "/v2/logging": st.fixed_dictionaries(
        {},
        optional={
            "log_file": _TEXT,
            "log_info": st.booleans() | JUNK,
            "log_warning": st.booleans(),
            "log_error": st.booleans(),
            "log_verbose_level": st.integers(-1, 2) | JUNK,
            "log_format": st.sampled_from(["default", "ISO8601", "other"]) | JUNK,
        },
    ),
    "trace/setting": st.fixed_dictionaries(
        {},
        optional={
            "trace_level": st.lists(st.sampled_from(["OFF", "TIMESTAMPS", "TENSORS", "x"]), max_size=2) | JUNK,
            "trace_rate": st.sampled_from(["0", "1", "1000", "-1", "x", ""]) | JUNK,
            "trace_count": st.sampled_from(["0", "1", "-1", "-2", "x"]) | JUNK,
            "log_frequency": st.sampled_from(["0", "1", "-1"]) | JUNK,
            "trace_file": _TEXT,
            "trace_mode": st.sampled_from(["triton", "opentelemetry"]) | JUNK,
        },
    ),
    "/load": st.fixed_dictionaries(
        {},
        optional={
            "parameters": st.fixed_dictionaries(
                {},
                optional={
                    "config": st.sampled_from(["{}", '{"backend":"python"}', "x", ""]) | JUNK,
                    "file:1/model.py": st.sampled_from(["", "cGFzcw==", "!"]) | JUNK,
                    "file:../up": _TEXT,
                },
            )
        },
    ),
    "/unload": st.fixed_dictionaries(
        {}, optional={"parameters": st.fixed_dictionaries({}, optional={"unload_dependents": st.booleans() | JUNK})}
    ),
}
"""Bodies of the control operations by the end of their path."""


def near_bodies(path: str, model: str) -> st.SearchStrategy[Any] | None:
    """Bodies that come near to what the operation takes; `None` where the schema alone says."""
    if path.endswith("/infer"):
        return infer_documents(model)
    if path.endswith(("/generate", "/generate_stream")):
        return generate_documents(model)
    return next((bodies for end, bodies in SETTINGS.items() if path.endswith(end)), None)
