"""A server's record: blocked models with one trial at a time, and a latency that a hiccup does not spoil."""

from __future__ import annotations

import pytest

from serve_app.endpoint import Endpoint
from serve_app.settings import ChannelSettings
from serve_app.triton.member import MAX_BLOCKS, Member, MemberState
from serve_app.triton.model_record import INITIAL_PAUSE_S, MIN_ANSWERS
from serve_app.triton.pool import ChannelPool


@pytest.fixture
def member() -> Member:
    endpoint = Endpoint.static("127.0.0.1:1")
    return Member(endpoint, ChannelPool(endpoint, ChannelSettings()))


def test_blocked_model_gets_one_trial_at_a_time(member: Member) -> None:
    """A model is asked for elsewhere during the pause, then one call tries; its failure doubles the pause."""
    member.block("m", now=0.0)
    assert member.is_blocked("m", now=INITIAL_PAUSE_S - 0.01)
    assert not member.is_blocked("other", now=0.0)
    due = INITIAL_PAUSE_S
    assert not member.is_blocked("m", now=due)
    member.begin("m")
    assert member.is_blocked("m", now=due)
    member.block("m", now=due)
    member.abandon("m")
    assert member.is_blocked("m", now=due + 2 * INITIAL_PAUSE_S - 0.01)
    assert not member.is_blocked("m", now=due + 2 * INITIAL_PAUSE_S)
    member.begin("m")
    member.succeed("m", started_at=1.0, now=1.1)
    assert not member.has_blocks()


def test_cancelled_trial_lets_the_next_one_try(member: Member) -> None:
    """A trial that ends without telling anything does not keep the model blocked."""
    member.block("m", now=0.0)
    member.begin("m")
    member.abandon("m")
    assert not member.is_blocked("m", now=INITIAL_PAUSE_S)


def test_many_failures_at_once_count_as_one(member: Member) -> None:
    """Calls that were under way together when a model went away do not lengthen the pause."""
    for _ in range(64):
        member.block("m", now=0.0)
    assert not member.is_blocked("m", now=INITIAL_PAUSE_S)


def test_invented_model_names_do_not_pile_up(member: Member) -> None:
    """However many unknown names clients ask for, a bounded number is remembered, the newest among them."""
    for index in range(10 * MAX_BLOCKS):
        member.block(f"m{index}", now=0.0)
    assert len(member.statistics().unavailable_models) == MAX_BLOCKS
    assert member.is_blocked(f"m{10 * MAX_BLOCKS - 1}", now=0.0)


def test_latency_is_known_after_some_answers_and_stands_a_hiccup(member: Member) -> None:
    """The first answers do not count, one long answer moves the usual latency little, many move it all the way."""
    for index in range(MIN_ANSWERS):
        assert member.latency("m", now=index) is None
        member.succeed("m", started_at=index - 0.010, now=float(index))
    member.succeed("m", started_at=4.0, now=4.5)
    usual_s, age_s = member.latency("m", now=5.0) or (0.0, 0.0)
    assert age_s == 0.5
    assert 0.010 <= usual_s < 0.020
    for index in range(50):
        now = 5.0 + index / 10
        member.succeed("m", started_at=now - 0.100, now=now)
    usual_s, _ = member.latency("m", now=10.0) or (0.0, 0.0)
    assert usual_s == pytest.approx(0.100, rel=0.05)


def test_admission_forgets_blocks(member: Member) -> None:
    """A server that comes back is asked for every model again."""
    member.block("m", now=0.0)
    member.eject("Socket closed")
    assert member.statistics().state is MemberState.EJECTED
    member.admit(now=3.0)
    assert not member.has_blocks()
    assert repr(member) == "127.0.0.1:1 available 0 active 0 queued 1 ejections 0 retried"


def test_pings_count_until_anything_else_comes(member: Member) -> None:
    """Only answers to pings, one after the other, make the watch more patient."""
    member.depart(now=0.0)
    assert member.silent_s(now=1.0) == 1.0
    member.answer_ping(now=1.0)
    member.answer_ping(now=2.0)
    assert member.num_pings == 2
    assert member.silent_s(now=2.5) == 0.5
    member.heard_at = 3.0
    assert member.num_pings == 0
    member.num_out = 0
    assert member.silent_s(now=9.0) == 0.0
