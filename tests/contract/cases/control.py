"""Calls around inference, for models and versions that are there and that are not."""

from __future__ import annotations

import json
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from tests.contract.case import Theme
from tests.contract.differences import (
    BAD_LOAD,
    HEALTH_BODIES,
    MALFORMED,
    NOT_READY,
    SERVER_METADATA,
    UNKNOWN_MODEL,
    VERSION,
)
from tests.support.echo_models import MODELS

T = Theme()


def _get(name: str, path: str, rpc: str, message: Any, **rest: Any) -> None:
    T.call(name, http=("GET", path, b""), rpc=(rpc, message), **rest)


def _keys(answer: Any) -> Any:
    """The shape of statistics: all keys, no counts; of lists the first entry."""
    if isinstance(answer, dict):
        return {key: _keys(value) for key, value in answer.items() if key not in ("last_inference", "batch_stats")}
    return [_keys(answer[0])] if isinstance(answer, list) and answer else type(answer).__name__


def _nothing(answer: Any) -> None:
    """The status alone."""


# --- health
_get("live", "/v2/health/live", "ServerLive", pb.ServerLiveRequest(), difference=HEALTH_BODIES, ours="ok")
_get("ready", "/v2/health/ready", "ServerReady", pb.ServerReadyRequest(), difference=HEALTH_BODIES, ours="ok")
for _name, _model, _version in (("", "echo1", ""), (" version", "labels", "3")):
    _path = f"/v2/models/{_model}" + (f"/versions/{_version}" if _version else "")
    _message = pb.ModelReadyRequest(name=_model, version=_version)
    _get(f"model ready{_name}", f"{_path}/ready", "ModelReady", _message, difference=HEALTH_BODIES, ours="ok")

for _name, _model, _version in (("model", "nothing", ""), ("version", "echo1", "9")):
    _path = f"/v2/models/{_model}" + (f"/versions/{_version}" if _version else "")
    _message = pb.ModelReadyRequest(name=_model, version=_version)
    _unknown = f"ready of an unknown {_name}"
    _get(_unknown, f"{_path}/ready", "ModelReady", _message, difference=NOT_READY, ours="not found")
_get("server", "/v2", "ServerMetadata", pb.ServerMetadataRequest(), difference=SERVER_METADATA, ours="ok")

# --- descriptions
for _model in MODELS:
    _get(f"metadata of {_model}", f"/v2/models/{_model}", "ModelMetadata", pb.ModelMetadataRequest(name=_model))
    _get(f"config of {_model}", f"/v2/models/{_model}/config", "ModelConfig", pb.ModelConfigRequest(name=_model))
for _model in ("digits", "repeat", "accumulate", "bls"):
    _get(f"metadata of {_model}", f"/v2/models/{_model}", "ModelMetadata", pb.ModelMetadataRequest(name=_model))
for _what, _rpc, _message in (
    ("", "ModelMetadata", pb.ModelMetadataRequest),
    ("/config", "ModelConfig", pb.ModelConfigRequest),
    ("/stats", "ModelStatistics", pb.ModelStatisticsRequest),
):
    _look = _keys if _what == "/stats" else (lambda answer: answer)
    _of = _what.strip("/") or "metadata"
    _get(
        f"{_of} of a version",
        f"/v2/models/labels/versions/1{_what}",
        _rpc,
        _message(name="labels", version="1"),
        look=_look,
    )
    _unknown = UNKNOWN_MODEL if _what == "/stats" else ""
    for _name, _model, _version, _difference in (
        ("of an unknown model", "nothing", "", _unknown),
        ("of an unknown version", "echo1", "9", _unknown),
        ("of a version that is a word", "echo1", "x", VERSION),
        ("of version 0", "echo1", "0", _unknown),
        ("of a version with a zero", "echo1", "01", VERSION),
    ):
        _path = f"/v2/models/{_model}" + (f"/versions/{_version}" if _version else "") + _what
        _get(
            f"{_of} {_name}",
            _path,
            _rpc,
            _message(name=_model, version=_version),
            difference=_difference,
            ours="not found",
        )
_get("statistics", "/v2/models/echo1/stats", "ModelStatistics", pb.ModelStatisticsRequest(name="echo1"), look=_keys)
_get("statistics of all", "/v2/models/stats", "ModelStatistics", pb.ModelStatisticsRequest(), look=_nothing)

