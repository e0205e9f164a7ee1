"""Ray Serve's REST API on the dashboard, the one that `serve deploy` uses too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from serve_app.cli.http_call import call
from serve_app.errors import ServerStartFailed, Unavailable

PATH = "/api/serve/applications/"


class ApplicationPhase(str, Enum):
    """Where an application is on its way, from Ray Serve's more detailed statuses."""

    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"


@dataclass(frozen=True)
class ApplicationStatus:
    """One application.

    Attributes:
        name: Its name.
        status: Ray Serve's own word, such as `DEPLOYING`.
        message: Ray Serve's explanation in one line, often empty.
        replicas: Replicas that run, by deployment.
    """

    name: str
    status: str
    message: str
    replicas: Mapping[str, int]

    @property
    def phase(self) -> ApplicationPhase:
        """The status, reduced to what a wait for it must know."""
        if self.status == "RUNNING":
            return ApplicationPhase.RUNNING
        return ApplicationPhase.FAILED if self.status == "DEPLOY_FAILED" else ApplicationPhase.STARTING


def application_statuses(details: Mapping[str, Any]) -> list[ApplicationStatus]:
    """The applications in what `GET /api/serve/applications/` answers."""
    return [
        ApplicationStatus(
            name=name,
            status=str(app.get("status", "")),
            message=_reason(app),
            replicas={
                deployment: sum(replica.get("state") == "RUNNING" for replica in values.get("replicas", []))
                for deployment, values in app.get("deployments", {}).items()
            },
        )
        for name, app in details.get("applications", {}).items()
    ]


class ServeRest:
    """The API of one dashboard. Every call blocks.

    Args:
        port: The dashboard's port on 127.0.0.1.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    def __repr__(self) -> str:
        return f"<ServeRest {self.url}>"

    @property
    def url(self) -> str:
        """For `serve deploy --address`."""
        return f"http://127.0.0.1:{self._port}"

    def deploy(self, config: Mapping[str, Any], *, timeout_s: float) -> None:
        """Start Serve where it does not run, and make the applications what `config` says.

        Raises:
            Unavailable: The API does not answer (yet).
            ServerStartFailed: Ray Serve refuses the file.
        """
        answer = call("PUT", "127.0.0.1", self._port, PATH, timeout_s=timeout_s, body=config)
        if answer is None or answer.status in {404, 502, 503, 504}:
            raise Unavailable("Ray's REST API", f"no answer at {self.url}")
        if answer.status != 200:
            raise ServerStartFailed("Ray Serve", last_line(answer.body.decode(errors="replace")))

    def applications(self, *, timeout_s: float = 10.0) -> list[ApplicationStatus]:
        """The applications there are.

        Raises:
            Unavailable: The API does not answer.
        """
        answer = call("GET", "127.0.0.1", self._port, PATH, timeout_s=timeout_s)
        if answer is None or answer.status != 200 or not isinstance(answer.json, dict):
            raise Unavailable("Ray's REST API", f"no answer at {self.url}")
        return application_statuses(answer.json)

    def shut_down(self, *, timeout_s: float) -> bool:
        """Delete all applications and stop Serve; returns whether it was done within the time."""
        answer = call("DELETE", "127.0.0.1", self._port, PATH, timeout_s=timeout_s)
        return answer is not None and answer.status == 200


def last_line(text: str) -> str:
    """The last line of a message or traceback: what went wrong, in at most 300 characters.

    Pydantic ends with a link and says what was wrong in the lines above it, which are joined.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    heads = [number for number, line in enumerate(lines) if " validation error" in line]
    if heads:
        told = [line.partition(" [type=")[0] for line in lines[heads[-1] + 1 :] if "further information" not in line]
        return ": ".join(told[:2])[:300] or lines[heads[-1]][:300]
    return lines[-1][:300] if lines else ""


def _reason(app: Mapping[str, Any]) -> str:
    """Why an application does not run: the message of a deployment that failed, which has the cause.

    The application's own message then only names the deployments.
    """
    deployments = list(app.get("deployments", {}).values())
    failed = [str(d.get("message") or "") for d in deployments if d.get("status") in ("DEPLOY_FAILED", "UNHEALTHY")]
    others = [str(d.get("message") or "") for d in deployments] if app.get("status") != "RUNNING" else []
    return last_line(next((text for text in (*failed, str(app.get("message") or ""), *others) if text), ""))
