"""Names of inputs and outputs, ids, and the members of the document."""

from __future__ import annotations

from typing import Any

from tests.contract.case import Theme, tensor
from tests.contract.differences import KEY_TWICE, LEFT_OUT, MALFORMED, NULL_OUTPUTS, OUTPUT_ORDER, OUTPUT_TWICE

T = Theme()
_ORDER: dict[str, Any] = {"difference": OUTPUT_ORDER, "ours": "ok"}
_TWICE: dict[str, Any] = {"difference": KEY_TWICE, "ours": "ok"}
ONE = [tensor("FP32", [1], [1])]

T.add("no inputs", "echo1", b"{}", difference=MALFORMED)
T.add("inputs empty", "echo1", [])
T.add("inputs empty with rows", "rows", [])
T.add("inputs is an object", "echo1", {}, difference=MALFORMED)
T.add("missing input", "fixed", [])
T.add("body is an array", "echo1", b"[]", difference=MALFORMED)
T.add("body is cut", "echo1", b"{", difference=MALFORMED)
T.add("body with more behind", "echo1", b'{"inputs":[]}x', difference=MALFORMED)
T.add("input without shape", "echo1", [{"name": "FP32", "datatype": "FP32", "data": [1]}], difference=MALFORMED)
T.add("input without data", "echo1", [{"name": "FP32", "datatype": "FP32", "shape": [1]}])
T.add("input without name", "echo1", [{"datatype": "FP32", "shape": [1], "data": [1]}], difference=MALFORMED)
T.add("unknown datatype", "echo1", [tensor("FP31", [1], [1], name="FP32")])
T.add("lower-case datatype", "echo1", [tensor("fp32", [1], [1], name="FP32")])
T.add("other datatype", "echo1", [tensor("INT32", [1], [1], name="FP32")])
T.add("input twice", "echo1", [tensor("FP32", [1], [1])] * 2)
T.add("unknown input", "echo1", [tensor("FP32", [1], [1], name="X")])
T.add(
    "several inputs", "echo1", [tensor("FP32", [1], [1]), tensor("BYTES", [2], ["x", "y"]), tensor("INT8", [1], [-3])]
)
T.one("unknown output", "FP32", [1], [1], outputs=[{"name": "X"}])
T.one("output twice", "FP32", [1], [1], outputs=[{"name": "FP32"}] * 2, difference=OUTPUT_TWICE)
T.one("outputs empty", "FP32", [1], [1], outputs=[])
T.one("id", "FP32", [1], [1], id="abc \u00e9")
T.one("empty id", "FP32", [1], [1], id="")
T.one("number as id", "FP32", [1], [1], id=5, difference=MALFORMED)
T.one("unknown member", "FP32", [1], [1], foo={"a": [1]})

T.add("name is a number", "echo1", [{"name": 5, "datatype": "FP32", "shape": [1], "data": [1]}], difference=MALFORMED)
T.add("empty input name", "echo1", [{"name": "", "datatype": "FP32", "shape": [1], "data": [1]}])
T.add("input name in other case", "echo1", [tensor("FP32", [1], [1], name="fp32")])
T.add("input is null", "echo1", [None])
T.add("input is a string", "echo1", ["FP32"])
T.add("inputs is a string", "echo1", "FP32", difference=MALFORMED)
T.add("inputs is null", "echo1", b'{"inputs":null}', difference=MALFORMED)
T.add(
    "datatype is a number", "echo1", [{"name": "FP32", "datatype": 5, "shape": [1], "data": [1]}], difference=MALFORMED
)
T.add("input without datatype", "echo1", [{"name": "FP32", "shape": [1], "data": [1]}], difference=MALFORMED)
T.add(
    "data is an object",
    "echo1",
    [{"name": "FP32", "datatype": "FP32", "shape": [1], "data": {"0": 1}}],
    difference=MALFORMED,
)
T.add(
    "data is a string",
    "echo1",
    [{"name": "STRING", "datatype": "BYTES", "shape": [1], "data": "a"}],
    difference=MALFORMED,
)
T.add(
    "data is null",
    "echo1",
    b'{"inputs":[{"name":"FP32","datatype":"FP32","shape":[1],"data":null}]}',
    difference=MALFORMED,
)
T.add("all optional inputs left out", "echo1", [], id="x")
T.add("empty body", "echo1", b"", is_wire=True)
T.add("body is a number", "echo1", b"5", difference=MALFORMED)
T.add("body is not utf-8", "echo1", b'{"inputs":[],"id":"\xff"}', difference=MALFORMED)
T.add(
    "key twice", "echo1", b'{"inputs":[],"inputs":[{"name":"INT8","datatype":"INT8","shape":[1],"data":[1]}]}', **_TWICE
)
T.add("comment in the body", "echo1", b'{/* x */"inputs":[]}', difference=MALFORMED)
T.add("single quotes", "echo1", b"{'inputs':[]}", difference=MALFORMED)
T.add("trailing comma", "echo1", b'{"inputs":[],}', difference=MALFORMED)
T.add(
    "byte order mark",
    "echo1",
    b'\xef\xbb\xbf{"inputs":[{"name":"INT8","datatype":"INT8","shape":[1],"data":[1]}]}',
    difference=MALFORMED,
)
T.add(
    "blanks around the body", "echo1", b' \n{"inputs":[{"name":"INT8","datatype":"INT8","shape":[1],"data":[1]}]}\n\n'
)
T.add("deep nesting", "echo1", b'{"inputs":' + b"[" * 2000 + b"]" * 2000 + b"}")
T.add("model name in the body", "echo1", ONE, model_name="other", model_version="7")
T.add("outputs is an object", "echo1", ONE, outputs={}, difference=MALFORMED)
T.add("outputs is null", "echo1", ONE, outputs=None, difference=NULL_OUTPUTS, ours="ok")
T.add("output is a string", "echo1", ONE, outputs=["FP32"], difference=MALFORMED)
T.add("output without a name", "echo1", ONE, outputs=[{}], difference=MALFORMED)
T.add("output that the model left out", "echo1", ONE, outputs=[{"name": "INT8"}], difference=LEFT_OUT, ours="failed")
T.add(
    "outputs in another order",
    "echo1",
    [*ONE, tensor("INT8", [1], [2])],
    outputs=[{"name": "INT8"}, {"name": "FP32"}],
    **_ORDER,
)
T.add("one of two outputs", "echo1", [*ONE, tensor("INT8", [1], [2])], outputs=[{"name": "INT8"}])
T.add("long id", "echo1", ONE, id="i" * 5000)
T.add("null id", "echo1", ONE, id=None, difference=MALFORMED)
T.add("blank id", "echo1", ONE, id=" ")
T.add("id with a line break", "echo1", ONE, id="a\nb")
