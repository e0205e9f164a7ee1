"""Assembles `serve-app` from its commands; each is a module of its own beside this one."""

from __future__ import annotations

import typer

from serve_app.cli.down import down
from serve_app.cli.keys import keys_app
from serve_app.cli.status import status
from serve_app.cli.up import up

EPILOG = (
    "Exit statuses: 0 done, or stopped as asked; 1 failed after something was started (and was stopped again); "
    "2 wrong arguments or the machine is not ready, nothing was started; 3 no instance runs (status); "
    "130 killed by a second Ctrl-C."
)

app = typer.Typer(
    name="serve-app",
    help="Ray Serve in front of NVIDIA Triton.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command(epilog=EPILOG)(up)
app.command(epilog=EPILOG)(down)
app.command(epilog=EPILOG)(status)
app.add_typer(keys_app, name="keys")

if __name__ == "__main__":
    app()
