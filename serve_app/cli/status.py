"""The command `serve-app status`."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from serve_app.cli.exit_codes import ExitCode
from serve_app.cli.processes import find_marked
from serve_app.cli.readiness import look
from serve_app.cli.run_folder import RunFolder
from serve_app.cli.serve_rest import ServeRest
from serve_app.cli.session import Session, run_command
from serve_app.errors import Unavailable


class InstanceStatus(str, Enum):
    """What the run folder and its processes say."""

    RUNNING = "running"
    """`serve-app up` is alive; it may still be starting."""

    ORPHANED = "orphaned"
    """`serve-app up` was killed, and left processes: `serve-app down` ends them."""

    STOPPED = "stopped"


def status(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Show the instance of this user (or of SERVE_APP_RUN_DIR), its applications and addresses."""

    def work() -> ExitCode:
        session = Session.open()
        session.folder.check()
        report = collect(session.folder)
        if as_json:
            typer.echo(json.dumps(report, indent=2))
        else:
            _print(report)
        return ExitCode.NOT_RUNNING if report["status"] == InstanceStatus.STOPPED.value else ExitCode.OK

    run_command(work)


def collect(folder: RunFolder) -> dict[str, Any]:
    """What `--json` prints: `status`, and where there is an instance its addresses, applications and models."""
    state, processes = folder.read_state(), find_marked(folder.marker_prefix)
    if state is not None and state.is_launcher_alive:
        instance_status = InstanceStatus.RUNNING
    else:
        instance_status = InstanceStatus.ORPHANED if processes else InstanceStatus.STOPPED
    report: dict[str, Any] = {"status": instance_status.value, "run_dir": str(folder.path)}
    if state is None or instance_status is InstanceStatus.STOPPED:
        return report
    readiness = look(state.host, state.http_port, state.routes, key=state.key)
    report |= {
        "launcher_pid": state.launcher_pid,
        "num_processes": len(processes),
        "deployments": state.deployments,
        "http": f"http://{state.host}:{state.http_port}",
        "grpc": f"{state.host}:{state.grpc_port}" if state.grpc_port else None,
        "dashboard": f"http://127.0.0.1:{state.dashboard_port}",
        "logs": str(folder.logs),
        "readiness": {"state": readiness.state.value, "detail": readiness.detail, "models": list(readiness.models)},
    }
    try:
        applications = ServeRest(state.dashboard_port).applications()
        report["applications"] = [
            {"name": app.name, "status": app.status, "message": app.message, "replicas": dict(app.replicas)}
            for app in applications
        ]
    except Unavailable as problem:
        report["applications"], report["applications_error"] = [], str(problem)
    return report


def _print(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if "http" not in report:
        console.print(f"{report['status']} (run folder {report['run_dir']})", markup=False)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name in ("status", "launcher_pid", "num_processes", "deployments", "http", "grpc", "dashboard", "logs"):
        table.add_row(name.replace("_", " "), str(report[name] or "off"))
    readiness = report["readiness"]
    table.add_row("models", f"{readiness['state']} {readiness['detail']} {', '.join(readiness['models'])}")
    console.print(table)
    apps = Table("application", "status", "replicas", "message", box=None, padding=(0, 2, 0, 0))
    for app in report["applications"]:
        replicas = ", ".join(f"{name} {count}" for name, count in app["replicas"].items())
        apps.add_row(app["name"], app["status"], replicas, app["message"])
    console.print()
    console.print(apps if report["applications"] else report.get("applications_error", "no applications"))
