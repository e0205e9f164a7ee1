"""Statistics of a fleet are the sums of its servers', in Triton's own form."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from serve_app.protocol.statistics import merge_model_statistics, model_statistics_json

# As tritonserver 2.51 printed it after one request of two rows.
PRINTED = (
    '{"model_stats":[{"name":"identity","version":"1","last_inference":1796070762889,"inference_count":2,'
    '"execution_count":1,"inference_stats":{"success":{"count":1,"ns":113328007},"fail":{"count":0,"ns":0},'
    '"queue":{"count":1,"ns":57235},"compute_input":{"count":1,"ns":159266},"compute_infer":{"count":1,'
    '"ns":113011267},"compute_output":{"count":1,"ns":91275},"cache_hit":{"count":0,"ns":0},"cache_miss":'
    '{"count":0,"ns":0}},"response_stats":{},"batch_stats":[{"batch_size":2,"compute_input":{"count":1,'
    '"ns":159266},"compute_infer":{"count":1,"ns":113011267},"compute_output":{"count":1,"ns":91275}}],'
    '"memory_usage":[]}]}'
)


def parsed(document: dict[str, Any]) -> Any:
    return json_format.ParseDict(document, service_pb2.ModelStatisticsResponse())


def stats(name: str = "m", *, version: str = "1", last: int = 1, **fields: Any) -> Any:
    """One server's answer about one model."""
    return parsed({"model_stats": [{"name": name, "version": version, "last_inference": last, **fields}]})


def test_the_json_is_what_triton_prints() -> None:
    """Byte for byte, the order of the keys included."""
    document = json.loads(PRINTED)
    assert json.dumps(model_statistics_json(parsed(document)), separators=(",", ":")) == PRINTED


def test_counts_are_added_and_the_last_inference_is_the_latest() -> None:
    """Batch sizes, responses and memories are matched by their keys; what only one server has is kept."""

    def duration(count: int) -> dict[str, Any]:
        return {"compute_infer": {"count": count, "ns": 10 * count}}

    a = stats(
        last=5,
        inference_count=3,
        execution_count=2,
        inference_stats={"success": {"count": 2, "ns": 20}},
        batch_stats=[{"batch_size": 1, **duration(1)}, {"batch_size": 4, **duration(1)}],
        memory_usage=[{"type": "CPU", "id": 0, "byte_size": 10}],
        response_stats={"0": {"success": {"count": 1, "ns": 1}}},
    )
    b = stats(
        last=9,
        inference_count=4,
        execution_count=1,
        inference_stats={"success": {"count": 1, "ns": 5}, "fail": {"count": 7, "ns": 1}},
        batch_stats=[{"batch_size": 4, **duration(2)}, {"batch_size": 2, **duration(5)}],
        memory_usage=[{"type": "CPU", "id": 0, "byte_size": 5}, {"type": "GPU", "id": 0, "byte_size": 1}],
        response_stats={"0": {"success": {"count": 2, "ns": 2}}, "1": {"fail": {"count": 1, "ns": 1}}},
    )
    (model,) = merge_model_statistics([a, b]).model_stats
    assert (model.last_inference, model.inference_count, model.execution_count) == (9, 7, 3)
    assert (model.inference_stats.success.count, model.inference_stats.success.ns) == (3, 25)
    assert model.inference_stats.fail.count == 7
    assert [(batch.batch_size, batch.compute_infer.count) for batch in model.batch_stats] == [(1, 1), (2, 5), (4, 3)]
    assert [(m.type, m.byte_size) for m in model.memory_usage] == [("CPU", 15), ("GPU", 1)]
    assert model.response_stats["0"].success.count == 3
    assert model.response_stats["1"].fail.count == 1
    assert a.model_stats[0].inference_count == 3


def test_versions_are_models_of_their_own() -> None:
    """And a model that one server lacks counts as that server does not have it."""
    merged = merge_model_statistics(
        [stats(inference_count=1), stats(version="2"), stats("n"), stats(inference_count=2)]
    )
    assert [(m.name, m.version, m.inference_count) for m in merged.model_stats] == [
        ("m", "1", 3),
        ("m", "2", 0),
        ("n", "1", 0),
    ]
    assert not merge_model_statistics([]).model_stats


@given(st.lists(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2**40)), max_size=5), max_size=5))
def test_nothing_is_lost_or_counted_twice(servers: list[list[tuple[int, int]]]) -> None:
    """For each batch size the sum over servers, in any order of servers."""
    answers = [
        stats(batch_stats=[{"batch_size": size, "compute_infer": {"count": n}} for size, n in dict(one).items()])
        for one in servers
    ]
    expected: dict[int, int] = {}
    for one in servers:
        for size, n in dict(one).items():
            expected[size] = expected.get(size, 0) + n
    for order in (answers, answers[::-1]):
        merged = merge_model_statistics(order)
        found = {b.batch_size: b.compute_infer.count for model in merged.model_stats for b in model.batch_stats}
        assert found == expected
