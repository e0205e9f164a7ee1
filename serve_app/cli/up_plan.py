"""All that `serve-app up` decides before it starts anything: addresses, switches, environment and command line."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from serve_app.auth.gate import LAUNCHER_KEY
from serve_app.auth.keys_file import hash_of, new_key
from serve_app.cli.deployments_file import DeploymentsFile
from serve_app.cli.host_checks import PortUse, check_all, check_object_store, ports_to_use
from serve_app.cli.ray_head import free_port, head_command, head_environment
from serve_app.cli.run_folder import InstanceState, RunFolder
from serve_app.cli.serve_env import find_serve_env, load_serve_env
from serve_app.settings import LauncherSettings


@dataclass(frozen=True)
class UpPlan:
    """What will be started.

    Attributes:
        settings: Of the launcher.
        file: What is deployed.
        folder: Where the instance lives.
        home: Folder of the file; relative paths and import paths start there.
        environment: Of `ray start`.
        command: Its command line.
        ports: Every fixed port.
        state: For later commands.
        wait_for_models: Whether all is ready only when every model is; else when every application runs.
    """

    settings: LauncherSettings
    file: DeploymentsFile
    folder: RunFolder
    home: Path
    environment: Mapping[str, str]
    command: list[str]
    ports: tuple[PortUse, ...]
    state: InstanceState
    wait_for_models: bool

    @classmethod
    def make(
        cls, path: Path, settings: LauncherSettings, *, environ: Mapping[str, str], wait_for_models: bool = True
    ) -> UpPlan:
        """Decide, without starting or checking anything but the file.

        Args:
            path: `deployments.yaml`.
            settings: Of the launcher.
            environ: The user's environment.
            wait_for_models: See the attribute.

        Raises:
            PreflightFailed: The file, or the file of switches, is not what it must be.
        """
        file = DeploymentsFile.read(path, settings)
        folder = RunFolder.choose(settings.run_dir)
        home = Path(environ.get("SERVE_APP_HOME") or file.path.parent)
        switches = load_serve_env(find_serve_env(home), {**environ, "PWD": str(home)})
        instance = folder.marker_prefix + secrets.token_hex(4)
        environment = head_environment(
            environ, switches, folder=folder, instance=instance, home=home, metrics_port=free_port()
        )
        key = new_key()
        environment[LAUNCHER_KEY] = hash_of(key)
        ports = tuple(ports_to_use(file, settings, environment))
        own = psutil.Process(os.getpid())
        state = InstanceState(
            instance=instance,
            launcher_pid=own.pid,
            launcher_started=own.create_time(),
            deployments=str(file.path),
            host=file.connect_host,
            http_port=file.http_port,
            grpc_port=file.grpc_port,
            dashboard_port=settings.dashboard_port,
            ports=tuple(use.port for use in ports),
            key=key,
            routes=file.routes,
        )
        command = head_command(settings, folder, agent_port=free_port())
        return cls(settings, file, folder, home, environment, command, ports, state, wait_for_models=wait_for_models)

    def check(self) -> None:
        """Check the machine; see `host_checks`.

        Raises:
            PreflightFailed: The first check that failed.
        """
        check_object_store(self.settings)
        check_all(self.file, list(self.ports), folder=self.folder, environ=self.environment)
