"""Which endpoints are alive, as leases that heartbeats renew. Pure: the actor around it brings time and calls."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.endpoint import Endpoint


class LeaseSnapshot(NamedTuple):
    """The endpoints at one moment.

    Attributes:
        epoch: Incarnation of the table. Versions of different epochs cannot be compared: a restarted registry
            counts from zero again.
        version: Grows by one with every change of the endpoints, and only then.
        endpoints: Every leased endpoint, ordered by `server_id`.
    """

    epoch: str
    version: int
    endpoints: list[Endpoint]


@dataclass(slots=True)
class _Lease:
    endpoint: Endpoint
    expires_at: float


class LeaseTable:
    """Endpoints with an expiry each, and a version that tells readers when to look again.

    Soft state: after a restart it is empty and heartbeats fill it again, which `is_rebuilding` tells readers, so
    that they keep the endpoints they know meanwhile.

    Args:
        started_at: Seconds on the clock of all later `now` arguments.
        epoch: Incarnation id; a random one by default.
        max_endpoints: Leases held at once; a new server beyond it is refused.
    """

    MAX_RELEASED = 4096
    """Released ids remembered, so that a heartbeat already under way does not bring a stopped server back."""

    def __init__(self, *, started_at: float, epoch: str | None = None, max_endpoints: int = 4096) -> None:
        self.epoch = epoch or uuid.uuid4().hex
        self.version = 0
        self._started_at = started_at
        self._longest_lease_s = 0.0
        self._max_endpoints = max_endpoints
        self._leases: dict[str, _Lease] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._num_expired = 0
        self._num_refused = 0

    def __repr__(self) -> str:
        return (
            f"<LeaseTable epoch {self.epoch[:8]} version {self.version}: {len(self._leases)} leased, "
            f"{self._num_expired} expired, {self._num_refused} refused>"
        )

    def statistics(self) -> dict[str, int]:
        """Counts since the table was made."""
        return {
            "version": self.version,
            "leased": len(self._leases),
            "expired": self._num_expired,
            "refused": self._num_refused,
        }

    def renew(self, endpoint: Endpoint, lease_s: float, now: float) -> bool:
        """Lease `endpoint`, or prolong its lease, until `now + lease_s`.

        Another life at the same address on the same node is gone by then, so its lease ends.

        Returns:
            False where the lease is refused: the server was released, or the table is full.
        """
        if endpoint.server_id in self._released:
            self._num_refused += 1
            return False
        self._longest_lease_s = max(self._longest_lease_s, lease_s)
        known = self._leases.get(endpoint.server_id)
        if known is not None and known.endpoint == endpoint:
            known.expires_at = now + lease_s
            return True
        replaced = [
            lease.endpoint.server_id
            for lease in self._leases.values()
            if (lease.endpoint.node_id, lease.endpoint.address) == (endpoint.node_id, endpoint.address)
        ]
        if known is None and not replaced and len(self._leases) >= self._max_endpoints:
            self._num_refused += 1
            return False
        for server_id in replaced:
            del self._leases[server_id]
        self._leases[endpoint.server_id] = _Lease(endpoint, now + lease_s)
        self.version += 1
        return True

    def release(self, server_id: str) -> bool:
        """End a lease for good: the same id is never leased again.

        Returns:
            Whether there was one.
        """
        self._released[server_id] = None
        self._released.move_to_end(server_id)
        if len(self._released) > self.MAX_RELEASED:
            self._released.popitem(last=False)
        if self._leases.pop(server_id, None) is None:
            return False
        self.version += 1
        return True

    def expire(self, now: float) -> list[Endpoint]:
        """End the leases that ran out at or before `now`; they may be renewed later.

        Returns:
            The endpoints that are gone.
        """
        gone = [lease.endpoint for lease in self._leases.values() if lease.expires_at <= now]
        for endpoint in gone:
            del self._leases[endpoint.server_id]
        if gone:
            self._num_expired += len(gone)
            self.version += 1
        return gone

    def snapshot(self) -> LeaseSnapshot:
        """The leased endpoints, with the version to compare the next snapshot with."""
        endpoints = sorted((lease.endpoint for lease in self._leases.values()), key=lambda e: e.server_id)
        return LeaseSnapshot(self.epoch, self.version, endpoints)

    def is_rebuilding(self, now: float, settle_s: float = 3.0) -> bool:
        """Whether servers that were leased before a restart may not have sent their heartbeat yet.

        Args:
            now: Seconds on the table's clock.
            settle_s: Least time after the start; one lease, where a longer one has been seen.
        """
        return now - self._started_at < max(settle_s, self._longest_lease_s)
