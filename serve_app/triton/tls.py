"""Certificates for connections to Triton: read from files, checked, and read again when the files change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from serve_app.errors import PreflightFailed
from serve_app.settings import TlsSettings, home

logger = logging.getLogger(__name__)

_Signature = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Certificates:
    """The content of the files, PEM.

    Attributes:
        roots: Whom to believe; `None`: whom the machine believes.
        chain: This client's certificate; `None`: it shows none.
        key: Its private key.
    """

    roots: bytes | None = None
    chain: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    def credentials(self) -> grpc.ChannelCredentials:
        """What grpc takes."""
        return grpc.ssl_channel_credentials(self.roots, self.key, self.chain)


def read_certificates(settings: TlsSettings) -> Certificates:
    """Read the files, and check that they are certificates and that the key is the certificate's.

    Raises:
        PreflightFailed: A file cannot be read or is not what it must be; says which.
    """
    roots = _read(settings.root_certificates, "root_certificates")
    chain = _read(settings.client_certificate, "client_certificate")
    key = _read(settings.client_key, "client_key")
    try:
        ssl.create_default_context(cadata=None if roots is None else roots.decode())
    except (ssl.SSLError, ValueError):
        raise _wrong("root_certificates", f"{settings.root_certificates} holds no certificates in PEM form") from None
    if settings.client_certificate is not None and settings.client_key is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            # Without a password given it would ask the terminal for one.
            paths = path_of(settings.client_certificate), path_of(settings.client_key)
            context.load_cert_chain(*paths, password=lambda: "")
        except (ssl.SSLError, ValueError):
            what = f"{settings.client_certificate} and {settings.client_key} are no certificate and its key"
            raise _wrong("client_certificate", what) from None
    return Certificates(roots, chain, key)


def path_of(text: str) -> Path:
    """A file of the settings; links are followed anew each time, since a mounted secret is one that moves."""
    return home() / Path(text).expanduser()


def _read(path: str | None, name: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path_of(path).read_bytes()
    except OSError as problem:
        raise _wrong(name, f"{path} cannot be read ({problem.strerror})") from None


def _wrong(name: str, what: str) -> PreflightFailed:
    return PreflightFailed(f"channels.tls.{name}: {what}.", "name PEM files that this process can read.")


class CertificateFiles:
    """Certificates as they were when their files were last right.

    Args:
        settings: Which files.

    Raises:
        PreflightFailed: See `read_certificates`.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self._signature = self._look()
        self._problem = ""
        self.certificates = read_certificates(settings)

    def has_changed(self) -> bool:
        """Look at the files; read them again if they have changed. Wrong ones are logged, and the old ones stay."""
        try:
            signature = self._look()
            if signature == self._signature:
                return False
            certificates = read_certificates(self._settings)
        except (OSError, PreflightFailed) as problem:
            said = problem.problem if isinstance(problem, PreflightFailed) else "a file of channels.tls has gone."
            if said != self._problem:
                logger.error("%s The certificates in use stay.", said)
            self._problem = said
            return False
        is_new = certificates != self.certificates
        self._signature, self.certificates, self._problem = signature, certificates, ""
        return is_new

    def _look(self) -> _Signature:
        settings = self._settings
        paths = (settings.root_certificates, settings.client_certificate, settings.client_key)
        found = []
        for path in paths:
            if path is not None:
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(path_of(path))
                    found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)

    def __repr__(self) -> str:
        return f"<CertificateFiles [{'stale' if self._problem else 'ok'}]>"


class CertificateWatch:
    """Looks at the files from time to time, from `start` to `aclose`.

    Args:
        files: Borrowed.
        interval_s: Between two looks.
        on_change: Called in the loop when new certificates are in use.
    """

    def __init__(self, files: CertificateFiles, *, interval_s: float, on_change: Callable[[], None]) -> None:
        self._files = files
        self._interval_s = interval_s
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; needs a running event loop. Does nothing once it has begun."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._watch())

    async def aclose(self) -> None:
        """End. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if await asyncio.to_thread(self._files.has_changed):
                logger.info("the certificates for Triton have changed; new connections use the new ones")
                self._on_change()

    def __repr__(self) -> str:
        return f"<CertificateWatch of {self._files!r}>"
