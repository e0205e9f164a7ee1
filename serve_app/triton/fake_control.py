"""The control RPCs of `FakeTriton`: statistics, loading and unloading, trace and log settings."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve_app.triton.fake_model import Failure

if TYPE_CHECKING:
    from serve_app.triton.fake import FakeTriton


@dataclass
class FakeControlState:
    """What the control calls have changed.

    Attributes:
        changes: RPC name and model name of each load and unload that arrived, oldest first.
        refusals: How loads and unloads of a model end, by its name.
        latency_s: How long a load takes.
        trace: Trace settings.
        log: Log settings as plain values.
    """

    changes: list[tuple[str, str]] = field(default_factory=list)
    refusals: dict[str, Failure] = field(default_factory=dict)
    latency_s: float = 0.0
    trace: dict[str, list[str]] = field(default_factory=lambda: {"trace_level": ["OFF"], "trace_rate": ["1000"]})
    log: dict[str, bool | int | str] = field(default_factory=lambda: {"log_info": True, "log_verbose_level": 0})


class FakeControlServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated, untyped
    """The RPCs; method names and signatures are the generated ones."""

    _fake: FakeTriton

    async def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        self._fake.rpc_counts["ModelStatistics"] += 1
        answer = service_pb2.ModelStatisticsResponse()
        for model in self._fake.models.values():
            if model.is_ready and request.name in ("", model.name):
                calls = [call for call in self._fake.calls if call.model_name == model.name]
                rows = sum(call.rows for call in calls)
                entry = answer.model_stats.add(name=model.name, version="1", inference_count=rows)
                entry.execution_count = entry.inference_stats.success.count = len(calls)
                for size in sorted({call.rows for call in calls}):
                    batch = entry.batch_stats.add(batch_size=size)
                    batch.compute_infer.count = sum(call.rows == size for call in calls)
        if request.name and not answer.model_stats:
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details(f"requested model '{request.name}' is not available")
        return answer

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        if self._accepts("RepositoryModelLoad", request.model_name, context):
            await asyncio.sleep(self._fake.control.latency_s)
            model = self._fake.models.get(request.model_name)
            if model is None:
                context.set_code(grpc.StatusCode.INTERNAL)
                context.set_details(f"failed to load '{request.model_name}', failed to poll from model repository")
            else:
                model.is_ready = True
                config = json.loads(request.parameters["config"].string_param or "{}")
                model.max_batch_size = config.get("max_batch_size", model.max_batch_size)
        return service_pb2.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        if self._accepts("RepositoryModelUnload", request.model_name, context):
            model = self._fake.models.get(request.model_name)
            if model is not None:
                model.is_ready = False
        return service_pb2.RepositoryModelUnloadResponse()

    def _accepts(self, rpc_name: str, model_name: str, context: Any) -> bool:
        self._fake.rpc_counts[rpc_name] += 1
        self._fake.control.changes.append((rpc_name, model_name))
        failure = self._fake.control.refusals.get(model_name)
        if failure is not None:
            context.set_code(failure.code)
            context.set_details(failure.text)
        return failure is None

    async def TraceSetting(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        self._fake.rpc_counts["TraceSetting"] += 1
        self._fake.control.trace.update({name: list(entry.value) for name, entry in request.settings.items()})
        answer = service_pb2.TraceSettingResponse()
        for name, values in self._fake.control.trace.items():
            answer.settings[name].value.extend(values)
        return answer

    async def LogSettings(self, request: Any, context: Any) -> Any:  # noqa: N802  # generated name
        self._fake.rpc_counts["LogSettings"] += 1
        for name, entry in request.settings.items():
            self._fake.control.log[name] = getattr(entry, entry.WhichOneof("parameter_choice"))
        answer = service_pb2.LogSettingsResponse()
        for name, value in self._fake.control.log.items():
            kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
            setattr(answer.settings[name], kind, value)
        return answer
