"""Questions of `baton up` to its gateways. Importing an HTTP client would take longer than asking them."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 2.0
MAX_BYTES = 1 << 20


async def reason_not_ready(url: str, wanted: Mapping[str, int]) -> str | None:
    """Return why a request could not be served yet by so many workers of each role; None if it could."""
    try:
        status, answer = await asyncio.wait_for(_get(url, "/ready"), PATIENCE_S)
    except (OSError, ValueError, EOFError):  # includes timeouts
        return "the gateway starts"
    if status != 200:
        refused = "".join(f"; {worker}: {why}" for worker, why in answer.get("refused", {}).items())
        return f"{answer.get('reason')}{refused}"
    workers = answer["workers"]
    if all(workers.get(role, 0) >= count for role, count in wanted.items()):
        return None
    counts = [f"{workers.get(role, 0)} of {count} {role}" for role, count in wanted.items() if count]
    return f"{' and '.join(counts)} workers are ready"


async def answers(url: str) -> bool | None:
    """True if the gateway answers; False if it refuses connections, None if it times out."""
    try:
        await asyncio.wait_for(_get(url, "/health"), PATIENCE_S)
    except TimeoutError:
        return None
    except (OSError, ValueError, EOFError) as error:
        return isinstance(error, ValueError)  # any reply proves that it is alive
    return True


async def models_of(url: str, key: str) -> list[dict[str, Any]]:
    """Entries of `/v1/models`; none if it does not answer, or the key is unknown here."""
    try:
        status, answer = await asyncio.wait_for(_get(url, "/v1/models", key), PATIENCE_S)
    except (OSError, ValueError, EOFError):
        return []
    return list(answer["data"]) if status == 200 else []


async def _get(url: str, path: str, key: str = "") -> tuple[int, dict[str, Any]]:
    """Return status and body. Raises OSError, ValueError or EOFError without an answer."""
    parts = urlsplit(url)
    tls = _unverified() if parts.scheme == "https" else None
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls, limit=MAX_BYTES)
    try:
        credentials = f"Authorization: Bearer {key}\r\n" if key else ""
        head = f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{credentials}Connection: close\r\n\r\n"
        writer.write(head.encode())
        answered = await reader.readuntil(b"\r\n\r\n")
        body: dict[str, Any] = json.loads(await reader.read())
        return int(answered.split(maxsplit=2)[1]), body
    finally:
        writer.close()


def _unverified() -> ssl.SSLContext:
    """A TLS context without verification: the gateway is our child, and its certificate names the public address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
