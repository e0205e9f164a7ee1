"""Statistics of models: the sum over servers, and the JSON that Triton's HTTP endpoint prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tritonclient.grpc import service_pb2


def merge_model_statistics(answers: Iterable[Any]) -> Any:
    """The `ModelStatisticsResponse` of a fleet from those of its servers.

    Counts and nanoseconds are added, for each batch size and response index of their own; `last_inference` is the
    latest. The arguments stay as they are.

    Args:
        answers: One `ModelStatisticsResponse` of each server; a model may be missing from some.
    """
    merged = service_pb2.ModelStatisticsResponse()
    by_key: dict[tuple[str, str], Any] = {}
    for answer in answers:
        for model in answer.model_stats:
            key = (model.name, model.version)
            if key in by_key:
                _add_model(by_key[key], model)
            else:
                by_key[key] = merged.model_stats.add()
                by_key[key].CopyFrom(model)
    return merged


def _add_model(total: Any, model: Any) -> None:
    total.last_inference = max(total.last_inference, model.last_inference)
    total.inference_count += model.inference_count
    total.execution_count += model.execution_count
    _add_durations(total.inference_stats, model.inference_stats)
    for index, response in model.response_stats.items():
        _add_durations(total.response_stats[index], response)
    _add_entries(total.batch_stats, model.batch_stats, ("batch_size",))
    _add_entries(total.memory_usage, model.memory_usage, ("type", "id"))
    total.batch_stats.sort(key=lambda batch: batch.batch_size)


def _add_entries(totals: Any, entries: Any, key_fields: tuple[str, ...]) -> None:
    known = {tuple(getattr(total, name) for name in key_fields): total for total in totals}
    for entry in entries:
        total = known.get(tuple(getattr(entry, name) for name in key_fields))
        if total is None:
            totals.add().CopyFrom(entry)
        elif "byte_size" in entry.DESCRIPTOR.fields_by_name:
            total.byte_size += entry.byte_size
        else:
            _add_durations(total, entry)


def _add_durations(total: Any, other: Any) -> None:
    """Add every `StatisticDuration` of one message to the same one of another."""
    for field, duration in other.ListFields():
        if field.message_type is not None:
            sum_ = getattr(total, field.name)
            sum_.count += duration.count
            sum_.ns += duration.ns


def model_statistics_json(pb: Any) -> dict[str, Any]:
    """A `ModelStatisticsResponse` as `GET /v2/models/stats` prints it; compared with Triton 2.51."""
    return {"model_stats": [_model_json(model) for model in pb.model_stats]}


def _model_json(model: Any) -> dict[str, Any]:
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": model.last_inference,
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        "inference_stats": _durations_json(model.inference_stats),
        "response_stats": {index: _durations_json(model.response_stats[index]) for index in model.response_stats},
        "batch_stats": [{"batch_size": b.batch_size, **_durations_json(b)} for b in model.batch_stats],
        "memory_usage": [{"type": m.type, "id": m.id, "byte_size": m.byte_size} for m in model.memory_usage],
    }


def _durations_json(message: Any) -> dict[str, Any]:
    names = [field.name for field in message.DESCRIPTOR.fields if field.message_type is not None]
    durations = {name: getattr(message, name) for name in names}
    return {name: {"count": duration.count, "ns": duration.ns} for name, duration in durations.items()}
