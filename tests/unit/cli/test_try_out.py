"""What is printed can be pasted."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from serve_app.cli.try_out import curl_line, summary

DIGITS = {"name": "digits", "inputs": [{"name": "pixels", "datatype": "FP32", "shape": ["-1", "64"]}]}


def test_the_line_for_digits_is_a_whole_request() -> None:
    """A shell hands curl one body of valid JSON with as many values as its shape says."""
    words = shlex.split(
        curl_line("http://127.0.0.1:8000", {"digits": "/v2/models/digits", "minilm": "/v2/models/minilm"}, DIGITS)
    )
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8000/v2/models/digits/infer"]
    (tensor,) = json.loads(words[-1])["inputs"]
    assert len(tensor["data"]) == tensor["shape"][0] * tensor["shape"][1]


def test_other_models_get_a_line_that_works_for_any() -> None:
    """A model of the user's named `digits` with other inputs, or none of ours, gets its metadata shown."""
    other = {"name": "digits", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 64]}]}
    assert curl_line("http://h:1", {"digits": "/v2/models/digits"}, other) == "curl -s http://h:1/v2/models/digits"
    assert curl_line("http://h:1", {"a": "/x/v2/models/a", "b": ""}, None) == "curl -s http://h:1/x/v2/models/a"
    assert shlex.split(curl_line("http://h:1", {}, None))[2] == "http://h:1/v2/health/ready"


def test_the_summary_names_all_addresses() -> None:
    """Whoever starts an instance sees every place it can be reached and looked at."""
    text = summary(
        url="http://127.0.0.1:8000",
        models={"digits": "/text/v2/models/digits"},
        metadata=DIGITS,
        grpc="127.0.0.1:9000",
        applications=["models", "text"],
        dashboard="http://127.0.0.1:8265",
        deployments=Path("/srv/deployments.yaml"),
        driver_env=Path("/tmp/x/driver.env"),
        logs=Path("/tmp/x/logs"),
        commands="/srv/.venv/bin/",
        run_dir=Path("/tmp/x"),
    )
    for expected in (
        "127.0.0.1:9000, with metadata `application`: models or text",
        "digits (below /text)",
        "curl -s http://127.0.0.1:8000/text/v2/models/digits/infer",
        "http://127.0.0.1:8265",
        "/tmp/x/logs",
        "/srv/.venv/bin/serve deploy -a",
        "`SERVE_APP_RUN_DIR=/tmp/x /srv/.venv/bin/serve-app down`",
        ". /tmp/x/driver.env",
    ):
        assert expected in text
