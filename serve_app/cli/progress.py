"""Tells what is going on: a spinner with the seconds on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

STILL_EVERY_S = 10.0
"""How often plain output says that a step still runs."""

MAX_DETAIL = 100
"""Characters of a detail beside the spinner, which is one line."""


class Step:
    """One thing under way; `detail` may be set at any time.

    Args:
        title: What is being done.
        reporter: Where it is told.
        progress: The spinner, `None` for plain lines.
    """

    def __init__(self, title: str, reporter: Reporter, progress: Progress | None) -> None:
        self.title, self._reporter, self._progress = title, reporter, progress
        self._started_at = self._said_at = time.monotonic()
        self._detail = ""
        self._task = progress.add_task(title, total=None, detail="") if progress else None

    def __repr__(self) -> str:
        return f"<Step {self.title!r}, {self.elapsed_s:.1f} s, {self._detail!r}>"

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started_at

    def tick(self, detail: str | None = None) -> None:
        """Say what is waited for now (`None`: the same as before); call it often, it speaks seldom."""
        detail = self._detail = self._detail if detail is None else detail
        if self._progress and self._task is not None:
            self._progress.update(self._task, detail=detail[:MAX_DETAIL])
        elif time.monotonic() - self._said_at >= STILL_EVERY_S:
            self._said_at = time.monotonic()
            self._reporter.say(f"  ... {self.elapsed_s:.0f} s{': ' + detail if detail else ''}")


class Reporter:
    """Writes progress, results and problems.

    Args:
        console: Where to; whether it is a terminal decides between spinner and lines.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """A step with a spinner while it runs and one line when it is done; an exception leaves no line."""
        if not self._console.is_terminal:
            self.say(f"{title} ...")
            step = Step(title, self, None)
            yield step
        else:
            columns = (SpinnerColumn("line"), TextColumn("{task.description}"), TimeElapsedColumn())
            detail = TextColumn("{task.fields[detail]}", style="dim", markup=False)  # other programs' words
            progress = Progress(*columns, detail, console=self._console, transient=True)
            step = Step(title, self, progress)
            try:
                with contextlib.suppress(OSError):
                    progress.start()
                yield step
            finally:
                with contextlib.suppress(OSError):
                    progress.stop()
        self.say(f"{title}: done in {step.elapsed_s:.1f} s")

    def say(self, text: str, style: str = "") -> None:
        """Write lines as they are; brackets in them mean nothing.

        A terminal that was closed, or a pipe that nobody reads, is no reason not to stop what runs.
        """
        with contextlib.suppress(OSError):
            self._console.print(Text(text, style=style))

    def problem(self, text: str) -> None:
        """Write what went wrong."""
        self.say(text, "bold red")
