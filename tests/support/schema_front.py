"""The front over a real tritonserver, without Ray, in a process of its own, so that its memory is its own too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import uvicorn

from serve_app.ingress.http_app import http_app
from serve_app.settings import LimitSettings
from tests.support.front import running_plane
from tests.support.stack import ROOT
from tests.support.triton_server import python_config, running_triton, write_model
from tests.support.waiting import wait_until

LIMITS = LimitSettings(max_request_bytes=1024 * 1024, max_json_bytes=1024 * 1024)

# The python backend of Triton 24.10 was built for numpy 1 and loses text with numpy 2.
HAS_TEXT = np.__version__.startswith("1.")

# Datatype by model: `INPUT0` [-1, -1] to `OUTPUT0`, batched.
IDENTITIES = {"identity": "FP32", "ints": "INT64", "flags": "BOOL", **({"texts": "BYTES"} if HAS_TEXT else {})}
GENERATOR = "generator"
"""`text_input` to `text_output`, as the Open Inference Protocol has models that generate."""
DECOUPLED = "repeat"
SPARE = "spare"
"""What is loaded and unloaded; whoever asks for it may find it gone."""

_GENERATOR_PY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("text_output", pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy())]
            )
            for request in requests
        ]
"""
_GENERATOR_CONFIG = """
backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


@dataclass(frozen=True)
class SchemaFront:
    """A front that runs.

    Attributes:
        url: Its address.
        process: The front's.
        triton: The server's.
        log: What the front has written.
    """

    url: str
    process: psutil.Process
    triton: psutil.Process
    log: Path


@contextlib.contextmanager
def running_schema_front() -> Iterator[SchemaFront]:
    """Start the process, and end it by closing what it reads from."""
    folder = Path(tempfile.mkdtemp(prefix="schema-front-"))
    log = folder / "front.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.schema_front", str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        started = json.loads(line)
        yield SchemaFront(started["url"], psutil.Process(process.pid), psutil.Process(started["triton_pid"]), log)
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            text = log.read_text()
            shutil.rmtree(folder, ignore_errors=True)
        assert process.returncode == 0, text


def write_models(repository: Path) -> None:
    """All models of the front."""
    for name, datatype in IDENTITIES.items():
        type_name = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
        write_model(repository, name, config=python_config(datatype=type_name))
    write_model(repository, SPARE)
    if HAS_TEXT:
        write_model(repository, GENERATOR, config=_GENERATOR_CONFIG, files={"1/model.py": _GENERATOR_PY})
    shutil.copytree(ROOT / "tests" / "support" / "model_repository" / DECOUPLED, repository / DECOUPLED)


async def serve(folder: Path) -> None:
    """Serve until standard input ends; says where on standard output."""
    write_models(folder / "models")
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_triton(folder / "models"))
        assert server.endpoint is not None
        plane, _ = await stack.enter_async_context(running_plane(server.endpoint, limits=LIMITS))
        config = uvicorn.Config(http_app(plane, LIMITS), port=0, log_level="warning", lifespan="off", ws="none")
        http = uvicorn.Server(config)
        serving = asyncio.create_task(http.serve())
        await wait_until(lambda: http.started or serving.done(), timeout_s=30)
        host, port = http.servers[0].sockets[0].getsockname()[:2]
        pid = server.statistics()["pid"]
        print(json.dumps({"url": f"http://{host}:{port}", "triton_pid": pid}), flush=True)

        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def read() -> None:
            sys.stdin.buffer.read()
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()
        http.should_exit = True
        await serving


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
