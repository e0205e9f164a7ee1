"""Who may come in: asked by every way in about each inference request, before it is read where that can be."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Protocol

from serve_app.auth.principal import CALLER
from serve_app.batching.lanes import MOST_URGENT, priority_in_lane, put_in_lane
from serve_app.batching.replica_load import ReplicaLoad, Share
from serve_app.clock import Clock, Deadline
from serve_app.protocol.messages import InferRequest
from serve_app.settings import ModelServerConfig

logger = logging.getLogger(__name__)


class Queue(Protocol):
    """What is asked of a model's runner."""

    @property
    def is_pressed(self) -> bool:
        """Whether anything waits, so that one more may be too much."""
        ...

    def check_more(self, deadline: Deadline | None = None, *, priority: int) -> None:
        """Raise `Overloaded` where the smallest request of at most that priority would be refused now."""
        ...


class Admission:
    """The bounds of one replica and of its models' queues, and the lanes of its callers.

    Args:
        find_queue: The queue of a model and version, if it is in service.
        config: Settings.
        clock: The clock deadlines are on.

    Attributes:
        load: What this replica has taken on; whoever reads a body or answers a request holds a share of it.
    """

    def __init__(self, find_queue: Callable[[str, str], Queue | None], *, config: ModelServerConfig, clock: Clock):
        self._find_queue = find_queue
        self._config = config
        self._clock = clock
        self._strange_lanes: set[str] = set()
        self.load = ReplicaLoad(config.replica)

    def reconfigure(self, config: ModelServerConfig) -> None:
        """Put other settings in force for who comes next."""
        self._config = config
        self._strange_lanes.clear()
        self.load.reconfigure(config.replica)

    def admit(
        self,
        model_name: str,
        model_version: str = "",
        *,
        size_bytes: int = 0,
        timeout_s: float | None = None,
        asked_priority: int = MOST_URGENT,
    ) -> Share:
        """Take on one inference request; release the share with its answer.

        Args:
            model_name: The model.
            model_version: Its version.
            size_bytes: What the request takes already.
            timeout_s: Its budget, as far as that is known.
            asked_priority: The most urgent priority that it can ask for; 0 where it is known to ask for none.

        Raises:
            Overloaded: The replica has taken on all that it may, or the model's queue has no room for it.
            RequestTooLarge: Not even an idle replica has room for it.
        """
        self.check_more(model_name, model_version, timeout_s=timeout_s, asked_priority=asked_priority)
        return self.load.enter(size_bytes)

    def check_more(
        self, model_name: str, model_version: str = "", *, timeout_s: float | None, asked_priority: int
    ) -> None:
        """Check that a model's queue has room for one more request; arguments and errors as `admit`."""
        queue = self._find_queue(model_name, model_version)
        if queue is None or not queue.is_pressed:
            return
        deadline = None
        if timeout_s is not None and not math.isnan(timeout_s):  # who sends that hears of it later
            deadline = Deadline.after(timeout_s, now=self._clock.now())
        caller = CALLER.get()
        lane = None if caller is None else caller.lane
        priority = priority_in_lane(asked_priority, lane, self._config.lanes, default=self._default_of(model_name))
        queue.check_more(deadline, priority=priority)

    def put_in_lane(self, request: InferRequest) -> None:
        """Give a request the priority that its caller's lane says."""
        caller = CALLER.get()
        if caller is None or caller.lane is None:
            return
        lane, lanes = caller.lane, self._config.lanes
        if lane not in lanes and lane not in self._strange_lanes:
            self._strange_lanes.add(lane)
            logger.warning("key %r is in lane %r, which the setting `lanes` does not have", caller.key_id, lane)
        put_in_lane(request, lane, lanes, default=self._default_of(request.model_name))

    def _default_of(self, model_name: str) -> int:
        return self._config.for_model(model_name).queue.default_priority

    def __repr__(self) -> str:
        return f"<Admission {self.load!r} Lanes: {len(self._config.lanes)}>"
