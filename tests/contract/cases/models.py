"""Models and versions that are there or not, and kinds of models: failing, sequences, decoupled, ensembles, BLS."""

from __future__ import annotations

from typing import Any

from tests.contract.case import UNIQUE, Theme, tensor
from tests.contract.differences import DEADLINE, MALFORMED, MORE_ROWS, TIMEOUT, UINT64, VERSION, WRAPS

T = Theme()
INT8 = [tensor("INT8", [1], [1])]
X = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0.5, 1, 2, 3]}]
ROW = [tensor("FP32", [1, 2], [1, 2], name="INPUT0")]

# --- names and versions
_VERSION: dict[str, Any] = {"difference": VERSION, "ours": "not found"}
T.add("unknown model", "nothing", INT8, says=("nothing",))
T.add("model name with a blank", "no%20thing", INT8, is_wire=True)
T.add("model name in other case", "ECHO1", INT8)
T.add("long model name", "m" * 300, INT8)
T.add("only version", "echo1", INT8, version="1")
T.add("newest version by default", "labels", X)
T.add("first version", "labels", X, version="1")
T.add("third version", "labels", X, version="3")
T.add("version between", "labels", X, version="2", says=("labels", "2"))
T.add("unknown version", "echo1", INT8, version="7", says=("echo1", "7"))
T.add("version beyond 64 bits", "echo1", INT8, version=f"{2**64}", **_VERSION)
T.add("version 0", "echo1", INT8, version="0")
T.add("version -1", "echo1", INT8, version="-1", **_VERSION)
T.add("version with a zero", "echo1", INT8, version="01", **_VERSION)
T.add("version is a word", "echo1", INT8, version="one", **_VERSION)
T.add("version of an unknown model", "nothing", INT8, version="1")

# --- models that fail or take long
T.add("model raises", "picky", [tensor("FP32", [1, 2], [666, 1], name="INPUT0")], ours="failed", says=("666",))
T.add("model refuses", "picky", [tensor("FP32", [1, 1], binary_data_size=4, name="INPUT0")], tail=b"\0\0\xc0\x7f")
T.add("model is pleased", "picky", ROW)
T.add(
    "budget runs out",
    "slow",
    [tensor("FP32", [1, 1], [1000], name="INPUT0")],
    timeout_s=0.2,
    difference=DEADLINE,
    ours="deadline or busy",  # behind another one there is no time left from the start
)
_SLOW = [tensor("FP32", [1, 1], [1000], name="INPUT0")]
_LIMIT: dict[str, Any] = {"difference": TIMEOUT, "ours": "deadline or busy"}
T.add("timeout runs out", "slow", _SLOW, parameters={"timeout": 200_000}, **_LIMIT)
T.add("timeout 0 is none", "slow", [tensor("FP32", [1, 1], [1], name="INPUT0")], parameters={"timeout": 0})
T.add("budget is enough", "slow", [tensor("FP32", [1, 1], [1], name="INPUT0")], timeout_s=60)
T.add("queue timeout", "picky", ROW, parameters={"timeout": 10_000_000})

# --- sequences


def _step(name: str, value: int, parameters: dict[str, Any], **rest: Any) -> None:
    for model in ("accumulate", "accumulate_oldest"):
        inputs = [tensor("INT32", [1, 1], [value], name="VALUE")]
        T.add(f"{name}, {model}", model, inputs, parameters=parameters, outputs=[{"name": "SUM"}], **rest)


def _document(value: int, **parameters: Any) -> dict[str, Any]:
    inputs = [tensor("INT32", [1, 1], [value], name="VALUE")]
    return {"inputs": inputs, "parameters": {"sequence_id": UNIQUE, **parameters}, "outputs": [{"name": "SUM"}]}


