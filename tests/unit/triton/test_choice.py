"""The choice among servers: near before far, least busy first, slow ones less, equals by lot."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.triton.choice import MAX_SLOWNESS, choose, choose_for_sequence, slowness_of


@dataclass
class Server:
    name: str
    num_in_flight: int = 0
    distance: int = 2
    has_room: bool = True

    def is_full(self) -> bool:
        return not self.has_room


def pick(servers: list[Server], *, slowness: list[float] | None = None, seed: int = 1, near_calls: int = 2) -> str:
    factors = slowness or [1.0] * len(servers)
    return choose(servers, factors, rng=random.Random(seed), near_calls=near_calls).name


def test_least_calls_in_flight_wins() -> None:
    """Among equals in distance the server with the fewest calls is chosen."""
    assert pick([Server("a", 3), Server("b", 1), Server("c", 2)]) == "b"


def test_equals_are_drawn_evenly() -> None:
    """Three idle servers share 3,000 choices to within five points of a third."""
    rng = random.Random(7)
    servers = [Server("a"), Server("b"), Server("c")]
    counts = Counter(choose(servers, [1.0] * 3, rng=rng).name for _ in range(3000))
    assert all(abs(count / 3000 - 1 / 3) < 0.05 for count in counts.values())


def test_near_is_preferred_until_it_is_busy() -> None:
    """The same node first, then the same zone, then any; each spills when it has its share of calls."""
    near, zone, far = Server("near", distance=0), Server("zone", distance=1), Server("far")
    servers = [far, zone, near]
    names = []
    for _ in range(6):
        names.append(pick(servers))
        next(server for server in servers if server.name == names[-1]).num_in_flight += 1
    assert names == ["near", "near", "zone", "zone", "far", "far"]
    near.num_in_flight = zone.num_in_flight = far.num_in_flight = 5
    near.num_in_flight = 4
    assert pick(servers) == "near"


def test_near_without_room_is_passed_over() -> None:
    """A near server whose channels are all taken does not count as near."""
    assert pick([Server("near", 1, distance=0, has_room=False), Server("far")], near_calls=10) == "far"


def test_slow_server_counts_as_busier() -> None:
    """A server ten times slower gets a call only when the fast one has ten in flight."""
    assert pick([Server("slow"), Server("fast", 8)], slowness=[10.0, 1.0]) == "fast"
    assert pick([Server("slow"), Server("fast", 10)], slowness=[10.0, 1.0]) == "slow"
    assert pick([Server("slow", distance=0), Server("fast")], slowness=[10.0, 1.0]) == "fast"


@given(
    loads=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.booleans()), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_choice_is_never_worse_than_all_others(loads: list[tuple[int, int, bool]], seed: int) -> None:
    """No server is chosen while another is both nearer or as near, and less busy, and has room."""
    servers = [Server(str(index), *load) for index, load in enumerate(loads)]
    chosen = choose(servers, [1.0] * len(servers), rng=random.Random(seed))
    for other in servers:
        better = other.num_in_flight < chosen.num_in_flight and other.distance <= chosen.distance and other.has_room
        assert not better


def test_slowness_ignores_noise_and_forgets() -> None:
    """Small differences, small ratios and unknown servers count as fast; slowness halves with every second."""
    assert slowness_of([]) == []
    assert slowness_of([(0.1, 0.0)]) == [1.0]
    assert slowness_of([(0.0001, 0.0), (0.0020, 0.0)]) == [1.0, 1.0]
    assert slowness_of([(0.010, 0.0), (0.025, 0.0)]) == [1.0, 1.0]
    assert slowness_of([(0.010, 0.0), (0.100, 0.0), None]) == [1.0, 10.0, 1.0]
    assert slowness_of([(0.010, 9.0), (0.100, 1.0)]) == [1.0, 6.0]
    assert slowness_of([(0.010, 0.0), (0.100, 5.0)]) == [1.0, 1.0]
    assert slowness_of([(0.0, 0.0), (100.0, 0.0)]) == [1.0, MAX_SLOWNESS]


def test_sequence_stays_where_it_is() -> None:
    """A sequence keeps its server while others come and go, and sequences spread over the servers."""
    keys = ["a", "b", "c", "d"]
    home = {str(i): choose_for_sequence(keys_to_servers(keys), keys, str(i)).name for i in range(400)}
    assert all(70 < count < 130 for count in Counter(home.values()).values())
    fewer = ["a", "b", "c"]
    for sequence_id, name in home.items():
        if name != "d":
            assert choose_for_sequence(keys_to_servers(fewer), fewer, sequence_id).name == name


def keys_to_servers(keys: list[str]) -> list[Server]:
    return [Server(key) for key in keys]


@pytest.mark.parametrize("num_servers", [1, 2, 5])
def test_busy_everywhere_still_chooses(num_servers: int) -> None:
    """When no server has room the least busy one is chosen, for the caller to wait at."""
    servers = [Server(str(index), 100 - index, index % 3, has_room=False) for index in range(num_servers)]
    assert pick(servers) == str(num_servers - 1)
