"""What README shows is run, as it stands there, against the real thing."""

from __future__ import annotations

import re
import subprocess
import sys

import orjson
import pytest

from tests.support.stack import ROOT, Stack

pytestmark = pytest.mark.integration

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"<!-- run: (\w+) -->\n```\w+\n(.*?)```", README, re.DOTALL)


def test_there_are_examples() -> None:
    """A curl line, Triton's client, the handle and our client."""
    assert [kind for kind, _ in BLOCKS] == ["curl", "python", "python", "python"]


@pytest.mark.parametrize(("kind", "text"), BLOCKS, ids=lambda value: value if value in ("curl", "python") else "")
def test_an_example_runs_and_prints_what_it_says(stack: Stack, kind: str, text: str) -> None:
    """Python examples print what the comments beside their `print` say; curl gets the answer that README shows."""
    assert stack.handle is not None  # the cluster is up, and its driver.env is written
    text = text.replace("127.0.0.1:8000", stack.http)
    command = text if kind == "curl" else f". {stack.driver_env} && exec {sys.executable} - <<'PYTHON'\n{text}PYTHON\n"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    if kind == "curl":
        shown = re.search(r"```json\n(.*?)```", README, re.DOTALL)
        assert shown is not None
        assert orjson.loads(done.stdout) == orjson.loads(shown[1])
    else:
        expected = re.findall(r"print\(.*#\s*(.+)", text) + re.findall(r"print\(.*\),\s*#\s*(.+)", text)
        assert done.stdout.split("\n")[:-1] == list(dict.fromkeys(expected))
