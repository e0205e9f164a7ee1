"""The channel pool against a real loopback server: connections, order, budgets, cancellation, closing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from serve_app.clock import ManualClock
from serve_app.endpoint import Endpoint
from serve_app.errors import (
    DeadlineExceeded,
    EndpointUnavailable,
    EndpointUnreachable,
    ModelNotFound,
    PoolClosed,
    PoolTimeout,
    RequestTooLarge,
    Unsupported,
)
from serve_app.protocol.grpc_codec import encode_infer_request
from serve_app.protocol.messages import InferRequest, InferResponse
from serve_app.protocol.tensor import Tensor
from serve_app.settings import MIB, ChannelSettings
from serve_app.triton.channel import channel_options
from serve_app.triton.fake import FakeModel, FakeTriton
from serve_app.triton.pool import ChannelPool


def make_request(value: float = 0.0, *, model_name: str = "identity", size: int = 4) -> InferRequest:
    array = np.full((1, size), value, np.float32)
    return InferRequest(model_name, [Tensor.from_numpy("INPUT0", array)], id=str(value))


@contextlib.asynccontextmanager
async def pool_to(fake: FakeTriton, num_channels: int = 1, max_calls: int = 1) -> AsyncIterator[ChannelPool]:
    settings = ChannelSettings(num_channels=num_channels, max_calls_per_channel=max_calls)
    async with ChannelPool(fake.endpoint, settings) as pool:
        yield pool


def start(pool: ChannelPool, value: float = 0.0, timeout_s: float = 10.0) -> asyncio.Task[InferResponse]:
    return asyncio.ensure_future(pool.infer(make_request(value), timeout_s=timeout_s))


def description(pool: ChannelPool) -> str:
    return repr(pool).split("] ", 1)[1].rstrip(">")


IDLE = "Requests: 0 active, 0 queued | Channels: 0 active, 1 idle"


# --- connections --------------------------------------------------------------------------------------------


async def test_every_channel_is_a_connection_of_its_own() -> None:
    """Four channels are four TCP connections, so a limit of one stream per connection still lets four calls overlap."""
    async with FakeTriton(max_concurrent_streams=1) as fake, pool_to(fake, num_channels=4) as pool:
        fake.freeze()
        calls = [start(pool) for _ in range(4)]
        await fake.wait_for_active(4)
        assert len(fake.peers) == 4
        fake.thaw()
        await asyncio.gather(*calls)
        assert fake.max_active == 4


async def test_two_pools_share_no_connection() -> None:
    """Pools to the same server with the same settings have connections of their own, too."""
    async with FakeTriton() as fake, pool_to(fake) as one, pool_to(fake) as other:
        await asyncio.gather(start(one), start(other))
        assert len(fake.peers) == 2


async def test_unix_socket(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A server on a unix socket is served like one on a port."""
    path = tmp_path_factory.mktemp("s") / "t.sock"
    async with FakeTriton(unix_socket=str(path)) as fake, pool_to(fake) as pool:
        assert (await pool.infer(make_request(3.0), timeout_s=5)).outputs[0].to_numpy()[0, 0] == 3.0


async def test_least_busy_channel_is_used() -> None:
    """Calls spread evenly over the channels instead of filling one first."""
    async with FakeTriton() as fake, pool_to(fake, num_channels=3, max_calls=8) as pool:
        fake.freeze()
        calls = [start(pool) for _ in range(6)]
        await fake.wait_for_active(6)
        peers = [call.peer for call in fake.calls]
        assert sorted(peers.count(peer) for peer in fake.peers) == [2, 2, 2]
        fake.thaw()
        await asyncio.gather(*calls)


async def test_messages_above_grpc_default_pass_and_above_ours_do_not() -> None:
    """8 MB pass both ways although grpc's default limit is 4 MB; our own limit is a typed error."""
    async with FakeTriton(FakeModel(max_batch_size=0, dims=(-1, -1))) as fake:
        async with pool_to(fake) as pool:
            response = await pool.infer(make_request(size=2 * MIB), timeout_s=10)
            assert response.outputs[0].size_bytes == 8 * MIB
        small = ChannelSettings(num_channels=1, max_message_bytes=MIB)
        async with ChannelPool(fake.endpoint, small) as pool:
            with pytest.raises(RequestTooLarge, match="the limit is 1048576 bytes"):
                await pool.infer(make_request(size=2 * MIB), timeout_s=10)


def test_options_keep_clear_of_known_traps() -> None:
    """No pings that Triton answers with GOAWAY, no shared connection, no proxy, no hidden retries, short backoff."""
    options = dict(channel_options(ChannelSettings()))
    assert options["grpc.keepalive_time_ms"] > 300_000
    assert options["grpc.keepalive_permit_without_calls"] == 0
    assert options["grpc.use_local_subchannel_pool"] == 1
    assert options["grpc.enable_http_proxy"] == 0
    assert options["grpc.enable_retries"] == 0
    assert options["grpc.max_reconnect_backoff_ms"] <= 500
    assert options["grpc.max_send_message_length"] == options["grpc.max_receive_message_length"] == 2**31 - 1


