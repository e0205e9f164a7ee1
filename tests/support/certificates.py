"""Certificates made for a test by `openssl`: an authority, and what it signs."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KeyPair:
    """Files in PEM form."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates in a folder.

    Args:
        folder: For its files.
        name: Its own name, and its files'.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.certificate = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        self._openssl("req", "-x509", *self._new_key(self._key), "-subj", f"/CN={name}", "-out", str(self.certificate))

    def sign(self, name: str, *, file: str = "") -> KeyPair:
        """A certificate for a host name, in files called `file`, or like the host."""
        pair = KeyPair(self._folder / f"{file or name}.pem", self._folder / f"{file or name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        self._openssl("req", *self._new_key(pair.key), "-subj", f"/CN={name}", "-out", str(request))
        extensions.write_text(f"subjectAltName=DNS:{name}\n")
        signer = ["-CA", str(self.certificate), "-CAkey", str(self._key), "-CAcreateserial", "-days", "2"]
        new = pair.certificate.with_suffix(".new")
        self._openssl("x509", "-req", "-in", str(request), *signer, "-extfile", str(extensions), "-out", str(new))
        new.replace(pair.certificate)
        return pair

    @staticmethod
    def _new_key(path: Path) -> list[str]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(path)]

    @staticmethod
    def _openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
