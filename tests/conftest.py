"""One real cluster for every test that asks for it, and the environment that a driver of it has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from serve_app.cli.serve_env import find_serve_env, load_serve_env
from tests.support import sample_inputs
from tests.support.stack import ROOT, Stack

# No example is slow by itself: on a busy machine each may be.
hypothesis.settings.register_profile("steady", deadline=None)
hypothesis.settings.load_profile("steady")

# Ray Serve reads its switches when it is imported; this process is a driver, and gets what a driver sources.
os.environ.update(load_serve_env(find_serve_env(ROOT), {**os.environ, "PWD": str(ROOT)}))


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The product, started once; tests put the settings in force that they need."""
    if not sample_inputs.are_samples_built():
        pytest.skip(sample_inputs.NOT_BUILT)
    run_dir = Path(f"/tmp/sa-{os.getpid()}")
    stack = Stack(tmp_path_factory.mktemp("stack"), run_dir=run_dir)
    try:
        stack.start()
        yield stack
    finally:
        stack.close_clients()
        stack.stop()
        shutil.rmtree(run_dir, ignore_errors=True)
