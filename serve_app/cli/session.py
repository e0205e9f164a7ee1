"""What every command shares: its settings, where it reports, and how errors become exit statuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer

from serve_app.cli.exit_codes import ExitCode
from serve_app.cli.progress import Reporter
from serve_app.cli.run_folder import RunFolder
from serve_app.cli.stopping import InstanceStopper, logs_folder
from serve_app.errors import InvalidRequest, PreflightFailed, ServeAppError
from serve_app.settings import LauncherSettings, process_environment


@dataclass(frozen=True)
class Session:
    """One run of one command.

    Attributes:
        settings: From the environment and the command's options.
        environ: The user's environment, as it was at the start.
        reporter: For progress and results.
        folder: The run folder in force.
    """

    settings: LauncherSettings
    environ: dict[str, str]
    reporter: Reporter
    folder: RunFolder

    @classmethod
    def open(cls, **options: object) -> Session:
        """A session for options that were given (`None`: not given); raises `InvalidRequest` for wrong values."""
        environ = process_environment()
        settings = LauncherSettings.from_environ(environ, **options)
        return cls(settings, environ, Reporter(), RunFolder.choose(settings.run_dir))

    def stopper(self) -> InstanceStopper:
        """What stops the instance in the run folder."""
        logs = logs_folder(Path.home(), self.environ.get("XDG_STATE_HOME"))
        return InstanceStopper(self.folder, reporter=self.reporter, logs=logs)


def run_command(command: Callable[[], ExitCode]) -> None:
    """Run a command's work; its errors become one line on stderr, its outcome the exit status."""
    try:
        status = command()
    except (PreflightFailed, InvalidRequest) as problem:
        typer.secho(str(problem), fg="red", bold=True, err=True)
        status = ExitCode.NOT_READY
    except ServeAppError as problem:
        typer.secho(str(problem), fg="red", bold=True, err=True)
        status = ExitCode.FAILED
    raise typer.Exit(int(status))
