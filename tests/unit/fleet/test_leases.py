"""Leases: who is in a snapshot, and when its version moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.endpoint import Endpoint
from serve_app.fleet.leases import LeaseTable


def endpoint(number: int, *, zone: str = "") -> Endpoint:
    """An endpoint of its own node."""
    return Endpoint(f"10.0.0.{number}:8001", f"s{number}", f"node{number}", zone)


def test_version_moves_with_changes_only() -> None:
    """Renewals leave the version alone; a new endpoint, a changed one, a release and an expiry move it by one each."""
    table = LeaseTable(started_at=0.0, epoch="e")
    assert table.snapshot() == ("e", 0, [])
    assert table.renew(endpoint(2), 3.0, 0.0)
    assert table.renew(endpoint(1), 3.0, 0.5)
    assert table.renew(endpoint(2), 3.0, 1.0)
    assert table.snapshot() == ("e", 2, [endpoint(1), endpoint(2)])
    assert table.renew(endpoint(2, zone="z"), 3.0, 1.0)
    assert table.version == 3
    assert table.release("s1")
    assert table.snapshot() == ("e", 4, [endpoint(2, zone="z")])
    assert table.expire(3.9) == []
    assert table.version == 4
    assert table.expire(4.0) == [endpoint(2, zone="z")]
    assert table.snapshot() == ("e", 5, [])
    assert table.expire(5.0) == []
    assert table.statistics() == {"version": 5, "leased": 0, "expired": 1, "refused": 0}
    assert "epoch e version 5: 0 leased, 1 expired, 0 refused" in repr(table)


def test_a_released_server_does_not_come_back() -> None:
    """A heartbeat that was under way when its server was released is refused; an expired server's is not."""
    table = LeaseTable(started_at=0.0)
    table.renew(endpoint(1), 3.0, 0.0)
    table.release("s1")
    assert not table.renew(endpoint(1), 3.0, 0.1)
    table.renew(endpoint(2), 3.0, 0.0)
    table.expire(10.0)
    assert table.renew(endpoint(2), 3.0, 10.0)
    assert table.snapshot().endpoints == [endpoint(2)]
    assert not table.release("unknown")


def test_a_new_life_replaces_the_old_one_at_its_address() -> None:
    """Two lives cannot hold one address: the later one ends the earlier one's lease, except on another node."""
    table = LeaseTable(started_at=0.0)
    table.renew(Endpoint("unix:/s", "old", "n1"), 3.0, 0.0)
    table.renew(Endpoint("unix:/s", "other", "n2"), 3.0, 0.0)
    table.renew(Endpoint("unix:/s", "new", "n1"), 3.0, 0.1)
    assert [each.server_id for each in table.snapshot().endpoints] == ["new", "other"]


def test_the_table_is_bounded() -> None:
    """A full table refuses new servers, goes on renewing those it has, and has room again after a release."""
    table = LeaseTable(started_at=0.0, max_endpoints=2)
    assert table.renew(endpoint(1), 3.0, 0.0)
    assert table.renew(endpoint(2), 3.0, 0.0)
    assert not table.renew(endpoint(3), 3.0, 0.0)
    assert table.renew(endpoint(1), 3.0, 1.0)
    table.release("s2")
    assert table.renew(endpoint(3), 3.0, 1.0)
    for number in range(2 * LeaseTable.MAX_RELEASED):
        table.release(f"gone{number}")
    assert len(table._released) == LeaseTable.MAX_RELEASED


def test_epochs_differ_and_a_new_table_is_rebuilding() -> None:
    """Readers can tell a restarted table from the one they knew, and until when heartbeats may still be missing."""
    assert LeaseTable(started_at=0.0).epoch != LeaseTable(started_at=0.0).epoch
    table = LeaseTable(started_at=100.0)
    assert table.is_rebuilding(102.9)
    assert not table.is_rebuilding(103.0)
    table.renew(endpoint(1), 10.0, 101.0)
    assert table.is_rebuilding(109.0)
    assert not table.is_rebuilding(110.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["renew", "release", "expire"]),
            st.integers(0, 5),
            st.floats(0.1, 5.0),
            st.floats(0.0, 2.0),
        ),
        max_size=60,
    )
)
def test_equal_versions_mean_equal_endpoints(steps: list[tuple[str, int, float, float]]) -> None:
    """Whatever happens: the version never falls, and two snapshots of one version hold the same endpoints."""
    table = LeaseTable(started_at=0.0, epoch="e", max_endpoints=4)
    now, seen = 0.0, {0: table.snapshot().endpoints}
    for action, number, lease_s, passed_s in steps:
        now += passed_s
        before = table.version
        if action == "renew":
            table.renew(endpoint(number), lease_s, now)
        elif action == "release":
            table.release(f"s{number}")
        else:
            table.expire(now)
        assert before <= table.version <= before + 1
        endpoints = table.snapshot().endpoints
        assert seen.setdefault(table.version, endpoints) == endpoints
        assert len(endpoints) <= 4