async def test_warm_up_says_early_that_nobody_listens() -> None:
    """Entering a pool to a dead port fails at once with the reason, and leaves nothing open."""
    pool = ChannelPool(Endpoint.static("127.0.0.1:1"), ChannelSettings(num_channels=3))
    with pytest.raises(EndpointUnreachable, match="Connection refused"):
        async with pool:
            pass
    assert repr(pool) == (
        "<ChannelPool 127.0.0.1:1 [closed] Requests: 0 active, 0 queued | Channels: 0 active, 0 idle>"
    )


async def test_server_that_is_not_live_is_not_entered() -> None:
    """A server that says it is not live counts as unavailable."""
    async with FakeTriton() as fake:
        fake.is_live = False
        with pytest.raises(EndpointUnavailable, match="not live"):
            async with pool_to(fake):
                pass


async def test_new_connections_after_expiry_and_running_calls_finish() -> None:
    """`expire_connections` gives later calls new connections, and old ones are closed when their call ends."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        fake.freeze()
        old = start(pool)
        await fake.wait_for_active(1)
        pool.expire_connections()
        new = start(pool)
        await fake.wait_for_active(2)
        assert len(fake.peers) == 2
        assert description(pool) == "Requests: 2 active, 0 queued | Channels: 2 active, 0 idle"
        fake.thaw()
        await asyncio.gather(old, new)
        assert description(pool) == IDLE


# --- order and budgets --------------------------------------------------------------------------------------


async def test_callers_are_served_in_order_of_arrival() -> None:
    """With one channel that carries one call, calls reach the server in the order in which they were made."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        fake.freeze()
        calls = [start(pool, float(index)) for index in range(5)]
        await fake.wait_for_active(1)
        assert description(pool) == "Requests: 1 active, 4 queued | Channels: 1 active, 0 idle"
        fake.thaw()
        await asyncio.gather(*calls)
        assert [call.id for call in fake.calls] == ["0.0", "1.0", "2.0", "3.0", "4.0"]
        assert fake.max_active == 1


async def test_wait_for_a_channel_ends_with_the_budget() -> None:
    """A caller that gets no channel in time gets `PoolTimeout`, and its place in the queue is gone."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        fake.freeze()
        first = start(pool)
        await fake.wait_for_active(1)
        with pytest.raises(PoolTimeout, match="waiting for a channel"):
            await pool.infer(make_request(), timeout_s=0.02)
        assert description(pool) == "Requests: 1 active, 0 queued | Channels: 1 active, 0 idle"
        fake.thaw()
        await first
        statistics = pool.statistics()
        assert (statistics.num_done, statistics.num_timed_out, statistics.num_failed) == (1, 1, 0)


async def test_call_ends_with_the_budget_and_the_server_is_told() -> None:
    """A call past its deadline is `DeadlineExceeded` here and cancelled there."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        fake.freeze()
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await pool.infer(make_request(), timeout_s=0.05)
        await fake.wait_until(lambda: fake.num_cancelled == 1)
        assert description(pool) == IDLE
        with pytest.raises(DeadlineExceeded):
            await pool.infer(make_request(), timeout_s=0.0)


async def test_time_spent_waiting_is_taken_off_the_call() -> None:
    """The budget covers the wait for a channel and the call together."""
    clock = ManualClock()
    settings = ChannelSettings(num_channels=1, max_calls_per_channel=1)
    async with FakeTriton() as fake, ChannelPool(fake.endpoint, settings, clock=clock) as pool:
        fake.freeze()
        calls = [start(pool, timeout_s=20.0), start(pool, timeout_s=20.0)]
        await fake.wait_for_active(1)
        clock.advance(15.0)
        fake.thaw()
        await asyncio.gather(*calls)
        first, second = (call.timeout_s or 0.0 for call in fake.calls)
        assert 19.0 < first < 21.0
        assert 4.0 < second < 6.0


async def test_waiting_callers_hold_no_encoded_message() -> None:
    """A request is encoded when a channel is there for it, so callers that wait do not each hold a copy."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        fake.freeze()
        built: list[float] = []

        def build(left_s: float) -> Any:
            built.append(left_s)
            return encode_infer_request(make_request())

        calls = [asyncio.ensure_future(pool.call("ModelInfer", build, timeout_s=10)) for _ in range(5)]
        await fake.wait_for_active(1)
        assert len(built) == 1
        fake.thaw()
        await asyncio.gather(*calls)
        assert len(built) == 5


async def test_error_of_one_call_leaves_the_pool_whole() -> None:
    """A failed call gives its channel back and is counted as failed."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        with pytest.raises(ModelNotFound):
            await pool.infer(make_request(model_name="nope"), timeout_s=5)
        assert description(pool) == IDLE
        await pool.infer(make_request(), timeout_s=5)
        assert (pool.statistics().num_done, pool.statistics().num_failed) == (1, 1)


