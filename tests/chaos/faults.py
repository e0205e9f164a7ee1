"""Faults that are done to a running product, each with what callers are promised while it is on."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from tests.chaos.report import Promise
from tests.chaos.system import ChaosStack
from tests.chaos.traffic import MODEL

DIES = 999.0
"""The value on which the model's process ends; see its `model.py`."""

HIDDEN = Promise()
"""A replica and a server survive: nobody sees it."""

Hold = Callable[[ChaosStack], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        name: As the table has it.
        hold: Does it on entry and undoes it, where it does not pass by itself, on exit.
        hold_s: Seconds between the two.
        promise: What callers see of it.
        is_for_soak: Whether it may come every few seconds; not for those that take a while to come back from.
    """

    name: str
    hold: Hold
    hold_s: float = 0.0
    promise: Promise = HIDDEN
    is_for_soak: bool = True


FAULTS: list[Fault] = []


def fault(
    name: str, *, hold_s: float = 0.0, promise: Promise | None = None, is_for_soak: bool = True
) -> Callable[[Callable[[ChaosStack], AsyncIterator[None]]], Hold]:
    """Enter a generator function into the list; it yields while the fault is on."""

    def enter(function: Callable[[ChaosStack], AsyncIterator[None]]) -> Hold:
        hold = contextlib.asynccontextmanager(function)
        FAULTS.append(Fault(name, hold, hold_s, promise or HIDDEN, is_for_soak))
        return hold

    return enter


OF_ONE_FRONT = Promise(is_hidden=False, recovery_s=12.0, may_lose=True)
"""All connections go through it."""


# --- kill -9 --------------------------------------------------------------------------------------------------------


@fault("kill -9 a tritonserver")
async def kill_tritonserver(stack: ChaosStack) -> AsyncIterator[None]:
    stack.tritonservers()[0].kill()
    yield


@fault("kill -9 a model's python stub")
async def kill_stub(stack: ChaosStack) -> AsyncIterator[None]:
    stack.stubs(stack.tritonservers()[0], MODEL)[0].kill()
    yield


@fault("kill -9 a ModelServer replica")
async def kill_model_server(stack: ChaosStack) -> AsyncIterator[None]:
    stack.actors("ServeReplica:models:ModelServer")[0].kill()
    yield


@fault("kill -9 a TritonServer replica", is_for_soak=False)
async def kill_triton_replica(stack: ChaosStack) -> AsyncIterator[None]:
    stack.actors("ServeReplica:triton:TritonServer")[0].kill()
    yield


@fault("kill -9 the endpoint registry")
async def kill_registry(stack: ChaosStack) -> AsyncIterator[None]:
    stack.actors("EndpointRegistry")[0].kill()
    yield


@fault("kill -9 HAProxy", promise=OF_ONE_FRONT)
async def kill_haproxy(stack: ChaosStack) -> AsyncIterator[None]:
    for process in stack.named("haproxy"):
        process.kill()
    yield


@fault("kill -9 Serve's controller", is_for_soak=False)
async def kill_controller(stack: ChaosStack) -> AsyncIterator[None]:
    stack.actors("ServeController")[0].kill()
    yield


# --- servers that are there and of no use ---------------------------------------------------------------------------


@fault("SIGSTOP a tritonserver for 10 s", hold_s=10.0, is_for_soak=False)
async def stop_tritonserver(stack: ChaosStack) -> AsyncIterator[None]:
    server = stack.tritonservers()[0]
    server.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.Error):
            server.resume()


@fault("all servers gone for 20 s", hold_s=20.0, promise=Promise(is_hidden=False), is_for_soak=False)
async def no_servers(stack: ChaosStack) -> AsyncIterator[None]:
    await asyncio.to_thread(stack.remove_fleet)
    try:
        yield
    finally:
        await asyncio.to_thread(stack.resize_fleet, 2)
        await asyncio.to_thread(stack.wait_for_servers, 2)


@fault("a tritonserver ten times slower for 10 s", hold_s=10.0)
async def slow_tritonserver(stack: ChaosStack) -> AsyncIterator[None]:
    family = [stack.tritonservers()[0], *stack.tritonservers()[0].children(recursive=True)]

    async def brake() -> None:
        while True:
            for process in family:
                process.suspend()
            await asyncio.sleep(0.045)
            for process in family:
                process.resume()
            await asyncio.sleep(0.005)

    task = asyncio.create_task(brake())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.resume()


@fault("connections to a tritonserver reset")
async def reset_connections(stack: ChaosStack) -> AsyncIterator[None]:
    server = stack.tritonservers()[0]
    ports = {one.laddr.port for one in server.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    num_broken = 0
    for replica in stack.actors("ServeReplica:models:ModelServer"):
        for connection in replica.net_connections("tcp"):
            if connection.raddr and connection.raddr.port in ports:
                _shut_down(replica.pid, connection.fd)
                num_broken += 1
    assert num_broken >= 2, "the replicas have no connections to the server"
    yield


@fault("a request that ends the model's process")
async def poison(stack: ChaosStack) -> AsyncIterator[None]:
    entry = {"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [DIES, DIES]}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{stack.http}/v2/models/{MODEL}/infer", json={"inputs": [entry]}) as answer:
            assert answer.status >= 500, "the poison was swallowed without an effect"
        yield


# --- nothing left of something --------------------------------------------------------------------------------------


@fault("file descriptors of a replica exhausted for 5 s", hold_s=5.0, promise=Promise(is_hidden=False))
async def no_descriptors(stack: ChaosStack) -> AsyncIterator[None]:
    replica = stack.actors("ServeReplica:models:ModelServer")[0]
    before = resource.prlimit(replica.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(replica.pid, resource.RLIMIT_NOFILE, (replica.num_fds() + 1, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(replica.pid, resource.RLIMIT_NOFILE, before)


@fault("no memory for more in a replica for 5 s", hold_s=5.0, promise=Promise(is_hidden=False), is_for_soak=False)
async def no_memory(stack: ChaosStack) -> AsyncIterator[None]:
    replica = stack.actors("ServeReplica:models:ModelServer")[0]
    before = resource.prlimit(replica.pid, resource.RLIMIT_AS)
    resource.prlimit(replica.pid, resource.RLIMIT_AS, (replica.memory_info().vms + 2**24, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(replica.pid, resource.RLIMIT_AS, before)


@fault("/dev/shm full for 5 s", hold_s=5.0, is_for_soak=False)
async def no_shared_memory(stack: ChaosStack) -> AsyncIterator[None]:
    ballast = Path(f"/dev/shm/serve_app_chaos_{os.getpid()}")
    free = os.statvfs("/dev/shm")
    try:
        await asyncio.to_thread(_allocate, ballast, free.f_bavail * free.f_frsize)
        yield
    finally:
        ballast.unlink(missing_ok=True)


# --- what operators do ----------------------------------------------------------------------------------------------


@fault("new version of the front deployed", promise=Promise(recovery_s=20.0), is_for_soak=False)
async def redeploy(stack: ChaosStack) -> AsyncIterator[None]:
    await asyncio.to_thread(stack.redeploy_front)
    yield


@fault("settings changed in place")
async def reconfigure(stack: ChaosStack) -> AsyncIterator[None]:
    await asyncio.to_thread(stack.change_settings)
    yield


@fault("front scaled to 3 replicas and back", promise=Promise(recovery_s=20.0), is_for_soak=False)
async def scale_front(stack: ChaosStack) -> AsyncIterator[None]:
    await asyncio.to_thread(stack.resize_front, 3)
    await asyncio.to_thread(stack.wait_for_replicas, 3)
    await asyncio.to_thread(stack.resize_front, 2)
    await asyncio.to_thread(stack.wait_for_replicas, 2)
    yield


@fault("fleet scaled to 1 server and back", promise=Promise(recovery_s=20.0), is_for_soak=False)
async def scale_fleet(stack: ChaosStack) -> AsyncIterator[None]:
    await asyncio.to_thread(stack.resize_fleet, 1)
    await asyncio.to_thread(stack.wait_for_servers, 1)
    await asyncio.to_thread(stack.resize_fleet, 2)
    await asyncio.to_thread(stack.wait_for_servers, 2)
    yield


# --- what strangers do ----------------------------------------------------------------------------------------------


@fault("4,000 connections opened and dropped")
async def many_connections(stack: ChaosStack) -> AsyncIterator[None]:
    host, port = stack.http.split(":")

    async def open_and_drop() -> None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v2/models/picky/infer HTTP/1.1\r\nContent-Length: 100\r\n")
            await asyncio.sleep(0.2)
            writer.transport.abort()

    for _ in range(8):
        await asyncio.gather(*(open_and_drop() for _ in range(500)))
    yield


# --- how -------------------------------------------------------------------------------------------------------------


def _allocate(path: Path, size_bytes: int) -> None:
    with path.open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, size_bytes)


_SYS_PIDFD_OPEN, _SYS_PIDFD_GETFD = 434, 438  # the same numbers on all of Linux's architectures since 5.6


def _shut_down(pid: int, descriptor: int) -> None:
    """Break a connection of another process: take a copy of its socket and shut that down."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = libc.syscall(_SYS_PIDFD_OPEN, pid, 0)
    copy = libc.syscall(_SYS_PIDFD_GETFD, pidfd, descriptor, 0)
    os.close(pidfd)
    assert copy >= 0, f"pidfd_getfd: {os.strerror(ctypes.get_errno())}"
    with socket.socket(fileno=copy) as taken, contextlib.suppress(OSError):
        taken.shutdown(socket.SHUT_RDWR)
