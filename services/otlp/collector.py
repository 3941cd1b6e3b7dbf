"""The connection to a collector: OTLP over HTTP, kept open, set up further by OpenTelemetry's own variables."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import os
import ssl
from urllib.parse import unquote, urlsplit

TIMEOUT_S = 3.0
_AGAIN = (408, 429, 502, 503, 504)  # OTLP: the same may be sent again


class CollectorError(Exception):
    """The collector did not take a request; `again`: it may take it later."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


class Collector:
    """Sends one request after another."""

    def __init__(self, endpoint: str) -> None:
        url = urlsplit(endpoint.rstrip("/"))
        self._path = url.path if url.path.endswith("/v1/traces") else f"{url.path}/v1/traces"
        host, port = url.hostname or "", url.port
        self._headers = {"content-type": "application/x-protobuf", "user-agent": "baton"} | _pairs(_variable("HEADERS"))
        self._zips = _variable("COMPRESSION").lower() == "gzip"
        if self._zips:
            self._headers["content-encoding"] = "gzip"
        self._connection: http.client.HTTPConnection
        if url.scheme == "https":
            context = ssl.create_default_context(cafile=_variable("CERTIFICATE") or None)
            if certificate := _variable("CLIENT_CERTIFICATE"):
                context.load_cert_chain(certificate, _variable("CLIENT_KEY") or None)
            self._connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
        else:
            self._connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)

    def send(self, body: bytes) -> None:
        """Send one request. Raises CollectorError."""
        body = gzip.compress(body, 1) if self._zips else body
        for attempt in (1, 2):
            kept = self._connection.sock is not None
            try:
                status = self._post(body)
                break
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if (
                    not kept or attempt == 2
                ):  # a kept connection may have been closed meanwhile: once more with a new one
                    raise CollectorError(f"{type(error).__name__}: {error}"[:200], again=True) from error
        if status >= 300:
            raise CollectorError(f"HTTP {status}", again=status in _AGAIN)

    def _post(self, body: bytes) -> int:
        self._connection.request("POST", self._path, body, self._headers)
        answer = self._connection.getresponse()
        answer.read()
        return answer.status

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._connection.close()


def resource_attributes() -> dict[str, str]:
    """What `OTEL_RESOURCE_ATTRIBUTES` says of this process."""
    return _pairs(os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))


def _variable(name: str) -> str:
    general = os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}", general)


def _pairs(text: str) -> dict[str, str]:
    """`name=value,…`, percent-encoded."""
    entries = [entry.partition("=") for entry in text.split(",") if "=" in entry]
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in entries}
