"""What a router tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.triton.member import EndpointStatistics


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    """Counts of one router.

    Attributes:
        endpoints: Each server, removed ones that still drain included.
        num_available: Servers that may be asked.
        num_active: Calls that hold a channel, over all servers.
        num_waiting: Callers that wait for a channel, over all servers.
        num_done: Requests and control calls that were answered.
        num_failed: Those that ended with an error.
        num_retries: Tries after the first.
        num_ejections: Ejections, those of servers since removed included.
        num_hedges: Second copies of requests that took long.
        num_hopeless: Requests refused because no model answers in so short a time.
        num_sequences: Sequences whose server is known.
        retry_tokens: Retries that the budget allows now.
    """

    endpoints: tuple[EndpointStatistics, ...]
    num_available: int
    num_active: int
    num_waiting: int
    num_done: int
    num_failed: int
    num_retries: int
    num_ejections: int
    num_hedges: int
    num_hopeless: int
    num_sequences: int
    retry_tokens: float
