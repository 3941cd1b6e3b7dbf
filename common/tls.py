"""Certificates for NATS and Redis."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from common.settings import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Trusted authorities and our own certificate; None: the system's authorities, no certificate."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


def client_context(tls: Tls) -> ssl.SSLContext:
    """Verify the server's name and certificate, TLS 1.2 at least. Raises ConfigError, naming the files."""
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(str(file) for file in (tls.ca, tls.cert, tls.key) if file)
        raise ConfigError(f"certificate files {files}: {error.strerror or error}") from None
    return context