# --- cancellation -------------------------------------------------------------------------------------------


async def cancel(task: asyncio.Task[InferResponse]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelled_while_queued() -> None:
    """A caller cancelled in the queue leaves it; those behind it are served."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        fake.freeze()
        first, second, third = start(pool, 1.0), start(pool, 2.0), start(pool, 3.0)
        await fake.wait_for_active(1)
        await cancel(second)
        assert description(pool) == "Requests: 1 active, 1 queued | Channels: 1 active, 0 idle"
        fake.thaw()
        await asyncio.gather(first, third)
        assert [call.id for call in fake.calls] == ["1.0", "3.0"]
        assert description(pool) == IDLE


async def test_cancelled_in_the_tick_of_the_hand_over() -> None:
    """A caller cancelled in the tick in which it was handed a channel gives the channel back."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        fake.freeze()
        calls: dict[str, asyncio.Task[InferResponse]] = {}

        async def lead() -> InferResponse:
            try:
                return await pool.infer(make_request(1.0), timeout_s=10)
            finally:
                # The channel has just been handed to `second`, which has not run since.
                assert description(pool) == "Requests: 1 active, 1 queued | Channels: 1 active, 0 idle"
                calls["second"].cancel()

        calls["first"] = asyncio.ensure_future(lead())
        await fake.wait_for_active(1)
        calls["second"], calls["third"] = start(pool, 2.0), start(pool, 3.0)
        await asyncio.sleep(0)
        fake.thaw()
        await calls["first"]
        await calls["third"]
        assert calls["second"].cancelled()
        assert [call.id for call in fake.calls] == ["1.0", "3.0"]
        assert description(pool) == IDLE


async def test_cancelled_in_the_call() -> None:
    """A caller cancelled during its call frees the channel, and the server hears of it."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        fake.freeze()
        call = start(pool)
        await fake.wait_for_active(1)
        await cancel(call)
        assert description(pool) == IDLE
        await fake.wait_until(lambda: fake.num_cancelled == 1)
        fake.thaw()
        await pool.infer(make_request(), timeout_s=5)


async def test_cancelled_after_any_number_of_ticks() -> None:
    """Wherever in its course a call is cancelled, it ends, and the pool is whole and answers the next call."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        for num_ticks in range(40):
            calls = [start(pool, 1.0), start(pool, 2.0)]
            for _ in range(num_ticks):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            assert all(call.cancelled() or call.exception() is None for call in calls)
            assert description(pool) == IDLE
        assert (await pool.infer(make_request(7.0), timeout_s=5)).outputs[0].to_numpy()[0, 0] == 7.0
        statistics = pool.statistics()
        assert statistics.num_done + statistics.num_cancelled <= 81
        assert statistics.num_failed == 0


# --- closing ------------------------------------------------------------------------------------------------


async def test_close_waits_for_running_calls_and_refuses_the_rest() -> None:
    """Running calls finish, waiting ones and new ones get `PoolClosed`."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        fake.freeze()
        running, waiting = start(pool), start(pool)
        await fake.wait_for_active(1)
        closing = asyncio.ensure_future(pool.aclose())
        with pytest.raises(PoolClosed):
            await waiting
        with pytest.raises(PoolClosed):
            await pool.infer(make_request(), timeout_s=5)
        assert "[closing] Requests: 1 active, 0 queued" in repr(pool)
        fake.thaw()
        assert (await running).model_name == "identity"
        await closing
        assert "[closed] Requests: 0 active, 0 queued | Channels: 0 active, 0 idle" in repr(pool)


async def test_close_cuts_off_what_outlasts_its_bound() -> None:
    """Calls that run on past the grace period end with `EndpointUnavailable`, not with a cancellation of the caller."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        fake.freeze()
        call = start(pool)
        await fake.wait_for_active(1)
        await pool.aclose(grace_s=0.01)
        with pytest.raises(EndpointUnavailable, match="closed during the call"):
            await call
        await fake.wait_until(lambda: fake.num_active == 0)


async def test_cancelled_close_closes_all_the_same() -> None:
    """Whoever is cancelled while closing cuts the wait short, and the connections are closed when the error arrives."""
    async with FakeTriton() as fake, pool_to(fake) as pool:
        fake.freeze()
        call = start(pool)
        await fake.wait_for_active(1)
        closing = asyncio.ensure_future(pool.aclose(grace_s=60))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert "[closed]" in repr(pool)
        with pytest.raises(EndpointUnavailable):
            await call


async def test_close_twice_and_open_again() -> None:
    """Closing is idempotent, and a closed pool can be opened anew."""
    async with FakeTriton() as fake:
        pool = ChannelPool(fake.endpoint, ChannelSettings())
        await pool.aclose()
        for _ in range(2):
            async with pool:
                await pool.infer(make_request(), timeout_s=5)
            await pool.aclose()


# --- loops, forks, leaks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_closed_in_between", [True, False])
def test_one_pool_in_two_event_loops_one_after_the_other(is_closed_in_between: bool) -> None:
    """A pool made outside a loop works in `asyncio.run`, and again in the next one, even when it was left open."""
    pool = ChannelPool(Endpoint.static("127.0.0.1:1"), ChannelSettings())

    async def use() -> float:
        async with FakeTriton() as fake:
            pool.endpoint = fake.endpoint
            pool.open()
            response = await pool.infer(make_request(5.0), timeout_s=5)
            if is_closed_in_between:
                await pool.aclose()
            return float(response.outputs[0].to_numpy()[0, 0])

    assert asyncio.run(use()) == 5.0
    assert asyncio.run(use()) == 5.0


async def test_pool_refuses_a_second_live_loop() -> None:
    """Use from another running loop is a clear error and not grpc's `attached to a different loop`."""
    async with FakeTriton() as fake, pool_to(fake) as pool:

        def use() -> None:
            asyncio.run(pool.infer(make_request(), timeout_s=5))

        with pytest.raises(Unsupported, match="make a pool for each loop"):
            await asyncio.to_thread(use)


def test_import_makes_no_grpc_object() -> None:
    """Importing the package starts no thread and makes no channel, so that a fork after it is safe."""
    code = (
        "import gc, threading, grpc.aio, serve_app.triton.router, serve_app.triton.resolver\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not [o for o in gc.get_objects() if isinstance(o, (grpc.Channel, grpc.aio.Channel))]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_child_processes_during_traffic() -> None:
    """Programs started while calls run neither hang nor disturb the calls."""
    async with FakeTriton(FakeModel(latency_s=0.002)) as fake, pool_to(fake, num_channels=2, max_calls=8) as pool:
        calls = [start(pool, float(index)) for index in range(200)]
        await fake.wait_for_calls(8)
        for _ in range(5):
            process = await asyncio.create_subprocess_exec("true")
            assert await asyncio.wait_for(process.wait(), 10) == 0
        values = [(await call).outputs[0].to_numpy()[0, 0] for call in calls]
        assert values == [float(index) for index in range(200)]


FORKING = """
import asyncio, os, warnings
import numpy as np
from serve_app.protocol.messages import InferRequest
from serve_app.protocol.tensor import Tensor
from serve_app.settings import ChannelSettings
from serve_app.triton.fake import FakeModel, FakeTriton
from serve_app.triton.pool import ChannelPool

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of every fork with threads

async def main():
    request = InferRequest("identity", [Tensor.from_numpy("INPUT0", np.zeros((1, 4), np.float32))])
    async with FakeTriton(FakeModel(latency_s=0.002)) as fake, ChannelPool(fake.endpoint, ChannelSettings()) as pool:
        calls = [asyncio.ensure_future(pool.infer(request, timeout_s=10)) for _ in range(300)]
        await fake.wait_for_calls(8)
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0)
            assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
        await asyncio.gather(*calls)

asyncio.run(main())
"""


def test_plain_forks_during_traffic_with_grpcs_fork_handlers_off() -> None:
    """With `GRPC_ENABLE_FORK_SUPPORT=0` a bare `os.fork` during calls harms neither side; with them children crash."""
    environ = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"}
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=60, env=environ)


def count_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_thousand_pools_leave_nothing_behind() -> None:
    """Opening, using and closing a pool 1,000 times grows neither the open files nor the memory."""
    async with FakeTriton() as fake:
        fake_calls = fake.calls

        async def cycle(times: int) -> None:
            for _ in range(times):
                async with pool_to(fake, num_channels=2) as pool:
                    await pool.infer(make_request(), timeout_s=5)
                fake_calls.clear()

        async def settle() -> int:
            for _ in range(200):  # the server's ends of the last connections close a moment later
                if count_files() <= files_before:
                    break
                await asyncio.sleep(0.01)
            return count_files()

        files_before = 2**31
        await cycle(200)
        await asyncio.sleep(0.2)
        files_before = count_files()
        middle_bytes = resident_bytes()
        await cycle(800)
        assert await settle() <= files_before + 2
        assert resident_bytes() - middle_bytes < 8 * MIB
