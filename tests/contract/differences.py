"""Where we answer otherwise than Triton on purpose: the rows of that table in `docs/protocol.md`, by first column.

The document is the list; the cases name its rows, and `test_table` holds both to each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
_HEADING = "## Where we answer otherwise than Triton"


@dataclass(frozen=True)
class Difference:
    """One row: what it is about, what Triton says, what we say, and why."""

    what: str
    triton: str
    here: str
    why: str


def documented() -> dict[str, Difference]:
    """All rows, by `what`."""
    text = _DOCUMENT.read_text(encoding="utf-8").partition(_HEADING)[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: Difference(*row) for row in rows}


MALFORMED = "broken JSON, missing fields, JSON values of another type"
UNKNOWN_MODEL = "unknown model, for statistics or trace settings"
BAD_LOAD = "a load of a model that is not in the repository, or with a configuration that is none"
NOT_READY = "not ready (`health/ready`, `M/ready`)"
HEALTH_BODIES = "bodies of the health calls"
WRAPS = "integers out of range, as data or as parameters"
BEYOND_FP32 = "finite numbers beyond FP32"
WORDS = "`NaN` and `Infinity` as words in a request"
RAGGED = "ragged data, or nested otherwise than `shape` says"
OUTPUT_TWICE = "an output asked for twice"
SERVER_METADATA = "server metadata"
KEY_TWICE = "a JSON member given twice"
GENERATE_NUMBERS = "`priority` or `timeout` in `generate` that is no natural number"
GENERATE_RESERVED = "`triton_...` parameters in `generate`"
GENERATE_PACKED = "a packed body of `generate`"
SHORTEST = "FP32 in JSON"
LEFT_OUT = "an output asked for that the model leaves out"
OUTPUT_ORDER = "order of the outputs asked for"
MISFIT = "an answer with other rows, names, datatypes or shapes than the model declares"
CLASS_ZERO = "`classification: 0`"
VERSION = "a version that is no plain number (`01`, `-1`, `one`), or of more than 18 digits"
ENCODING_CASE = "`Content-Encoding` in capitals"
CUT_BODY = "a compressed body that is cut"
ESCAPES = "percent-escapes in a path"
NULL_OUTPUTS = "`outputs: null`"
RAW_SURPLUS = "more `raw_input_contents` than inputs"
EMPTY_TYPED = "an empty tensor in typed contents"
UINT64 = "integer parameters as `uint64_param`"
SHARED_MEMORY = "shared memory, unless a setting opens it"
QUEUE_FULL = "too much is waiting"
CRASHED = "the model's process died"
ENDS_TRITON = "requests that end Triton's process"
MORE_ROWS = "more rows than `max_batch_size`"
NOT_UTF8 = "`BYTES` output that is not UTF-8, as JSON"
TIMEOUT = "the `timeout` parameter"
DEADLINE = "a missed deadline"
HEADER_LENGTH = "`Inference-Header-Content-Length` that is not a number"
GENERATE_MANY = "`generate` of a model that gives no response, or several"
GENERATE_SEQUENCE = "`sequence_id` and the like in `generate`"
STREAM_STATUS = "a request of a stream refused by `triton_grpc_error: true`"

SHOWN_ELSEWHERE: dict[str, str] = {
    GENERATE_RESERVED: "tests/integration/test_generate_real.py",
    SHORTEST: "tests/unit/protocol/test_golden.py",
    "a key of shared memory that cannot be opened, `key` of another type": "tests/integration/test_shared_memory.py",
    "`shared_memory_byte_size` or `_offset` without a region, beside `data`": "tests/integration/test_shared_memory.py",
    "a shared memory region with an empty name": "tests/integration/test_shared_memory.py",
    MISFIT: "tests/unit/triton/test_failover.py",
    QUEUE_FULL: "tests/unit/triton/test_status.py",
    CRASHED: "tests/unit/triton/test_status.py",
    STREAM_STATUS: "tests/unit/ingress/test_grpc_stream.py",
    "`priority` of a key in a lane": "tests/unit/ingress/test_admission.py",
}
"""Rows that no single call can show, and the tests that do."""
