"""One supervised tritonserver, the real one: what happens when it, its stub, its guard or its owner is killed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from google.protobuf import json_format

from serve_app.endpoint import Endpoint
from serve_app.errors import (
    BackendFailed,
    EndpointUnavailable,
    InvalidRequest,
    PoolClosed,
    PreflightFailed,
    ServerStartFailed,
)
from serve_app.fleet import launch
from serve_app.fleet.command import Listen
from serve_app.fleet.life import LifeTag
from serve_app.fleet.probe import READY, ServerProbe
from serve_app.fleet.process import TritonProcess, free_ports
from serve_app.fleet.runtime import TritonRuntime, loaded_objects
from serve_app.fleet.stubs import Stub, find_stubs
from serve_app.fleet.supervisor import SupervisorState, TritonSupervisor
from serve_app.settings import TritonServerArgs
from tests.support.triton_server import IDENTITY_PY, python_config, running_triton, write_model

pytestmark = pytest.mark.integration

SLOW_START = "import time\ntime.sleep(60)\n" + IDENTITY_PY


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One healthy model."""
    folder = tmp_path_factory.mktemp("repository")
    write_model(folder, "identity")
    return folder


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A short path, since unix sockets allow no long ones."""
    folder = Path(tempfile.mkdtemp(prefix="triton-test-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def settings(repository: Path, **changes: Any) -> TritonServerArgs:
    """Quick to give up, for tests."""
    values = {"model_repository": str(repository), "drain_s": 0.0, "start_timeout_s": 30.0, "stop_timeout_s": 3}
    return TritonServerArgs(**{**values, **changes})


def leftovers(state_dir: Path, owner_pid: int | None = None) -> list[str]:
    """Processes, shared memory and sockets of servers whose state folder is `state_dir`."""
    tag = re.compile(rf"serve_app_\d+_{owner_pid or os.getpid()}_")
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if tag.search(line) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(f"{process.info['pid']} {line[:60]}")
    found += [name for name in os.listdir("/dev/shm") if tag.match(name)]
    return found + [path.name for path in state_dir.iterdir() if ".sock" in path.name]


@contextlib.asynccontextmanager
async def supervised(args: TritonServerArgs, state_dir: Path, **options: Any) -> AsyncIterator[TritonSupervisor]:
    """A supervisor whose server is killed at the end, which saves the two or three seconds of a soft stop."""
    async with TritonSupervisor(args, state_dir=state_dir, **options) as supervisor:
        try:
            yield supervisor
        finally:
            if pid := supervisor.statistics()["pid"]:
                os.kill(pid, signal.SIGKILL)


async def eventually(check: Callable[[], Any], *, timeout_s: float, what: str) -> float:
    """Wait until `check()` is true; the seconds that it took."""
    start = time.monotonic()
    while not check():
        assert time.monotonic() - start < timeout_s, f"{what}: not within {timeout_s} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - start


def is_port_open(address: str) -> bool:
    """Whether something listens on `host:port`."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def stubs(supervisor: TritonSupervisor) -> list[Stub]:
    """The server's living stubs."""
    return find_stubs(supervisor.statistics()["pid"])


def supervised_stubs(supervisor: TritonSupervisor) -> set[int]:
    """The living stubs, all of which the supervisor must know to notice the end of one."""
    living = {stub.pid for stub in stubs(supervisor)}
    return living if supervisor.statistics()["num_stubs"] == len(living) else set()


def has_healed(supervisor: TritonSupervisor, times: int) -> bool:
    """Whether models were loaded again so many times."""
    return supervisor.num_healed >= times


async def is_model_ready(supervisor: TritonSupervisor, name: str) -> bool:
    """Asks the server itself."""
    assert supervisor.endpoint is not None
    async with ServerProbe(supervisor.endpoint.address, secret=supervisor.endpoint.secret) as probe:
        return any(m.name == name and m.state == READY for m in await probe.models(timeout_s=5))


async def batch_size(supervisor: TritonSupervisor, name: str) -> int:
    """A model's `max_batch_size` in force."""
    assert supervisor.endpoint is not None
    async with ServerProbe(supervisor.endpoint.address, secret=supervisor.endpoint.secret) as probe:
        return int((await probe.model_config(name, timeout_s=5)).max_batch_size)


