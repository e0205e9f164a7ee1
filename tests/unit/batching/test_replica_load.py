"""What one replica takes on over all models: bounds, and an account that always ends at zero."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.batching.replica_load import ReplicaLoad
from serve_app.errors import Overloaded, RequestTooLarge
from serve_app.settings import ReplicaSettings


def load_of(*, max_requests: int = 100, max_bytes: int = 100) -> ReplicaLoad:
    return ReplicaLoad(ReplicaSettings(max_requests=max_requests, max_bytes=max_bytes))


def counts(load: ReplicaLoad) -> tuple[int, int, int]:
    now = load.statistics()
    return now.num_requests, now.num_bytes, now.num_refused


def test_requests_are_bounded() -> None:
    """The one too many is refused by name of the bound, and let in once another has ended."""
    load = load_of(max_requests=2)
    first, _ = load.enter(), load.enter()
    with pytest.raises(Overloaded, match="2 requests are under way, the limit is 2"):
        load.enter()
    first.release()
    with load.enter():
        assert counts(load) == (2, 0, 1)
    assert repr(load) == "<ReplicaLoad 1 of 2 requests, 0 of 100 bytes, 1 refused>"


def test_bytes_are_bounded_as_they_come() -> None:
    """What a client declares is only compared; what has come is held, and what was refused is not."""
    load = load_of(max_bytes=10)
    with load.enter() as one, load.enter(4) as two:
        one.expect(6)
        assert counts(load) == (2, 4, 0)
        one.hold(6)
        with pytest.raises(Overloaded, match="10 bytes of requests are held, 1 more are above the limit of 10"):
            two.hold(5)
        with pytest.raises(Overloaded):
            two.expect(5)
        with pytest.raises(Overloaded):
            load.enter(1)
        one.hold(2)
        two.hold(8)
        assert counts(load) == (2, 10, 3)
    assert counts(load) == (0, 0, 3)


def test_what_never_fits_is_too_large() -> None:
    """Nobody is told to come again with a request that an idle replica would refuse as well."""
    load = load_of(max_bytes=10)
    with pytest.raises(RequestTooLarge):
        load.enter(11)
    with load.enter() as share, pytest.raises(RequestTooLarge):
        share.hold(11)
    assert counts(load) == (0, 0, 0)


def test_a_share_is_given_back_once() -> None:
    """Whoever releases it first, and whatever a thread still does for a caller that has left."""
    load = load_of()
    share = load.enter(5)
    share.release()
    share.release()
    share.hold(50)
    assert counts(load) == (0, 0, 0)


def test_other_bounds_are_in_force_at_once() -> None:
    """What is under way goes on above a bound that was lowered."""
    load = load_of()
    with load.enter(50), load.enter(10) as small:
        load.reconfigure(ReplicaSettings(max_requests=1, max_bytes=20))
        small.hold(5)  # less is always right
        with pytest.raises(Overloaded):
            load.enter()
    assert counts(load)[:2] == (0, 0)


@given(
    st.lists(st.tuples(st.sampled_from(["enter", "hold", "release"]), st.integers(0, 5), st.integers(0, 40))),
)
def test_the_account_is_exact(steps: list[tuple[str, int, int]]) -> None:
    """In any order of events: counts are the sum of the shares, never above a bound, and zero in the end."""
    load = load_of(max_requests=4, max_bytes=60)
    shares = []
    for step, index, size in steps:
        try:
            if step == "enter":
                shares.append(load.enter(size))
            elif index < len(shares):
                shares[index].hold(size) if step == "hold" else shares.pop(index).release()
        except Overloaded:
            pass
        assert counts(load)[:2] == (len(shares), sum(share.size_bytes for share in shares))
        assert len(shares) <= 4
        assert counts(load)[1] <= 60
    for share in shares:
        share.release()
    assert counts(load)[:2] == (0, 0)


def test_threads_count_together() -> None:
    """Bodies are unpacked in threads; no byte is lost between them."""
    load = load_of(max_bytes=1_000_000)
    shares = [load.enter() for _ in range(8)]

    def grow(index: int) -> None:
        for size in range(2000):
            shares[index].hold(size)

    threads = [threading.Thread(target=grow, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(load) == (8, 8 * 1999, 0)
