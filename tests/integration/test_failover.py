"""kill -9 of tritonserver under load: typed errors and a quick return with one server, no error at all with two."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from typing import Any

import aiohttp
import pytest

from tests.support.stack import Stack
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration


class Load:
    """Callers that ask for their own unique rows without pause, and note how each request ended."""

    def __init__(self, stack: Stack, *, num_callers: int = 16) -> None:
        self._url = f"http://{stack.http}/v2/models/identity/infer"
        self._num_callers = num_callers
        self._stop = asyncio.Event()
        self.ended: Counter[str] = Counter()
        self.errors: list[str] = []
        self.last_error_at = 0.0

    async def __aenter__(self) -> Load:
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
        self._tasks = [asyncio.create_task(self._call(number)) for number in range(self._num_callers)]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stop.set()
        try:
            await asyncio.gather(*self._tasks)
        finally:
            await self._client.close()

    async def _call(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            value = float(number * 10_000 + turn)
            body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}]}
            async with self._client.post(self._url, json=body) as answer:
                document: Any = await answer.json(content_type=None)
                if answer.status == 200:
                    assert document["outputs"][0]["data"] == [value], "an answer to somebody else"
                    self.ended["ok"] += 1
                else:
                    self.ended[str(answer.status)] += 1
                    self.errors.append(document["error"])
                    self.last_error_at = time.monotonic()
                    await asyncio.sleep(0.02)


def recovery_bound_s() -> float:
    """Five seconds; as much more as the machine has more to do than it has CPUs, for a restart is work."""
    return 5.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


async def test_one_server_is_killed(stack: Stack) -> None:
    """Every request ends; those that fail say 503; within five seconds the last error is past."""
    stack.scale_fleet(1)
    (server,) = await asyncio.to_thread(stack.tritonservers)
    async with Load(stack) as load:
        await wait_until(lambda: load.ended["ok"] > 100, timeout_s=20)
        os.kill(server.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        await wait_until(lambda: not stack.live_servers([server]), timeout_s=10)
        ok = load.ended["ok"]
        await wait_until(lambda: load.ended["ok"] > ok + 200, timeout_s=20, what=lambda: load.ended)
    assert set(load.ended) <= {"ok", "503"}, (load.ended, set(load.errors))
    assert load.last_error_at - killed_at < recovery_bound_s()
    assert all("\n" not in text and "Traceback" not in text for text in load.errors)


async def test_a_models_process_is_killed(stack: Stack) -> None:
    """The stub of a model dies: typed errors if any, the server stays, the model is back within five seconds."""
    stack.scale_fleet(1)
    (server,) = await asyncio.to_thread(stack.tritonservers)
    async with Load(stack) as load:
        await wait_until(lambda: load.ended["ok"] > 100, timeout_s=20)
        stubs = [child for child in server.children() if "/identity/" in " ".join(child.cmdline())]
        assert stubs
        for stub in stubs:
            stub.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        await wait_until(lambda: not stack.live_servers(stubs), timeout_s=10)
        ok = load.ended["ok"]
        await wait_until(lambda: load.ended["ok"] > ok + 200, timeout_s=20, what=lambda: load.ended)
    assert set(load.ended) <= {"ok", "503"}, (load.ended, set(load.errors))
    assert load.last_error_at - killed_at < recovery_bound_s()
    assert server.is_running()


async def test_one_of_two_servers_is_killed(stack: Stack) -> None:
    """With another server left, no client sees it."""
    stack.scale_fleet(2)
    servers = await asyncio.to_thread(stack.tritonservers)
    assert len(servers) == 2
    async with Load(stack) as load:
        await wait_until(lambda: load.ended["ok"] > 100, timeout_s=20)
        os.kill(servers[0].pid, signal.SIGKILL)
        await wait_until(lambda: len(stack.live_servers(servers)) == 1, timeout_s=5)
        await wait_until(lambda: stack.num_endpoints() == 2, timeout_s=20, what=stack.model_server_statistics)
        ok = load.ended["ok"]
        await wait_until(lambda: load.ended["ok"] > ok + 200, timeout_s=20, what=lambda: load.ended)
    assert set(load.ended) == {"ok"}, (load.ended, set(load.errors))
