"""Tensors of megabytes pass every way in, and what is above the limit is refused before it is read."""

from __future__ import annotations

import json

import numpy as np
import pytest
import requests

from tests.support.stack import Stack
from tests.support.ways_in import WAYS_IN, WayIn, http_json

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("megabytes", [4.9, 64])
@pytest.mark.parametrize("way", [way for way in WAYS_IN if way is not http_json], ids=lambda way: way.__name__)
def test_large_tensors_pass(stack: Stack, way: WayIn, megabytes: float) -> None:
    """3x640x640 FP32 and 64 MB, there and back, bit for bit."""
    values = np.arange(int(megabytes * 1024 * 1024 / 4), dtype=np.float32).reshape(1, -1)
    np.testing.assert_array_equal(way(stack, "identity", {"INPUT0": values})["OUTPUT0"], values)


def test_a_body_above_the_limit_is_refused_unread(stack: Stack) -> None:
    """413 with size and limit, from the declared length alone."""
    session = requests.Session()
    call = requests.Request("POST", f"http://{stack.http}/v2/models/identity/infer", data=b"{}").prepare()
    call.headers["Content-Length"] = str(2 * 1024**3)
    answer = session.send(call, timeout=20)
    assert answer.status_code == 413
    assert json.loads(answer.text)["error"] == "request body: 2147483648 bytes, the limit is 1073741824 bytes"
