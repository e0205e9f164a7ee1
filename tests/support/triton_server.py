"""A real `tritonserver` for integration tests, started by the product's own supervisor, and small models for it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from serve_app.fleet.supervisor import TritonSupervisor
from serve_app.settings import TritonServerArgs

IDENTITY_PY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)]))
        return answers
"""


def python_config(
    *, datatype: str = "TYPE_FP32", max_batch_size: int = 8, dims: str = "-1", count: int = 1, extra: str = ""
) -> str:
    """A full `config.pbtxt` of a python model from `INPUT0` to `OUTPUT0`."""
    return (
        f'backend: "python"\nmax_batch_size: {max_batch_size}\n'
        f'input [ {{ name: "INPUT0" data_type: {datatype} dims: [ {dims} ] }} ]\n'
        f'output [ {{ name: "OUTPUT0" data_type: {datatype} dims: [ {dims} ] }} ]\n'
        f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]\n{extra}\n"
    )


def write_model(
    repository: Path, name: str, *, config: str | None = None, files: Mapping[str, str | bytes] | None = None
) -> Path:
    """Write a model folder; by default a python identity.

    Args:
        repository: Made when missing.
        name: The model's.
        config: Text of `config.pbtxt`; that of `python_config()` by default, none for an empty string.
        files: Content by path inside the folder; an identity `1/model.py` by default.
    """
    folder = repository / name
    for path, content in (files if files is not None else {"1/model.py": IDENTITY_PY}).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
    folder.mkdir(parents=True, exist_ok=True)
    text = python_config() if config is None else config
    if text:
        (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    return folder


@contextlib.asynccontextmanager
async def running_triton(
    repository: Path, *, args: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[TritonSupervisor]:
    """A supervised `tritonserver` over `repository`, ready, on 127.0.0.1; `.endpoint.address` is its gRPC target.

    Args:
        repository: Model repository.
        args: More `TritonServerArgs`.
        options: More arguments of `TritonSupervisor`.
    """
    # Unix sockets have short paths only, and pytest's temporary folders have long ones.
    state_dir = Path(options.pop("state_dir", None) or tempfile.mkdtemp(prefix="triton-test-"))
    settings = TritonServerArgs(
        **{
            "model_repository": str(repository),
            "drain_s": 0.0,
            "start_timeout_s": 60.0,
            "restrict_admin": False,  # tests ask it directly
            **(args or {}),
        }
    )
    try:
        async with TritonSupervisor(settings, state_dir=state_dir, **options) as supervisor:
            yield supervisor
    finally:
        shutil.rmtree(state_dir, ignore_errors=True)
