"""The commands `serve-app keys`: make a key, and check a file of keys."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from serve_app.auth.key_store import KeyStore
from serve_app.auth.keys_file import KeyEntry, entry_text, hash_of, new_key, parse_keys
from serve_app.auth.principal import ALL_MODELS
from serve_app.auth.scopes import Scope
from serve_app.cli.exit_codes import ExitCode
from serve_app.cli.session import plain_words, run_command
from serve_app.clock import MonotonicClock
from serve_app.errors import InvalidRequest, PreflightFailed

keys_app = typer.Typer(help="Make and check API keys.", no_args_is_help=True)

FileArgument = Annotated[Path, typer.Argument(help="The file that `auth.keys_file` names.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


@keys_app.command()
def new(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Name of the key, for logs and error texts.")],
    scope: Annotated[list[Scope] | None, typer.Option(help="What it is good for; may be given again.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Pattern of model names (`*`, `?`); again for more.")] = None,
    lane: Annotated[str | None, typer.Option(help="Lane in which its requests wait.")] = None,
    expires_in_days: Annotated[int | None, typer.Option(min=1, help="Refuse it after so many days.")] = None,
    file: Annotated[Path | None, typer.Option(help="Add its lines to this file, rather than print them.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key: print it, which happens only this once, and the lines for the file of keys."""

    def work() -> ExitCode:
        key = new_key()
        expires = None
        if expires_in_days is not None:
            expires = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(days=expires_in_days)
        try:
            entry = KeyEntry(
                id=key_id,
                sha256=hash_of(key),
                scopes=scope or [Scope.INFER],
                models=model or [ALL_MODELS],
                lane=lane,
                expires=expires,
            )
        except ValidationError as problem:
            first = problem.errors()[0]
            name = str(first["loc"][0])
            raise InvalidRequest(
                {"id": "ID", "models": "--model"}.get(name, f"--{name}"),
                repr(first["input"]),
                plain_words(first["msg"]),
            ) from None
        if file is not None:
            add_to(file, entry)
        if as_json:
            typer.echo(json.dumps({"key": key, "entry": entry.model_dump(mode="json", exclude_none=True)}, indent=2))
        else:
            typer.echo(key)
        if file is None and not as_json:
            typer.echo("# The key is above; it is not kept anywhere. For the file, below `keys:`", err=True)
            typer.echo(entry_text(entry), nl=False)
        return ExitCode.OK

    run_command(work)


def add_to(file: Path, entry: KeyEntry) -> None:
    """Add a key to a file, made for its owner alone when there is none; the file is replaced at one stroke.

    Raises:
        PreflightFailed: The file cannot be read or written, is wrong, has a key of that name, or is not written in
            the form to which lines can be added.
    """
    where = str(file)
    try:
        before = file.read_text(encoding="utf-8") if file.exists() else "keys:\n"
        known = parse_keys(before, where=where).keys if file.exists() and before.strip() != "keys:" else []
        first = re.search(r"^( *)- ", before, re.MULTILINE)
        text = before.rstrip() + "\n" + entry_text(entry, indent="  " if first is None else first[1])
        if parse_keys(text, where=f"{where} with the new key").keys != [*known, entry]:
            raise PreflightFailed(
                f"{where} is not in the form of YAML to which lines can be added.", "add them by hand."
            )
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as new:
            new.write(text)
        if file.exists():
            shutil.copymode(file, new.name)
        Path(new.name).replace(file)
    except OSError as problem:
        raise PreflightFailed(f"{where} cannot be changed ({problem.strerror}).", "name a file of yours.") from None


@keys_app.command()
def check(file: FileArgument, as_json: JsonOption = False) -> None:
    """Read a file as a replica would, and list what its keys are good for."""

    def work() -> ExitCode:
        KeyStore(path=file, where=str(file), clock=MonotonicClock())
        entries = parse_keys(file.read_text(encoding="utf-8"), where=str(file)).keys
        now = datetime.now(timezone.utc)
        if as_json:
            rows = [entry.model_dump(mode="json", exclude={"sha256"}) for entry in entries]
            typer.echo(json.dumps({"keys": rows}, indent=2))
            return ExitCode.OK
        table = Table("Key", "Scopes", "Models", "Lane", "Expires")
        for entry in entries:
            expires = "" if entry.expires is None else f"{entry.expires:%Y-%m-%d %H:%M %Z}"
            if entry.expires is not None and entry.expires <= now:
                expires += " (expired)"
            scopes = ", ".join(item.value for item in entry.scopes)
            table.add_row(entry.id, scopes, ", ".join(entry.models), entry.lane or "", expires)
        Console().print(table if entries else "No keys: nobody is let in.")
        return ExitCode.OK

    run_command(work)