@pytest.mark.parametrize("transport", ["tcp", "unix"])
async def test_start_serve_stop_leaves_nothing(repository: Path, state_dir: Path, transport: str) -> None:
    """A server is ready when `start` returns, reachable where its endpoint says, and gone without trace after close."""
    seen: list[Endpoint | None] = []
    supervisor = TritonSupervisor(
        settings(repository, transport=transport),
        state_dir=state_dir,
        node_id="n1",
        zone="z1",
        on_endpoint=seen.append,
    )
    assert "new" in repr(supervisor)
    async with supervisor:
        endpoint = supervisor.endpoint
        assert endpoint is not None
        assert seen == [endpoint]
        assert (endpoint.node_id, endpoint.zone) == ("n1", "z1")
        assert endpoint.address.startswith("unix:/" if transport == "unix" else "127.0.0.1:")
        assert "1 wanted, 1 ready, 0 healed" in repr(supervisor)
        assert await is_model_ready(supervisor, "identity")
        supervisor.check_health()
        statistics = supervisor.statistics()
        assert json.loads(json.dumps(statistics))["models"] == {"identity": "READY"}
        assert (statistics["version"], statistics["num_stubs"]) == ("2.51.0", 1)
        assert len(leftovers(state_dir)) >= 3
    assert seen == [endpoint, None]
    assert leftovers(state_dir) == []
    assert transport == "unix" or not is_port_open(endpoint.address)
    assert not is_port_open(endpoint.metrics_url.removeprefix("http://").removesuffix("/metrics"))
    with pytest.raises(PoolClosed):
        supervisor.check_health()


async def test_a_killed_server_is_back_within_five_seconds(repository: Path, state_dir: Path) -> None:
    """kill -9 of tritonserver: the endpoint is withdrawn, then another life with another id is ready."""
    seen: list[Endpoint | None] = []
    async with supervised(settings(repository), state_dir, on_endpoint=seen.append) as supervisor:
        first = supervisor.endpoint
        os.kill(supervisor.statistics()["pid"], signal.SIGKILL)
        took_s = await eventually(lambda: len(seen) == 3, timeout_s=5.0, what="the next life")
        assert took_s < 5.0
        assert seen[1] is None
        assert seen[2] is not None
        assert first is not None
        assert seen[2].server_id != first.server_id
        assert await is_model_ready(supervisor, "identity")
        assert "SIGKILL" in supervisor.statistics()["last_end"]
        assert supervisor.statistics()["num_starts"] == 2
        supervisor.check_health()
    assert leftovers(state_dir) == []


async def test_a_killed_stub_is_noticed_without_a_request_and_healed(state_dir: Path, tmp_path: Path) -> None:
    """kill -9 of a python stub: its model works again in two seconds, with no request and no restart of the server."""
    write_model(tmp_path, "two", config=python_config(count=2))
    write_model(tmp_path, "other")
    async with supervised(settings(tmp_path), state_dir) as supervisor:
        server_pid, before = supervisor.statistics()["pid"], stubs(supervisor)
        assert len(before) == 3
        os.kill(next(stub.pid for stub in before if stub.instance == "two_0_1"), signal.SIGKILL)
        await eventually(lambda: supervisor.num_healed == 1, timeout_s=2.5, what="healing")
        assert supervisor.statistics()["pid"] == server_pid
        assert await is_model_ready(supervisor, "two")
        old = {stub.pid for stub in before}
        assert sorted(stub.instance for stub in stubs(supervisor) if stub.pid not in old) == ["two_0_0", "two_0_1"]
        # The other instance of the version that Triton never finishes unloading ends after its grace period.
        await eventually(lambda: len(stubs(supervisor)) == 3, timeout_s=6.0, what="the old stub's end")
        await asyncio.sleep(1.0)
        assert supervisor.num_healed == 1
    assert leftovers(state_dir) == []


async def test_a_healed_model_keeps_the_config_that_a_client_gave_it(state_dir: Path, tmp_path: Path) -> None:
    """One that came by a load call of Triton's own, of which the supervisor knows nothing; others stay the file's."""
    write_model(tmp_path, "given")
    write_model(tmp_path, "plain")
    async with supervised(settings(tmp_path), state_dir) as supervisor:
        assert supervisor.endpoint is not None
        async with ServerProbe(supervisor.endpoint.address, secret=supervisor.endpoint.secret) as client:
            config = json_format.MessageToDict(
                await client.model_config("given", timeout_s=5), preserving_proto_field_name=True
            )
            await client.load("given", config=json.dumps({**config, "max_batch_size": 3}), timeout_s=20)
        await eventually(lambda: len(supervised_stubs(supervisor)) == 2, timeout_s=10.0, what="the stub's being known")
        for name in ("given", "plain"):
            healed = supervisor.num_healed
            # The newest: one of the config before may be on its way out.
            os.kill(max(stub.pid for stub in stubs(supervisor) if f"/{name}/" in stub.model_path), signal.SIGKILL)
            await eventually(functools.partial(has_healed, supervisor, healed + 1), timeout_s=10.0, what="healing")
        assert await batch_size(supervisor, "given") == 3
        assert await batch_size(supervisor, "plain") == 8
    assert leftovers(state_dir) == []


