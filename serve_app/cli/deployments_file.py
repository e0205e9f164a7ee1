"""`deployments.yaml` as the launcher sees it: Ray Serve's schema, checked before anything starts, ports overridden."""

from __future__ import annotations

import copy
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from serve_app.errors import PreflightFailed
from serve_app.settings import LauncherSettings, ModelServerArgs, ModelServerConfig, TritonServerArgs

DEFAULT_HOST = "127.0.0.1"
DEFAULT_HTTP_PORT = 8000
DEFAULT_GRPC_PORT = 9000

TRITON_FLEET = "serve_app.deployments.apps:triton_fleet"
"""Import path of the app whose replicas start tritonservers on this machine."""

MODEL_SERVER = "serve_app.deployments.apps:model_server"
"""Import path of the app that answers requests."""


@dataclass(frozen=True)
class DeploymentsFile:
    """One file, with the addresses that will be in force.

    Attributes:
        path: Absolute path of the file that was read.
        config: What goes to Ray Serve: the file's content with host and ports overridden.
        host: Address HTTP listens on.
        http_port: HTTP port.
        grpc_port: gRPC port; `None` where the file registers no gRPC service.
        applications: Names of the applications, in the file's order.
        routed: Names of those that answer HTTP and gRPC.
        routes: Where those of them that serve models answer HTTP: route prefixes without a slash at the end.
    """

    path: Path
    config: dict[str, Any] = field(repr=False)
    host: str
    http_port: int
    grpc_port: int | None
    applications: tuple[str, ...]
    routed: tuple[str, ...]
    routes: tuple[str, ...]

    @classmethod
    def read(cls, path: Path, settings: LauncherSettings) -> DeploymentsFile:
        """Read and check a file.

        Raises:
            PreflightFailed: It is missing, no YAML, or not what Ray Serve takes.
        """
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise PreflightFailed(
                f"{path} does not exist.", "run `serve-app up` in the folder that has it, or name the file."
            ) from None
        except (OSError, UnicodeDecodeError) as problem:
            raise PreflightFailed(f"{path} cannot be read ({problem}).", "name a readable YAML file.") from None
        except yaml.YAMLError as problem:
            raise PreflightFailed(f"{path} is not YAML: {_one_line(problem)}.", "correct that line.") from None
        config = cls._overridden(path, content, settings)
        _validate(path, config)
        _validate_model_servers(path, config)
        grpc = config["grpc_options"]
        applications = config.get("applications") or []
        return cls(
            path=path.resolve(),
            config=config,
            host=config["http_options"]["host"],
            http_port=config["http_options"]["port"],
            grpc_port=grpc["port"] if grpc.get("grpc_servicer_functions") else None,
            applications=tuple(app.get("name", "default") for app in applications),
            routed=tuple(app.get("name", "default") for app in applications if _route_of(app) is not None),
            routes=_routes(applications),
        )

    @staticmethod
    def _overridden(path: Path, content: object, settings: LauncherSettings) -> dict[str, Any]:
        """A copy with host and ports: from the settings, else the file's, else the defaults."""
        if not isinstance(content, dict):
            raise PreflightFailed(f"{path} holds no mapping.", "write Ray Serve's schema: `applications:` and so on.")
        config: dict[str, Any] = copy.deepcopy(content)
        for section in ("http_options", "grpc_options"):
            if not isinstance(config.setdefault(section, {}) or {}, dict):
                raise PreflightFailed(f"{path}: {section} holds no mapping.", "write `host:`, `port:` below it.")
            config[section] = config[section] or {}
        http, grpc = config["http_options"], config["grpc_options"]
        http["host"] = settings.host or http.get("host") or DEFAULT_HOST
        http["port"] = settings.http_port or http.get("port") or DEFAULT_HTTP_PORT
        grpc["port"] = settings.grpc_port or grpc.get("port") or DEFAULT_GRPC_PORT
        return config

    def fleet_args(self) -> list[TritonServerArgs]:
        """The arguments of every application that starts tritonservers.

        Raises:
            PreflightFailed: Arguments that the fleet would refuse.
        """
        found = []
        for app in self.config["applications"]:
            if app.get("import_path") == TRITON_FLEET:
                try:
                    found.append(TritonServerArgs.model_validate(app.get("args") or {}))
                except ValidationError as problem:
                    raise _invalid(self.path, problem, f"applications.{app.get('name')}.args") from None
        return found

    def model_server_args(self) -> list[tuple[str, ModelServerArgs]]:
        """Name and arguments of every application that answers requests; they were checked when the file was read."""
        return [
            (app.get("name", "default"), ModelServerArgs.model_validate(app.get("args") or {}))
            for app in self.config["applications"]
            if app.get("import_path") == MODEL_SERVER
        ]

    @property
    def is_exposed(self) -> bool:
        """Whether other machines may reach HTTP."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True

    @property
    def connect_host(self) -> str:
        """Where a client on this machine reaches HTTP."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared, not bound


def _route_of(app: dict[str, Any]) -> str | None:
    """Its route prefix without a slash at the end; `None` for one that is reached by handle alone."""
    prefix: str | None = app.get("route_prefix", "/")
    return None if prefix is None else prefix.rstrip("/")


def _routes(applications: list[dict[str, Any]]) -> tuple[str, ...]:
    routed = [(app.get("import_path"), route) for app in applications if (route := _route_of(app)) is not None]
    ours = tuple(route for import_path, route in routed if import_path == MODEL_SERVER)
    return ours or (("",) if routed else ())


def _validate(path: Path, config: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema  # Two seconds of imports, which `--help` need not wait for.

    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as problem:
        raise _invalid(path, problem) from None
    except (TypeError, ValueError) as problem:
        raise PreflightFailed(f"{path}: {_one_line(problem)}.", "correct it; the schema is Ray Serve's own.") from None
    if not config.get("applications"):
        raise PreflightFailed(f"{path} has no applications.", "list at least one under `applications:`.")


def _validate_model_servers(path: Path, config: dict[str, Any]) -> None:
    """Refuse settings that a ModelServer would refuse, which Ray Serve would tell only after three attempts."""
    for app in config["applications"]:
        if app.get("import_path") != MODEL_SERVER:
            continue
        place = f"applications.{app.get('name', 'default')}"
        try:
            ModelServerArgs.model_validate(app.get("args") or {})
        except ValidationError as problem:
            raise _invalid(path, problem, f"{place}.args") from None
        for deployment in app.get("deployments") or []:
            try:
                ModelServerConfig.model_validate(deployment.get("user_config") or {})
            except ValidationError as problem:
                raise _invalid(path, problem, f"{place}.deployments.{deployment['name']}.user_config") from None


def _invalid(path: Path, problem: ValidationError, prefix: str = "") -> PreflightFailed:
    first = problem.errors()[0]
    where = ".".join(str(part) for part in (*([prefix] if prefix else []), *first["loc"])) or "the file"
    said = "unknown key" if first["type"] == "extra_forbidden" else _one_line(first["msg"])
    more = f" (and {problem.error_count() - 1} more)" if problem.error_count() > 1 else ""
    return PreflightFailed(
        f"{path}: {where}: {said}{more}.",
        "correct it; the keys are described in serve_app/settings.py."
        if prefix
        else "correct it; the schema is Ray Serve's own.",
    )


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split()).rstrip(".")