# --- the repository


def _index(answer: Any) -> list[dict[str, Any]]:
    entries = answer if isinstance(answer, list) else answer.get("models", [])
    return [entry for entry in entries if entry["name"] in (*MODELS, "bls")]


def _post(name: str, path: str, document: object, rpc: str | None = None, message: Any = None, **rest: Any) -> None:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    T.call(name, http=("POST", path, body), rpc=(rpc, message) if rpc else None, **rest)


_post("index", "/v2/repository/index", b"", "RepositoryIndex", pb.RepositoryIndexRequest(), look=_index)
_ready = pb.RepositoryIndexRequest(ready=True)
_post("index of what is ready", "/v2/repository/index", {"ready": True}, "RepositoryIndex", _ready, look=_index)
_post("index with other members", "/v2/repository/index", {"x": 1}, look=_index)
_post("index with a bad flag", "/v2/repository/index", {"ready": "yes"}, difference=MALFORMED)
_post("index of broken JSON", "/v2/repository/index", b"{", difference=MALFORMED)
_LOAD = "/v2/repository/models/nothing/load"
_load = pb.RepositoryModelLoadRequest(model_name="nothing")
_post("load of what is not there", _LOAD, b"", "RepositoryModelLoad", _load, difference=BAD_LOAD)
_load = pb.RepositoryModelLoadRequest(model_name="echo1")
_load.parameters["config"].string_param = "no config"
_BAD = {"parameters": {"config": "no config"}}
_post("load of no config", "/v2/repository/models/echo1/load", _BAD, "RepositoryModelLoad", _load, difference=BAD_LOAD)
_load = pb.RepositoryModelLoadRequest(model_name="echo1")
_load.parameters["x"].string_param = "y"
_BAD = {"parameters": {"x": "y"}}
_post(
    "load with another parameter",
    "/v2/repository/models/echo1/load",
    _BAD,
    "RepositoryModelLoad",
    _load,
    difference=MALFORMED,
)
_post("load of broken JSON", "/v2/repository/models/echo1/load", b"{", difference=MALFORMED)
_post(
    "load again",
    "/v2/repository/models/echo2/load",
    b"",
    "RepositoryModelLoad",
    pb.RepositoryModelLoadRequest(model_name="echo2"),
)
_unload = pb.RepositoryModelUnloadRequest(model_name="nothing")
_post("unload of what is not there", "/v2/repository/models/nothing/unload", b"", "RepositoryModelUnload", _unload)
_load = pb.RepositoryModelLoadRequest(model_name="echo2", repository_name="r")
_post("load from a named repository", "/v2/repository/r/models/echo2/load", b"", "RepositoryModelLoad", _load)

# --- settings
_get("log settings", "/v2/logging", "LogSettings", pb.LogSettingsRequest(), look=_keys)
_get("trace settings", "/v2/trace/setting", "TraceSetting", pb.TraceSettingRequest(), look=_keys)
_trace = pb.TraceSettingRequest(model_name="echo1")
_get("trace settings of a model", "/v2/models/echo1/trace/setting", "TraceSetting", _trace, look=_keys)
_trace = pb.TraceSettingRequest(model_name="nothing")
_PATH = "/v2/models/nothing/trace/setting"
_get("trace settings of an unknown model", _PATH, "TraceSetting", _trace, difference=UNKNOWN_MODEL, ours="not found")
_post("log settings of broken JSON", "/v2/logging", b"{", difference=MALFORMED)
_post("log setting of another type", "/v2/logging", {"log_verbose_level": "x"}, difference=MALFORMED)
_post("unknown log setting", "/v2/logging", {"log_nothing": 1})
_post("trace settings of broken JSON", "/v2/trace/setting", b"{", difference=MALFORMED)
_trace = pb.TraceSettingRequest()
_trace.settings["trace_rate"].value.append("x")
_post("trace rate that is no number", "/v2/trace/setting", {"trace_rate": "x"}, "TraceSetting", _trace)
_post("trace rate of another type", "/v2/trace/setting", {"trace_rate": {"x": 1}}, difference=MALFORMED)
