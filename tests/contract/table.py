"""The contract table: all its rows."""

from __future__ import annotations

import numpy as np

from tests.contract.case import Case, Row
from tests.contract.cases import binary, control, grpc, http, members, models, parameters, shapes, values

THEMES = (values, shapes, members, parameters, binary, models, http, grpc, control)
ROWS: list[Row] = [row for theme in THEMES for row in theme.T.rows]
CODEC_CASES = [row for row in ROWS if isinstance(row, Case) and row.is_codec_case and not row.ends_triton]
"""Those whose answers by Triton are recorded for the unit tests."""

# The python backend of Triton 24.10 was built for numpy 1; with numpy 2 its process ends of the first BYTES tensor.
_CAN_TAKE_BYTES = int(np.__version__.partition(".")[0]) < 2


def _has_bytes(row: Row) -> bool:
    if isinstance(row, Case):
        return b"BYTES" in row.body or row.model == "raw_bytes"
    path = row.http[1] if row.http is not None else ""
    message = row.rpc[1].SerializeToString() if row.rpc is not None else b""
    return "raw_bytes/generate" in path or b"BYTES" in message


USABLE = [row for row in ROWS if _CAN_TAKE_BYTES or not _has_bytes(row)]
"""Those that this machine's numpy can answer."""