async def test_a_model_that_a_client_loads_again_is_not_healed(state_dir: Path, tmp_path: Path) -> None:
    """Neither when its instances get other names, nor when they become fewer; a later loss is noticed."""
    write_model(tmp_path, "again", config=python_config(count=2))
    async with supervised(settings(tmp_path), state_dir) as supervisor:
        assert supervisor.endpoint is not None
        async with ServerProbe(supervisor.endpoint.address, secret=supervisor.endpoint.secret) as client:
            config = json_format.MessageToDict(
                await client.model_config("again", timeout_s=5), preserving_proto_field_name=True
            )
            for name in ("renamed", "again_0"):
                config["instance_group"] = [{"name": name, "count": 1, "kind": "KIND_CPU"}]
                config["max_batch_size"] -= 1
                old = {stub.pid for stub in stubs(supervisor)}
                await client.load("again", config=json.dumps(config), timeout_s=20)
                gone = functools.partial(are_replaced, supervisor, old)
                await eventually(gone, timeout_s=10.0, what="the end of the stubs before")
        await eventually(lambda: len(supervised_stubs(supervisor)) == 1, timeout_s=10.0, what="the stub's being known")
        assert supervisor.num_healed == 0
        os.kill(stubs(supervisor)[0].pid, signal.SIGKILL)
        await eventually(functools.partial(has_healed, supervisor, 1), timeout_s=10.0, what="healing")
    assert leftovers(state_dir) == []


def are_replaced(supervisor: TritonSupervisor, old: set[int]) -> bool:
    """Whether none of these stubs runs any more, and another does."""
    now = {stub.pid for stub in stubs(supervisor)}
    return bool(now) and not now & old


async def test_a_stub_that_keeps_dying_leaves_the_others_alone(state_dir: Path, tmp_path: Path) -> None:
    """A model whose stub dies over and over is unloaded in the end; the server and its other models go on."""
    write_model(tmp_path, "good")
    write_model(tmp_path, "fragile")
    args = settings(tmp_path, restart={"initial_backoff_s": 0.0, "max_restarts": 1}, stop_timeout_s=1)
    async with supervised(args, state_dir) as supervisor:
        server_pid = supervisor.statistics()["pid"]
        for healed in (1, 1):
            os.kill(next(s.pid for s in stubs(supervisor) if s.instance == "fragile_0_0"), signal.SIGKILL)
            await eventually(lambda n=healed: supervisor.num_healed == n, timeout_s=3, what="healing")  # type: ignore[misc]
            await asyncio.sleep(0.2)
        await eventually(lambda: supervisor.statistics()["reasons"], timeout_s=3, what="giving up")
        assert "died 2 times in a row" in supervisor.statistics()["reasons"]["fragile"]
        assert supervisor.statistics()["pid"] == server_pid
        assert await is_model_ready(supervisor, "good")
        assert not await is_model_ready(supervisor, "fragile")
        supervisor.check_health()


