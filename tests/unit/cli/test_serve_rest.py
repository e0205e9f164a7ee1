"""What Ray Serve says of its applications, reduced to what a wait must know."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from serve_app.cli.serve_rest import ApplicationPhase, ServeRest, application_statuses, last_line
from serve_app.errors import ServerStartFailed, Unavailable


class FakeDashboard(ThreadingHTTPServer):
    """Answers every call with one status and body, and remembers the calls."""

    def __init__(self) -> None:
        self.answer: tuple[int, bytes] = (200, b"")
        self.calls: list[tuple[str, str, Any]] = []
        super().__init__(("127.0.0.1", 0), FakeHandler)


class FakeHandler(BaseHTTPRequestHandler):
    def answer(self) -> None:
        assert isinstance(self.server, FakeDashboard)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.calls.append((self.command, self.path, json.loads(body) if body else None))
        status, content = self.server.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_DELETE = answer  # noqa: N815 - names that http.server looks for

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def dashboard() -> Iterator[FakeDashboard]:
    with FakeDashboard() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_statuses_carry_the_last_line_of_trouble() -> None:
    """An application that waits or failed says why in one line, be it its own message or a deployment's."""
    details = {
        "applications": {
            "a": {
                "status": "RUNNING",
                "deployments": {"D": {"replicas": [{"state": "RUNNING"}, {"state": "STARTING"}]}},
            },
            "b": {"status": "DEPLOY_FAILED", "message": "Traceback:\n  File x\nValueError: no\n"},
            "d": {
                "status": "DEPLOY_FAILED",
                "message": "Failed to update the deployments ['D'].",
                "deployments": {
                    "D": {"status": "DEPLOY_FAILED", "message": "Traceback:\nOSError: no weights", "replicas": []}
                },
            },
            "c": {"status": "DEPLOYING", "deployments": {"D": {"message": "waiting for CPUs", "replicas": []}}},
        }
    }
    a, b, c, d = sorted(application_statuses(details), key=lambda app: app.name)
    assert (a.phase, a.message, a.replicas) == (ApplicationPhase.RUNNING, "", {"D": 1})
    assert (b.phase, b.message) == (ApplicationPhase.FAILED, "ValueError: no")
    assert (c.phase, c.message) == (ApplicationPhase.STARTING, "waiting for CPUs")
    assert (d.phase, d.message) == (ApplicationPhase.FAILED, "OSError: no weights")


def test_a_refused_setting_is_named() -> None:
    """Pydantic's error ends with a link and Ray may cut it; told are the key and what is wrong with it."""
    error = (
        "Traceback:\npydantic_core._pydantic_core.ValidationError: 1 validation error for ModelServerConfig\n"
        "models.digits.batching.rowz\n  Extra inputs are not permitted [type=extra_forbidden, input_value=16]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v"
    )
    assert last_line(error) == "models.digits.batching.rowz: Extra inputs are not permitted"


def test_deploy_sends_the_file_as_serve_deploy_does(dashboard: FakeDashboard) -> None:
    """One PUT with the whole configuration, on the public address."""
    ServeRest(dashboard.server_port).deploy({"applications": []}, timeout_s=5)
    assert dashboard.calls == [("PUT", "/api/serve/applications/", {"applications": []})]


def test_a_refusal_is_an_error_and_an_absent_api_is_waited_for(dashboard: FakeDashboard) -> None:
    """Only what may pass by itself is worth another try."""
    rest = ServeRest(dashboard.server_port)
    dashboard.answer = (400, b"Traceback\nValueError: bad import path")
    with pytest.raises(ServerStartFailed, match="Ray Serve did not start: ValueError: bad import path"):
        rest.deploy({}, timeout_s=5)
    dashboard.answer = (503, b"")
    with pytest.raises(Unavailable):
        rest.deploy({}, timeout_s=5)
    with pytest.raises(Unavailable):
        rest.applications()
    assert not rest.shut_down(timeout_s=5)


def test_nobody_listening_is_unavailable(unused_tcp_port: int) -> None:
    """A dashboard that is gone is no crash of the one who asks."""
    rest = ServeRest(unused_tcp_port)
    with pytest.raises(Unavailable):
        rest.applications(timeout_s=1)
    assert not rest.shut_down(timeout_s=1)


def test_a_last_line_is_short() -> None:
    """Messages from elsewhere never flood the terminal."""
    assert last_line("") == ""
    assert last_line("a\n  b  \n\n") == "b"
    assert len(last_line("x" * 1000)) == 300
