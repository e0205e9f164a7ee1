"""A replica's insides in a process of their own, without Ray: HTTP by uvicorn and gRPC by Ray Serve's own server class.

For what is measured of a whole process, its memory above all. `python -m tests.support.front_process ADDRESS` serves
in front of the Triton at that address until its standard input ends, and prints its two ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop

from serve_app.cli.serve_env import load_serve_env
from serve_app.endpoint import Endpoint
from serve_app.ingress.http_app import http_app
from serve_app.settings import LimitSettings, ModelSettings, process_environment
from tests.support.front import running_plane
from tests.support.grpc_front import grpc_server_of
from tests.support.waiting import wait_until

_MESSAGE_LIMIT = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class FrontProcess:
    """A front that runs.

    Attributes:
        pid: Its process.
        http_port: On 127.0.0.1.
        grpc_port: On 127.0.0.1.
    """

    pid: int
    http_port: int
    grpc_port: int

    def resident_bytes(self) -> int:
        """What it holds in memory now."""
        return self._status("VmRSS")

    def peak_bytes(self) -> int:
        """The most it held since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        """Make what it holds now the peak."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def _status(self, key: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


@contextlib.contextmanager
def running_front_process(
    triton: str, *, max_request_bytes: int | None = None, max_message_bytes: int | None = None
) -> Iterator[FrontProcess]:
    """A front before the Triton at this gRPC address, with the memory settings of `cluster/serve.env`.

    Args:
        triton: Its gRPC target.
        max_request_bytes: The limit of that name; the default when not given.
        max_message_bytes: Ray Serve's limit of a gRPC message; that of `cluster/serve.env` when not given.
    """
    environ = process_environment()
    settings = load_serve_env(ROOT / "cluster" / "serve.env", {})
    environ.update({name: value for name, value in settings.items() if name.startswith(("MALLOC_", _MESSAGE_LIMIT))})
    if max_message_bytes:
        environ[_MESSAGE_LIMIT] = str(max_message_bytes)
    limit = [str(max_request_bytes)] if max_request_bytes else []
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.front_process", triton, *limit],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline().split()
            assert len(line) == 2, "the front did not start"
            yield FrontProcess(process.pid, int(line[0]), int(line[1]))
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


async def _serve(address: str, limits: LimitSettings) -> None:
    patient = ModelSettings(timeout_s=300.0)  # gRPC calls bring no budget, and the machine may be a busy one
    async with running_plane(Endpoint.static(address), limits=limits, settings=patient) as (plane, _):
        grpc_server, grpc_port = grpc_server_of(plane)
        await grpc_server.start()
        config = uvicorn.Config(http_app(plane, limits), port=0, log_level="error", lifespan="off", ws="none")
        http_server = uvicorn.Server(config)
        serving = asyncio.ensure_future(http_server.serve())
        await wait_until(lambda: http_server.started, timeout_s=30, what=lambda: "the HTTP server")
        http_port = http_server.servers[0].sockets[0].getsockname()[1]
        print(http_port, grpc_port, flush=True)  # for the parent
        await asyncio.to_thread(sys.stdin.read)
        http_server.should_exit = True
        await serving
        await grpc_server.stop(1.0)


def main() -> None:
    """See the module."""
    limits = LimitSettings(max_request_bytes=int(sys.argv[2])) if len(sys.argv) > 2 else LimitSettings()
    loop = uvloop.new_event_loop()  # as in Ray's workers
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_serve(sys.argv[1], limits))
    loop.close()


if __name__ == "__main__":
    main()
