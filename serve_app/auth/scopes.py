"""What can be asked of a server, and the scope that a key needs for it."""

from __future__ import annotations

from enum import Enum


class Scope(str, Enum):
    """What a key may be good for; every one includes `read`."""

    READ = "read"
    """Metadata, configuration, statistics and readiness of the key's models, the index, the documents."""

    INFER = "infer"
    """Run the key's models."""

    LOAD = "load"
    """Load and unload the key's models. A load can bring files of its own, so this is as good as a shell on Triton."""

    SETTINGS = "settings"
    """Read and change trace and log settings."""

    SHARED_MEMORY = "shared_memory"
    """Register, list and use regions of shared memory."""

    ADMIN = "admin"
    """All of these."""

    def includes(self) -> frozenset[Scope]:
        """Every scope that this one grants."""
        return frozenset(Scope) if self is Scope.ADMIN else frozenset({self, Scope.READ})


class Operation(Enum):
    """A kind of call; every HTTP route and every RPC is one of these."""

    HEALTH = "ask for the server's health"
    SERVER_METADATA = "read the server's metadata"
    DOCUMENTS = "read the description of the interface"
    LIST_MODELS = "list models"
    READ_MODEL = "read about a model"
    INFER = "run a model"
    LOAD_MODEL = "load or unload a model"
    MODEL_SETTINGS = "read or change a model's settings"
    SERVER_SETTINGS = "read or change the server's settings"
    SHARED_MEMORY = "use shared memory"
    OTHER = "make this call"


REQUIRED_SCOPE: dict[Operation, Scope] = {
    Operation.HEALTH: Scope.READ,
    Operation.SERVER_METADATA: Scope.READ,
    Operation.DOCUMENTS: Scope.READ,
    Operation.LIST_MODELS: Scope.READ,
    Operation.READ_MODEL: Scope.READ,
    Operation.INFER: Scope.INFER,
    Operation.LOAD_MODEL: Scope.LOAD,
    Operation.MODEL_SETTINGS: Scope.SETTINGS,
    Operation.SERVER_SETTINGS: Scope.SETTINGS,
    Operation.SHARED_MEMORY: Scope.SHARED_MEMORY,
    Operation.OTHER: Scope.ADMIN,
}
"""The least scope for each operation."""

OF_ONE_MODEL = frozenset(
    {Operation.READ_MODEL, Operation.INFER, Operation.LOAD_MODEL, Operation.MODEL_SETTINGS},
)
"""Operations on a model, which has to be one of the key's."""

OF_ALL_MODELS = frozenset({Operation.SERVER_SETTINGS})
"""Operations that touch every model, for which a key of some models is too small."""
