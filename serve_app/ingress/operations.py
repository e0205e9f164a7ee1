"""Which operation each HTTP route and each RPC is; one that is missing here is refused to all but `admin` keys."""

from __future__ import annotations

import re
from dataclasses import dataclass

from serve_app.auth.scopes import Operation

_PATTERNS: list[tuple[str, str, Operation]] = [
    ("GET", r"/v2/health/(live|ready)", Operation.HEALTH),
    ("GET", r"/v2", Operation.SERVER_METADATA),
    ("GET", r"/docs|/openapi\.json", Operation.DOCUMENTS),
    ("GET", r"/v2/models/stats", Operation.LIST_MODELS),
    ("POST", r"/v2/repository/index", Operation.LIST_MODELS),
    ("GET", r"/v2/models/\{\}(/ready|/config|/stats)?", Operation.READ_MODEL),
    ("POST", r"/v2/models/\{\}/(infer|generate|generate_stream)", Operation.INFER),
    ("POST", r"/v2/repository(/\{\})?/models/\{\}/(load|unload)", Operation.LOAD_MODEL),
    ("GET|POST", r"/v2/models/\{\}/trace/setting", Operation.MODEL_SETTINGS),
    ("GET|POST", r"/v2/(trace/setting|logging)", Operation.SERVER_SETTINGS),
    ("GET", r"/v2/(system|cuda)sharedmemory(/region/\{\})?/status", Operation.SHARED_MEMORY),
    ("POST", r"/v2/(system|cuda)sharedmemory(/region/\{\})?/(register|unregister)", Operation.SHARED_MEMORY),
]
_ROUTES = [(re.compile(methods), re.compile(paths), operation) for methods, paths, operation in _PATTERNS]


def operation_of_route(method: str, path: str) -> Operation | None:
    """The operation of a method of a route; `None` for one that is not listed.

    Args:
        method: `HEAD` is `GET`.
        path: With names in braces, as the application has it; a model's path stands for that of a version too.
    """
    method = "GET" if method == "HEAD" else method
    path = re.sub(r"\{[^}]*\}", "{}", path).replace("/versions/{}", "")
    for methods, paths, operation in _ROUTES:
        if methods.fullmatch(method) and paths.fullmatch(path):
            return operation
    return None


@dataclass(frozen=True, slots=True)
class Rpc:
    """What an RPC is.

    Attributes:
        operation: Of each call; in a stream, of each message.
        model_field: Field of the request that names the model; empty where there is none.
    """

    operation: Operation
    model_field: str = ""


RPCS: dict[str, Rpc] = {
    "ServerLive": Rpc(Operation.HEALTH),
    "ServerReady": Rpc(Operation.HEALTH),
    "ServerMetadata": Rpc(Operation.SERVER_METADATA),
    "RepositoryIndex": Rpc(Operation.LIST_MODELS),
    "ModelReady": Rpc(Operation.READ_MODEL, "name"),
    "ModelMetadata": Rpc(Operation.READ_MODEL, "name"),
    "ModelConfig": Rpc(Operation.READ_MODEL, "name"),
    "ModelStatistics": Rpc(Operation.READ_MODEL, "name"),
    "ModelInfer": Rpc(Operation.INFER, "model_name"),
    "ModelStreamInfer": Rpc(Operation.INFER, "model_name"),
    "RepositoryModelLoad": Rpc(Operation.LOAD_MODEL, "model_name"),
    "RepositoryModelUnload": Rpc(Operation.LOAD_MODEL, "model_name"),
    "TraceSetting": Rpc(Operation.MODEL_SETTINGS, "model_name"),
    "LogSettings": Rpc(Operation.SERVER_SETTINGS),
    "SystemSharedMemoryStatus": Rpc(Operation.SHARED_MEMORY),
    "SystemSharedMemoryRegister": Rpc(Operation.SHARED_MEMORY),
    "SystemSharedMemoryUnregister": Rpc(Operation.SHARED_MEMORY),
    "CudaSharedMemoryStatus": Rpc(Operation.SHARED_MEMORY),
    "CudaSharedMemoryRegister": Rpc(Operation.SHARED_MEMORY),
    "CudaSharedMemoryUnregister": Rpc(Operation.SHARED_MEMORY),
    # grpc.health.v1: a `service` that is not the server itself is a model.
    "Check": Rpc(Operation.READ_MODEL, "service"),
    "Watch": Rpc(Operation.READ_MODEL, "service"),
    "ServerReflectionInfo": Rpc(Operation.DOCUMENTS),
}
"""By the name of the method, which no two of our services share."""

OF_SERVER_WITHOUT_MODEL = {
    "ModelStatistics": Operation.LIST_MODELS,
    "TraceSetting": Operation.SERVER_SETTINGS,
    "Check": Operation.HEALTH,
    "Watch": Operation.HEALTH,
}
"""What some RPCs are when their request names no model."""
