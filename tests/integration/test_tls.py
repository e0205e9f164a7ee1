"""TLS and mutual TLS to a real tritonserver, and what becomes of certificates that change."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from serve_app.endpoint import Endpoint
from serve_app.errors import EndpointUnavailable, PreflightFailed
from serve_app.fleet.command import Listen, server_command
from serve_app.fleet.process import free_ports
from serve_app.fleet.runtime import TritonRuntime
from serve_app.protocol.arrays import request_of_arrays
from serve_app.settings import ChannelSettings, TlsSettings, TritonServerArgs
from serve_app.triton.pool import ChannelPool
from serve_app.triton.router import Router
from tests.support.certificates import Authority
from tests.support.triton_server import write_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

NAME = "triton.test"


@contextlib.asynccontextmanager
async def tls_triton(folder: Path, *arguments: str) -> AsyncIterator[str]:
    """A tritonserver with these arguments, as somebody else runs it; gives its address once it listens."""
    runtime = TritonRuntime.find(None, environ=os.environ)
    repository = folder / "models"
    write_model(repository, "identity")
    grpc_port, metrics_port = free_ports("127.0.0.1", 2)
    listen = Listen("127.0.0.1", grpc_port, "", metrics_port)
    command = server_command(
        TritonServerArgs(extra_arguments=list(arguments)),
        tritonserver=runtime.tritonserver,
        backend_directory=runtime.backend_directory,
        cache_directory=None,
        repository=repository,
        models=["identity"],
        can_disable_auto_complete=True,
        listen=listen,
        server_id="tls",
        shm_prefix=f"tls_{grpc_port}_",
    )
    log = folder / "triton.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220  # returns at once
            command, env=runtime.environment(os.environ), stdout=output, stderr=output
        )
    try:
        await wait_until(
            lambda: "Started GRPCInferenceService" in log.read_text(), timeout_s=60, what=lambda: log.read_text()[-500:]
        )
        yield listen.target
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 20)
        finally:
            process.kill()


def channels(**tls: str | float) -> ChannelSettings:
    return ChannelSettings(num_channels=2, connect_timeout_s=10.0, tls=TlsSettings.model_validate(tls))


async def echo(target: Router | ChannelPool, value: float) -> float:
    request = request_of_arrays("identity", {"INPUT0": np.array([[value]], np.float32)})
    answer = await target.infer(request, timeout_s=20.0)
    return float(answer.outputs[0].to_numpy()[0, 0])


async def refusal(address: str, settings: ChannelSettings) -> str:
    """What a pool with these settings says of the server."""
    pool = ChannelPool(Endpoint.static(address), settings)
    try:
        with pytest.raises(EndpointUnavailable) as raised:
            await pool.warm_up(timeout_s=5.0)
    finally:
        await pool.aclose(grace_s=0.0)
    return str(raised.value)


async def test_a_server_is_believed_for_its_certificate(tmp_path: Path) -> None:
    """Encrypted calls to the name it has; none to another name, by another authority, or in the clear."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    pair = authority.sign(NAME)
    arguments = ["--grpc-use-ssl=true", f"--grpc-server-cert={pair.certificate}", f"--grpc-server-key={pair.key}"]
    roots = str(authority.certificate)
    async with tls_triton(tmp_path, *arguments) as address:
        settings = channels(root_certificates=roots, server_name=NAME)
        async with ChannelPool(Endpoint.static(address), settings) as pool:
            assert await echo(pool, 7.0) == 7.0
        for wrong in (
            channels(root_certificates=roots),
            channels(root_certificates=roots, server_name="other.test"),
            channels(root_certificates=str(stranger.certificate), server_name=NAME),
            channels(server_name=NAME),
            ChannelSettings(num_channels=1),
        ):
            text = await refusal(address, wrong)
            assert "BEGIN" not in text
            assert "\n" not in text


async def test_both_sides_show_a_certificate_and_a_new_one_is_taken_up(tmp_path: Path) -> None:
    """Mutual TLS; files that change, or become wrong for a while, cost no request."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    pair, client = authority.sign(NAME), authority.sign("front.test")
    arguments = [
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={pair.certificate}",
        f"--grpc-server-key={pair.key}",
        f"--grpc-root-cert={authority.certificate}",
    ]
    common: dict[str, str | float] = {"root_certificates": str(authority.certificate), "server_name": NAME}
    async with tls_triton(tmp_path, *arguments) as address:
        await refusal(address, channels(**common))
        other = stranger.sign("intruder.test")
        await refusal(address, channels(**common, client_certificate=str(other.certificate), client_key=str(other.key)))
        mutual = channels(
            **common, client_certificate=str(client.certificate), client_key=str(client.key), reload_interval_s=0.05
        )
        async with Router(mutual) as router:
            router.update([Endpoint.static(address)])
            (member,) = router._membership.members
            assert await echo(router, 1.0) == 1.0
            before = list(member.pool._assignment.channels)
            client.certificate.write_text("not a certificate")
            files = router._membership._files
            assert files is not None
            await wait_until(lambda: "stale" in repr(files), timeout_s=20, what=lambda: files)
            assert await echo(router, 2.0) == 2.0
            assert list(member.pool._assignment.channels) == before
            authority.sign("front.test")
            await wait_until(
                lambda: not set(member.pool._assignment.channels) & set(before), timeout_s=20, what=lambda: member.pool
            )
            assert await echo(router, 3.0) == 3.0
            assert "ok" in repr(files)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    """At the start, rather than as a connection that never comes up."""
    authority = Authority(tmp_path)
    one, two = authority.sign("one.test"), authority.sign("two.test")
    text = tmp_path / "text"
    text.write_text("nothing")
    for wrong, said in (
        ({"root_certificates": str(tmp_path / "no")}, "cannot be read"),
        ({"root_certificates": str(text)}, "holds no certificates"),
        ({"client_certificate": str(one.certificate), "client_key": str(two.key)}, "no certificate and its key"),
        ({"client_certificate": str(text), "client_key": str(two.key)}, "no certificate and its key"),
    ):
        with pytest.raises(PreflightFailed, match=said) as raised:
            Router(channels(**wrong))
        assert "PRIVATE" not in str(raised.value)