_BEGUN = _document(5, sequence_start=True)
_step("sequence of one", 7, {"sequence_id": UNIQUE, "sequence_start": True, "sequence_end": True})
_step("second step", 7, {"sequence_id": UNIQUE, "sequence_end": True}, before=(_BEGUN,))
_step("third step", 7, {"sequence_id": UNIQUE, "sequence_end": True}, before=(_BEGUN, _document(1)))
_step("started anew", 7, {"sequence_id": UNIQUE, "sequence_start": True, "sequence_end": True}, before=(_BEGUN,))
_step("no start", 7, {"sequence_id": UNIQUE})
_step("after the end", 7, {"sequence_id": UNIQUE}, before=(_BEGUN, _document(1, sequence_end=True)))
_step("no sequence id", 7, {"sequence_start": True, "sequence_end": True})
_step("sequence id 0", 7, {"sequence_id": 0, "sequence_start": True, "sequence_end": True})
_step("empty sequence id", 7, {"sequence_id": "", "sequence_start": True, "sequence_end": True})
_step("sequence id beyond 64 bits", 7, {"sequence_id": 2**64, "sequence_start": True}, difference=MALFORMED)
_step("negative sequence id", 7, {"sequence_id": -5, "sequence_start": True}, difference=WRAPS)
_BIG = {"sequence_id": 2**64 - 9, "sequence_start": True, "sequence_end": True}
_step("sequence id beyond signed 64 bits", 7, _BIG, difference=UINT64, ours="ok")
_step("long sequence id", 7, {"sequence_id": "s" * 200, "sequence_start": True, "sequence_end": True})
_BOTH = {"sequence_id": UNIQUE, "sequence_start": True, "sequence_end": True}
_VALUES = [tensor("INT32", [2, 1], [1, 2], name="VALUE")]
T.add("two rows of a sequence", "accumulate_oldest", _VALUES, parameters=_BOTH, outputs=[{"name": "SUM"}])
_VALUES = [tensor("INT32", [5, 1], [1, 2, 3, 4, 5], name="VALUE")]
_CUT: dict[str, Any] = {"parameters": _BOTH, "outputs": [{"name": "SUM"}], "difference": MORE_ROWS, "ours": "too large"}
T.add("too many rows of a sequence", "accumulate_oldest", _VALUES, **_CUT)

# --- decoupled, by calls that have one answer
_COUNT = [tensor("INT32", [1], [1], name="COUNT")]
T.add("decoupled", "repeat", _COUNT, says=("stream",))
T.add("decoupled, wrong input", "repeat", [tensor("INT32", [1], [1], name="X")])
T.add("decoupled, wrong datatype", "repeat", [tensor("FP32", [1], [1], name="COUNT")])

# --- ensembles and BLS
_ABC = [tensor("FP32", [2, 3], [1, 2, 3, 4, 5, 6], name="A")]
for _model in ("ensemble", "bls"):
    T.add(f"{_model}", _model, _ABC)
    T.add(f"{_model}, its output", _model, _ABC, outputs=[{"name": "B"}], id="e")
    T.add(f"{_model}, output of a step", _model, _ABC, outputs=[{"name": "FP32"}])
    T.add(f"{_model}, wrong shape", _model, [tensor("FP32", [1, 2], [1, 2], name="A")])
    T.add(f"{_model}, wrong input", _model, [tensor("FP32", [1, 3], [1, 2, 3], name="FP32")])
    T.add(f"{_model}, no rows", _model, [tensor("FP32", [0, 3], [], name="A")])
    T.add(f"{_model}, version", _model, _ABC, version="1")

# --- one row at most, several inputs that are required
T.add("unbatched", "unbatched", [tensor("FP32", [1, 3], [1, 2, 3], name="INPUT0")])
T.add("unbatched, two rows", "unbatched", [tensor("FP32", [2, 3], [1] * 6, name="INPUT0")])
_IDS = tensor("INT64", [1, 2], [101, 102], name="input_ids")
_MASK = tensor("INT64", [1, 2], [1, 1], name="attention_mask")
T.add("second input missing", "minilm", [_IDS], says=("attention_mask",))
T.add("rows of two inputs differ", "minilm", [_IDS, {**_MASK, "shape": [2, 1]}], says=("attention_mask",))
T.add("one datatype of two is wrong", "minilm", [_IDS, {**_MASK, "datatype": "INT32"}], says=("INT32", "INT64"))
T.add("identity", "identity", ROW)
T.add("no rank for rows", "identity", [tensor("FP32", [2], [1, 2], name="INPUT0")], says=("[2]", "[-1, -1]"))
T.add("many rows", "identity", [tensor("FP32", [8, 2], [1] * 16, name="INPUT0")])
T.add(
    "wrong length of a row", "digits", [tensor("FP32", [2, 63], [0] * 126, name="pixels")], says=("[2, 63]", "[-1, 64]")
)
T.add(
    "two outputs, one asked for",
    "digits",
    [tensor("FP32", [1, 64], [0] * 64, name="pixels")],
    outputs=[{"name": "label"}],
)
