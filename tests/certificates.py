"""Certificates for tests, made with the `openssl` command: an authority, a server on loopback, a client."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from common.tls import Tls
from tests.needs import missing


@dataclass(frozen=True)
class Certificates:
    """PEM files of one authority and of what it signed."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path

    @property
    def of_client(self) -> Tls:
        return Tls(ca=self.ca, cert=self.client, key=self.client_key)


def make_certificates(folder: Path) -> Certificates:
    """Make them; without `openssl` skip the test, but fail in CI."""
    if not shutil.which("openssl"):
        missing("no openssl command")
    folder.mkdir(parents=True, exist_ok=True)
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
        *("-subj", "/CN=test authority", "-keyout", folder / "ca.key", "-out", folder / "ca.pem"),
    )
    for name in ("server", "client"):
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.csr"),
        )
        names = folder / f"{name}.ext"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        _openssl(
            *("x509", "-req", "-in", folder / f"{name}.csr", "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key"),
            *("-days", "2", "-extfile", names, "-out", folder / f"{name}.pem"),
        )
    return Certificates(
        ca=folder / "ca.pem",
        server=folder / "server.pem",
        server_key=folder / "server.key",
        client=folder / "client.pem",
        client_key=folder / "client.key",
    )


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)
