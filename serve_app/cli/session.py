"""What every command shares: its settings, where it reports, and how errors become exit statuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import typer
from pydantic import ValidationError

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
        settings = launcher_settings(environ, **options)
        return cls(settings, environ, Reporter(), RunFolder.choose(settings.run_dir))

    def stopper(self) -> InstanceStopper:
        """What stops the instance in the run folder."""
        logs = logs_folder(Path.home(), self.environ.get("XDG_STATE_HOME"))
        return InstanceStopper(self.folder, reporter=self.reporter, logs=logs)


def launcher_settings(environ: Mapping[str, str], **options: object) -> LauncherSettings:
    """Settings from `SERVE_APP_*` variables, below `options` that are not `None`.

    Raises:
        InvalidRequest: A value that is no valid one; names the variable or the option.
    """
    names = {name: f"SERVE_APP_{name.upper()}" for name in LauncherSettings.model_fields}
    values: dict[str, object] = {name: environ[key] for name, key in names.items() if environ.get(key)}
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return LauncherSettings.model_validate({**values, **given})
    except ValidationError as problem:
        first = problem.errors()[0]
        name = str(first["loc"][0])
        field = "--" + name.replace("_", "-") if name in given else names.get(name, name)
        raise InvalidRequest(field, repr(first["input"]), plain_words(first["msg"])) from None


def plain_words(message: str) -> str:
    """A validation message that reads on after "expected ..."."""
    return message.removeprefix("Input should be ")


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
