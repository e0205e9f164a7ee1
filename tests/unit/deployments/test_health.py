"""A replica's judgement of itself: stuck is told from busy, and from servers that are away."""

from __future__ import annotations

from serve_app.batching.statistics import DispatcherCounters, DispatcherStatistics
from serve_app.deployments.health import STALL_S, Pulse
from serve_app.runner import RunnerStatistics
from serve_app.triton.router_statistics import RouterStatistics


def runner(*, waiting: int = 0, in_flight: int = 0, sent: int = 0) -> RunnerStatistics:
    counters = DispatcherCounters(num_batches_sent=sent)
    dispatcher = DispatcherStatistics(waiting, waiting, 0, 1, 0, in_flight, 2, 0.0, 0.0, counters)
    return RunnerStatistics(0, 0, dispatcher)


def router(*, waiting: int = 0, active: int = 0, done: int = 0) -> RouterStatistics:
    return RouterStatistics(
        endpoints=(),
        num_available=1,
        num_active=active,
        num_waiting=waiting,
        num_done=done,
        num_failed=0,
        num_retries=0,
        num_ejections=0,
        num_hedges=0,
        num_hopeless=0,
        num_sequences=0,
        retry_tokens=10.0,
    )


def test_a_batcher_that_stands_still_is_a_fault() -> None:
    """Requests wait, permits are free, and nothing was sent for a minute: told by the model's name."""
    pulse = Pulse()
    stuck = {"a": runner(waiting=3, in_flight=1, sent=7), "b": runner()}
    assert pulse.faults(stuck, router(), now=0.0) == []
    assert pulse.faults(stuck, router(), now=STALL_S - 1) == []
    (fault,) = pulse.faults(stuck, router(), now=STALL_S)
    assert "'a'" in fault


def test_progress_is_health() -> None:
    """One batch in between starts the minute anew, and so does a look at which nothing waited."""
    pulse = Pulse()
    for now in range(0, 600, 5):
        assert pulse.faults({"a": runner(waiting=3, sent=now // 30)}, router(), now=float(now)) == []
    for now in range(600, 1200, 5):
        assert pulse.faults({"a": runner(waiting=now // 30 % 2, sent=20)}, router(), now=float(now)) == []


def test_servers_that_are_slow_or_away_are_no_fault() -> None:
    """All permits taken, all channels taken: the replica waits for somebody, for however long."""
    pulse = Pulse()
    for now in range(0, 600, 5):
        waiting = {"a": runner(waiting=100, in_flight=2)}
        assert pulse.faults(waiting, router(waiting=100, active=128), now=float(now)) == []


def test_pools_that_stand_still_are_a_fault() -> None:
    """Callers wait for a channel that nobody uses."""
    pulse = Pulse()
    pulse.faults({}, router(waiting=1), now=0.0)
    (fault,) = pulse.faults({}, router(waiting=1), now=STALL_S)
    assert "channel" in fault
    assert pulse.faults({}, router(waiting=1, done=1), now=STALL_S + 5) == []
