"""The contract table: all its rows."""

from __future__ import annotations

from tests.contract.case import Case, Row
from tests.contract.cases import binary, control, grpc, http, members, models, parameters, shapes, values

THEMES = (values, shapes, members, parameters, binary, models, http, grpc, control)
ROWS: list[Row] = [row for theme in THEMES for row in theme.T.rows]
CODEC_CASES = [row for row in ROWS if isinstance(row, Case) and row.is_codec_case and not row.ends_triton]
"""Those whose answers by Triton are recorded for the unit tests."""
