"""What the exit statuses of `serve-app` mean."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses; documented in `serve-app --help` and cluster/README.md."""

    OK = 0
    """Did what was asked; also `up` that was stopped by Ctrl-C, SIGTERM or `serve-app down`."""

    FAILED = 1
    """Something failed after it was started; everything was stopped again."""

    NOT_READY = 2
    """Wrong arguments, or a check of the machine failed; nothing was started."""

    NOT_RUNNING = 3
    """`status` and `down`: there is no instance."""

    KILLED = 130
    """A second signal cut the stop short: all was killed."""
