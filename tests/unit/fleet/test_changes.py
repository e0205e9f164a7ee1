"""What clients changed is kept once for each model, in order, and within bounds."""

from __future__ import annotations

import pytest

from serve_app.errors import RequestTooLarge
from serve_app.fleet.changes import Change, ChangeTable

LOAD, UNLOAD = "RepositoryModelLoad", "RepositoryModelUnload"


def test_an_unload_replaces_a_load_and_the_other_way_round() -> None:
    """Only the last change of a model counts; the order over all models is that of the changes."""
    table = ChangeTable()
    for rpc_name, model in ((LOAD, "a"), (LOAD, "b"), (UNLOAD, "a")):
        table.record(rpc_name, model, b"")
    assert [(c.rpc_name, c.model_name, c.number) for c in table.after(0)] == [(LOAD, "b", 2), (UNLOAD, "a", 3)]
    assert [c.model_name for c in table.after(2)] == ["a"]
    assert not table.after(3)


def test_models_and_bytes_are_bounded() -> None:
    """What replaces a model's last change counts in its place."""
    table = ChangeTable(max_changes=2, max_bytes=10)
    table.record(LOAD, "a", bytes(6))
    with pytest.raises(RequestTooLarge, match="the limit is 10 bytes"):
        table.check("b", 5)
    table.record(LOAD, "a", bytes(10))
    table.record(UNLOAD, "a", b"")
    table.record(LOAD, "b", bytes(10))
    with pytest.raises(RequestTooLarge, match="3 models, the limit is 2"):
        table.record(LOAD, "c", b"")
    assert table.statistics() == {"number": 4, "models": 2, "size_bytes": 10}


def test_a_table_that_starts_anew_is_filled_by_those_who_remember() -> None:
    """Newer changes made meanwhile stay, and no number is given twice."""
    old = ChangeTable()
    old.record(LOAD, "a", b"1")
    old.record(LOAD, "b", b"1")
    new = ChangeTable()
    assert new.record(UNLOAD, "a", b"", after=old.number).number == 3
    new.take(old.after(0))
    new.take(old.after(0))
    assert [(c.model_name, c.rpc_name) for c in new.after(0)] == [("b", LOAD), ("a", UNLOAD)]
    old.take([Change(1, "b", UNLOAD, b"")])
    assert old.number_of("b") == 2
    assert old.has("b")
    assert not old.has("c")
