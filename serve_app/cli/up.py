"""The command `serve-app up`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.exit_codes import ExitCode
from serve_app.cli.launcher import Launcher
from serve_app.cli.processes import adopt_orphans, find_marked
from serve_app.cli.ray_head import raise_open_files_limit
from serve_app.cli.session import Session, run_command
from serve_app.cli.stop_signals import StopAsked, StopSignals, unless_stopped
from serve_app.cli.stopping import InstanceStopper, describe
from serve_app.cli.up_plan import UpPlan
from serve_app.errors import PreflightFailed

HostOption = Annotated[
    str | None, typer.Option(help="Address HTTP listens on, the file's if not given. (SERVE_APP_HOST)")
]
HttpPortOption = Annotated[int | None, typer.Option(help="HTTP port, the file's if not given. (SERVE_APP_HTTP_PORT)")]
GrpcPortOption = Annotated[int | None, typer.Option(help="gRPC port, the file's if not given. (SERVE_APP_GRPC_PORT)")]
DashboardPortOption = Annotated[
    int | None, typer.Option(help="Port of Ray's dashboard and REST API, 8265 if not given. (SERVE_APP_DASHBOARD_PORT)")
]
TimeoutOption = Annotated[
    float | None, typer.Option(help="Seconds until all must be ready, 300 if not given. (SERVE_APP_START_TIMEOUT_S)")
]
ModelsOption = Annotated[
    bool,
    typer.Option(
        "--wait-for-models/--no-wait-for-models",
        help="Start only with every model ready; without, with those that load.",
    ),
]


def up(
    deployments: Annotated[Path, typer.Argument(help="Ray Serve's file of applications.")] = Path("deployments.yaml"),
    host: HostOption = None,
    http_port: HttpPortOption = None,
    grpc_port: GrpcPortOption = None,
    dashboard_port: DashboardPortOption = None,
    start_timeout_s: TimeoutOption = None,
    wait_for_models: ModelsOption = True,
) -> None:
    """Serve a file of applications on a Ray of its own on this machine, until Ctrl-C.

    Checks the machine before it starts anything. Ctrl-C or SIGTERM stops everything in order; a second one kills it.
    """

    def work() -> ExitCode:
        session = Session.open(
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            dashboard_port=dashboard_port,
            start_timeout_s=start_timeout_s,
        )
        return asyncio.run(_up(session, deployments, wait_for_models=wait_for_models))

    run_command(work)


async def _up(session: Session, deployments: Path, *, wait_for_models: bool) -> ExitCode:
    folder, reporter = session.folder, session.reporter
    folder.check()
    with StopSignals() as signals, folder.locked() as is_ours:
        if not is_ours:
            raise _already_running(session)
        stopper = session.stopper()
        _remove_leftovers(session, stopper)
        try:
            with reporter.step("Checking the machine") as step:
                make = asyncio.to_thread(
                    UpPlan.make, deployments, session.settings, environ=session.environ, wait_for_models=wait_for_models
                )
                plan = await unless_stopped(make, signals)
                step.tick()
                await unless_stopped(asyncio.to_thread(plan.check), signals)
        except StopAsked:
            return ExitCode.OK
        adopt_orphans()
        raise_open_files_limit()
        return await Launcher(plan, reporter, stopper, signals).run()


def _already_running(session: Session) -> PreflightFailed:
    state, pid = session.folder.read_state(), session.folder.lock_holder()
    where = f" and serves {state.deployments} on http://{state.host}:{state.http_port}" if state else ""
    return PreflightFailed(
        f"Another `serve-app` (process {pid or 'unknown'}) runs in {session.folder.path}{where}.",
        "run `serve-app down` first; or give this one a folder (SERVE_APP_RUN_DIR=/tmp/other) and ports of its own.",
    )


def _remove_leftovers(session: Session, stopper: InstanceStopper) -> None:
    """Clear away what is left of an instance whose launcher was killed."""
    folder = session.folder
    left = find_marked(folder.marker_prefix)
    if left:
        session.reporter.say(f"Killing {len(left)} processes that an earlier run left: {describe(left[:5])} ...")
    if left or folder.path.exists():
        stopped = stopper.kill(head=None)
        if stopped.survivors:
            raise PreflightFailed(
                f"Processes of an earlier run cannot be killed: {describe(stopped.survivors)}.", "restart the machine."
            )