OWNER = """
import asyncio, sys
from pathlib import Path
from serve_app.fleet.stubs import Stub, find_stubs
from serve_app.fleet.supervisor import TritonSupervisor
from serve_app.settings import TritonServerArgs

async def main():
    args = TritonServerArgs(model_repository=sys.argv[1], stop_timeout_s=3, transport="unix")
    async with TritonSupervisor(args, state_dir=Path(sys.argv[2])) as supervisor:
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.contextmanager
def owner_process(repository: Path, state_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that supervises a server, ready."""
    command = [sys.executable, "-c", OWNER, str(repository), str(state_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "ready\n"
            yield owner
        finally:
            owner.kill()


async def test_killing_the_owner_ends_everything(repository: Path, state_dir: Path) -> None:
    """kill -9 of the owning Python process: guard, server, stubs, shared memory and socket are gone in seconds."""
    with owner_process(repository, state_dir) as owner:
        assert len(leftovers(state_dir, owner.pid)) >= 4
        owner.kill()
        owner.wait()
        await eventually(lambda: not leftovers(state_dir, owner.pid), timeout_s=8.0, what="the end of everything")


async def test_killing_owner_and_guard_is_swept_by_the_next_start(repository: Path, state_dir: Path) -> None:
    """When nobody is left to clean up, the server ends by itself and the next start removes what it left."""
    with owner_process(repository, state_dir) as owner:
        family = psutil.Process(owner.pid).children(recursive=True)
        stub = next(process for process in family if "stub" in process.name() or "stub" in process.exe())
        guard = next(p for p in psutil.Process(owner.pid).children() if "guard.py" in " ".join(p.cmdline()))
        guard.kill()
        owner.kill()
        owner.wait()
        stub.kill()  # Its shared memory is now nobody's.
    await eventually(
        lambda: not [each for each in leftovers(state_dir, owner.pid) if "tritonserver" in each],
        timeout_s=8.0,
        what="the end of the server",
    )
    Path(f"/dev/shm/serve_app_{os.stat('/proc/self/ns/pid').st_ino}_{owner.pid}_1_0_stale").touch()
    async with supervised(settings(repository), state_dir):
        assert leftovers(state_dir, owner.pid) == []


async def test_killing_the_guard_is_a_restart_without_leftovers(repository: Path, state_dir: Path) -> None:
    """kill -9 of the guard: its server and stubs end at once, their memory is removed, and a new life follows."""
    async with supervised(settings(repository), state_dir) as supervisor:
        old = supervisor.statistics()
        regions = [name for name in leftovers(state_dir) if name.startswith("serve_app")]
        assert len(regions) == 1
        os.kill(old["guard_pid"], signal.SIGKILL)
        await eventually(
            lambda: supervisor.endpoint is not None and supervisor.endpoint.server_id != old["server_id"],
            timeout_s=5.0,
            what="the next life",
        )
        assert not psutil.pid_exists(old["pid"]) or psutil.Process(old["pid"]).status() == psutil.STATUS_ZOMBIE
        assert regions[0] not in leftovers(state_dir)
        assert "guard was killed" in supervisor.statistics()["last_end"]
    assert leftovers(state_dir) == []


async def test_the_crash_loop_limit_makes_it_unhealthy(repository: Path, state_dir: Path) -> None:
    """After the last allowed restart nothing is tried again, no endpoint is offered, and `check_health` says why."""
    args = settings(repository, restart={"initial_backoff_s": 0.01, "max_restarts": 1})
    async with supervised(args, state_dir) as supervisor:
        first = supervisor.statistics()["pid"]
        os.kill(first, signal.SIGKILL)
        await eventually(
            lambda: supervisor.statistics()["pid"] not in (None, first) and supervisor.endpoint,
            timeout_s=5.0,
            what="the one restart",
        )
        os.kill(supervisor.statistics()["pid"], signal.SIGKILL)
        await eventually(lambda: supervisor.state is SupervisorState.FAILED, timeout_s=3.0, what="giving up")
        assert supervisor.endpoint is None
        with pytest.raises(ServerStartFailed, match=r"given up after 1 restarts in a row; .*SIGKILL"):
            supervisor.check_health()
        assert leftovers(state_dir) == []


async def test_a_broken_model_does_not_stop_a_good_one(state_dir: Path, tmp_path: Path) -> None:
    """A model that raises when it is loaded is reported with its reason; the others are served."""
    write_model(tmp_path, "good")
    write_model(tmp_path, "broken", files={"1/model.py": "raise ValueError('no weights here')"})
    async with supervised(settings(tmp_path), state_dir) as supervisor:
        statistics = supervisor.statistics()
        assert statistics["models"] == {"broken": "UNAVAILABLE", "good": "READY"}
        assert "no weights here" in statistics["reasons"]["broken"]
        assert "\n" not in statistics["reasons"]["broken"]
        assert await is_model_ready(supervisor, "good")
        supervisor.check_health()


async def test_loads_and_unloads_outlast_a_restart(state_dir: Path, tmp_path: Path) -> None:
    """Models loaded, unloaded or given another config at run time are so in the next life too."""
    for name in ("first", "second", "third"):
        write_model(tmp_path, name)
    args = settings(tmp_path, models=["first", "second"])
    async with supervised(args, state_dir) as supervisor:
        config = {
            "backend": "python",
            "max_batch_size": 5,
            "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
            "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
            "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
        }
        await supervisor.unload_model("first")
        await supervisor.load_model("third", json.dumps(config))
        with pytest.raises(BackendFailed, match="nowhere"):
            await supervisor.load_model("nowhere")
        with pytest.raises(InvalidRequest):
            await supervisor.load_model("../third")
        assert await batch_size(supervisor, "third") == 5
        await supervisor.load_model("third")
        assert await batch_size(supervisor, "third") == 8
        await supervisor.load_model("third", json.dumps(config))
        await asyncio.sleep(1.0)  # The stub of the unloaded model has ended, as it should.
        assert supervisor.num_healed == 0
        os.kill(supervisor.statistics()["pid"], signal.SIGKILL)
        await eventually(lambda: supervisor.endpoint is None, timeout_s=3.0, what="the end")
        with pytest.raises(EndpointUnavailable):
            await supervisor.load_model("first")
        await eventually(lambda: supervisor.endpoint, timeout_s=5.0, what="the next life")
        assert supervisor.statistics()["models"] == {"second": "READY", "third": "READY"}
        assert await batch_size(supervisor, "third") == 5


async def test_a_stub_without_libpython_is_refused_before_the_start(repository: Path, state_dir: Path) -> None:
    """Without its libpython a stub hangs tritonserver for ever; preflight names the library and starts nothing."""
    found = TritonRuntime.find()
    shipped = found.tritonserver.parents[1] / "python_backend_stubs"
    stub = next(stub for stub in shipped.glob("3.*/*") if None in loaded_objects(stub, found.environment()).values())
    runtime = dataclasses.replace(found, stub=stub)
    supervisor = TritonSupervisor(settings(repository), state_dir=state_dir, runtime=runtime)
    with pytest.raises(PreflightFailed, match=r"libpython3\.\d+\.so\.1\.0 is not on this machine.*apt install"):
        await supervisor.start()
    assert leftovers(state_dir) == []
    assert supervisor.statistics()["num_starts"] == 0


async def test_a_start_that_is_cancelled_leaves_nothing(state_dir: Path, tmp_path: Path) -> None:
    """Cancelling `start` while a model is loading ends the server, which has not been ready yet, and its stub."""
    write_model(tmp_path, "slow", files={"1/model.py": SLOW_START})
    supervisor = TritonSupervisor(settings(tmp_path), state_dir=state_dir)
    starting = asyncio.create_task(supervisor.start())
    await eventually(lambda: len(leftovers(state_dir)) >= 3, timeout_s=5.0, what="a server and a stub")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert leftovers(state_dir) == []


async def test_closing_during_the_start(state_dir: Path, tmp_path: Path) -> None:
    """`aclose` from elsewhere while `start` waits: both end at once, `start` with an error, and nothing is left."""
    write_model(tmp_path, "slow", files={"1/model.py": SLOW_START})
    supervisor = TritonSupervisor(settings(tmp_path), state_dir=state_dir)
    starting = asyncio.create_task(supervisor.start())
    await eventually(lambda: len(leftovers(state_dir)) >= 2, timeout_s=5.0, what="a server")
    await supervisor.aclose()
    with pytest.raises(PoolClosed):
        await starting
    with pytest.raises(PoolClosed):
        await supervisor.start()
    assert leftovers(state_dir) == []


async def test_a_start_that_takes_too_long_fails_with_the_reason(state_dir: Path, tmp_path: Path) -> None:
    """A server that is not ready in time is an error that names the limit, and nothing is left of it."""
    write_model(tmp_path, "slow", files={"1/model.py": SLOW_START})
    supervisor = TritonSupervisor(settings(tmp_path, start_timeout_s=1.0), state_dir=state_dir)
    with pytest.raises(ServerStartFailed, match="not ready within 1 s"):
        await supervisor.start()
    assert leftovers(state_dir) == []


async def test_a_server_that_refuses_to_start_says_why(repository: Path, state_dir: Path) -> None:
    """A bad argument is reported with the server's own words."""
    args = settings(repository, extra_arguments=["--no-such-option"])
    with pytest.raises(ServerStartFailed, match="no-such-option"):
        await TritonSupervisor(args, state_dir=state_dir).start()


async def test_a_port_taken_in_between_is_not_mistaken_for_the_server(
    repository: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When another server takes the chosen port first, ours moves to another one and does not adopt the stranger."""
    async with running_triton(repository) as stranger:
        assert stranger.endpoint is not None
        taken = int(stranger.endpoint.address.rpartition(":")[2])
        choices = iter([taken])

        def first_taken(host: str, count: int) -> list[int]:
            free = free_ports(host, count)
            return [next(choices, free[0])] if count == 1 else free

        monkeypatch.setattr(launch, "free_ports", first_taken)
        async with supervised(settings(repository), state_dir) as supervisor:
            assert supervisor.endpoint is not None
            assert supervisor.endpoint.address != stranger.endpoint.address
            assert supervisor.statistics()["num_starts"] == 2


async def test_a_frozen_server_is_replaced(repository: Path, state_dir: Path) -> None:
    """A server that is alive and answers nothing leaves the registry, and is then killed and started again."""
    args = settings(repository, unresponsive_timeout_s=1.0)
    was_alive: list[bool] = []

    def listen(endpoint: Endpoint | None) -> None:
        if endpoint is None:
            was_alive.append(psutil.Process(frozen).status() == psutil.STATUS_STOPPED)

    async with supervised(args, state_dir, on_endpoint=listen) as supervisor:
        frozen = supervisor.statistics()["pid"]
        os.kill(frozen, signal.SIGSTOP)
        await eventually(lambda: supervisor.endpoint is None, timeout_s=4.0, what="noticing")
        await eventually(lambda: supervisor.endpoint, timeout_s=5.0, what="the next life")
        assert "no probe" in supervisor.statistics()["last_end"]
        assert was_alive == [True]
        frozen = supervisor.statistics()["pid"]
    assert leftovers(state_dir) == []


CHATTERBOX = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    sys.stderr.write("x" * 199 + chr(10))
    sys.stderr.flush()
    time.sleep(0.0001)
"""


async def test_the_guard_bounds_the_log_and_the_stop(state_dir: Path) -> None:
    """A program that logs without end fills no disk, and one that ignores SIGTERM is killed at its limit."""
    log = state_dir / "chatterbox.log"
    chatterbox = TritonProcess(
        [sys.executable, "-c", CHATTERBOX],
        env=os.environ,
        listen=Listen("127.0.0.1", 1, "", 2),
        server_id="chatterbox",
        tag=LifeTag.new(),
        log_path=log,
        max_log_bytes=64 * 1024,
        stop_timeout_s=-1.5,  # Half a second with the margin.
    )
    async with chatterbox:
        await eventually(lambda: (state_dir / "chatterbox.log.1").exists(), timeout_s=5.0, what="rotation")
        await eventually(lambda: log.stat().st_size > 0, timeout_s=2.0, what="logging on")
        started = time.monotonic()
    assert time.monotonic() - started < 2.0
    assert chatterbox.exit_status == -signal.SIGKILL
    assert "SIGKILL" in chatterbox.exit_reason()
    assert (state_dir / "chatterbox.log.1").stat().st_size <= 64 * 1024


def run_in_thread(work: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine in the event loop of a thread that is not the main one."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work())  # type: ignore[arg-type] # a coroutine function in every use
        except BaseException as problem:
            failures.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_it_runs_in_the_loop_of_another_thread(repository: Path, state_dir: Path) -> None:
    """A Ray actor's loop may not be in the main thread: start, restart and stop work there."""

    async def work() -> None:
        async with supervised(settings(repository), state_dir) as supervisor:
            first = supervisor.endpoint
            os.kill(supervisor.statistics()["pid"], signal.SIGKILL)
            await eventually(lambda: supervisor.endpoint not in (None, first), timeout_s=5.0, what="the next life")

    run_in_thread(work)
    assert leftovers(state_dir) == []


async def test_closing_while_it_restarts(repository: Path, state_dir: Path) -> None:
    """Close in the pause before a restart, called twice and with one caller cancelled: it ends and leaves nothing."""
    args = settings(repository, restart={"initial_backoff_s": 5.0})
    supervisor = TritonSupervisor(args, state_dir=state_dir)
    await supervisor.start()
    os.kill(supervisor.statistics()["pid"], signal.SIGKILL)
    await eventually(lambda: supervisor.state is SupervisorState.RESTARTING, timeout_s=3.0, what="the pause")
    impatient, patient = asyncio.create_task(supervisor.aclose()), asyncio.create_task(supervisor.aclose())
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    await patient
    assert supervisor.state is SupervisorState.CLOSED
    assert leftovers(state_dir) == []


@pytest.fixture(autouse=True)
async def _no_task_left() -> AsyncIterator[None]:
    """Every test ends without tasks of its own."""
    yield
    await asyncio.sleep(0)
    names = [task.get_coro().__qualname__ for task in asyncio.all_tasks() if task is not asyncio.current_task()]  # type: ignore[union-attr]
    assert not [name for name in names if "Triton" in name or "LoadedModels" in name]
