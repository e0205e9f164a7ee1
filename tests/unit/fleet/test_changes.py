"""What clients changed is kept once for each model, in order, and within bounds."""

from __future__ import annotations

import pytest

from serve_app.errors import RequestTooLarge
from serve_app.fleet.changes import MAX_FORGOTTEN, MAX_REGIONS, REGION_PREFIX, Change, ChangeTable

LOAD, UNLOAD = "RepositoryModelLoad", "RepositoryModelUnload"
REGISTER, UNREGISTER = "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"


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


def test_regions_have_a_bound_of_their_own() -> None:
    """They take no room from models, and a region that was registered may be so again."""
    table = ChangeTable(max_changes=1)
    for number in range(MAX_REGIONS):
        table.record(REGISTER, f"{REGION_PREFIX}{number}", b"", place="here")
    with pytest.raises(RequestTooLarge, match="1025 regions, the limit is 1024"):
        table.record(REGISTER, f"{REGION_PREFIX}x", b"")
    table.record(REGISTER, f"{REGION_PREFIX}5", b"")
    table.record(LOAD, "m", b"")
    table.record(UNREGISTER, f"{REGION_PREFIX}7", b"")
    table.record(REGISTER, f"{REGION_PREFIX}x", b"")
    newest = table.after(table.number - 1)[0]
    assert (newest.region, newest.place, newest.is_end_of_region) == ("x", "", False)
    assert table.after(0)[0].place == "here"
    assert table.after(table.number - 3)[0].region == ""


def test_regions_that_come_and_go_leave_little_behind() -> None:
    """Names are made anew by many clients; only the last ones that went are kept."""
    table = ChangeTable()
    for number in range(2000):
        name = f"{REGION_PREFIX}{number}"
        table.record(REGISTER, name, b"")
        table.record(UNREGISTER, name, b"")
    assert table.statistics()["models"] == MAX_FORGOTTEN
    assert table.after(0)[0].region == str(2000 - MAX_FORGOTTEN)
    copy = ChangeTable()
    copy.take(table.after(0))
    assert copy.after(0) == table.after(0)
