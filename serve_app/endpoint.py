"""Where a Triton server is, as data that the fleet writes and the replicas read."""

from __future__ import annotations

from dataclasses import dataclass, field

ADMIN_PROTOCOLS = "model-repository,shared-memory,trace,logging"
"""Triton's names for what it answers only to those who show the secret."""

ADMIN_RPCS = frozenset(
    {
        "RepositoryIndex",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    }
)
"""The RPCs of these protocols."""

SECRET_NAME = "serve-app"  # noqa: S105  # a name, no secret
"""Name of the secret; as a header over gRPC Triton puts `triton-grpc-protocol-` before it."""

_LOOPBACK = frozenset(("localhost", "127.0.0.1", "[::1]"))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The gRPC address of one tritonserver.

    Attributes:
        address: gRPC target: `host:port`, `unix:/path` or `ipv4:...`.
        server_id: One life of one server: a restarted server has another id, so that pools to the old one are
            not mistaken for pools to the new. Equal to `address` for servers that are not ours.
        node_id: Ray node the server runs on; empty when unknown.
        zone: Availability zone of that node; empty when unknown.
        metrics_url: Where the server's Prometheus metrics are; empty when unknown.
        secret: What the server wants to be shown for `ADMIN_RPCS`; empty when it wants nothing.
    """

    address: str
    server_id: str
    node_id: str = ""
    zone: str = ""
    metrics_url: str = ""
    secret: str = field(default="", repr=False)

    @property
    def place(self) -> str:
        """The machine it is on, as far as is known: servers of one place see the same shared memory."""
        if self.node_id:
            return self.node_id
        host = self.address.rpartition(":")[0].removeprefix("ipv4:").removeprefix("ipv6:")
        return "localhost" if host.startswith("unix") or host in _LOOPBACK else host

    @classmethod
    def static(cls, address: str) -> Endpoint:
        """An endpoint that is known by its address alone."""
        return cls(address, address)


def secret_metadata(secret: str, rpc_name: str) -> tuple[tuple[str, str], ...] | None:
    """The metadata that shows the secret, for an RPC that needs it."""
    if not secret or rpc_name not in ADMIN_RPCS:
        return None
    return ((f"triton-grpc-protocol-{SECRET_NAME}", secret),)
