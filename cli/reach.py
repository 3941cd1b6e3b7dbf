"""The gateway that a tool talks to: given by option, by a running `baton up`, or by OpenAI's variables."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from common.settings import ConfigError, Options

if TYPE_CHECKING:
    import httpx

    from services.runtime.running import Running

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The base URL, without a trailing slash or `/v1`, and its source."""

    url: str
    said: str
    api_key: str = ""
    certificate: str = ""  # its own certificate (PEM), if it is on this machine
    running: Running | None = None

    def __repr__(self) -> str:
        return f"Gateway(url={self.url!r}, said={self.said!r}, api_key={'***' if self.api_key else ''!r})"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def trusted(self) -> ssl.SSLContext | None:
        """Return the CA file for HTTPS of a `baton up` on this machine. None: the system's authorities."""
        if not self.certificate:
            return None
        # Exactly this certificate is trusted: it names the public address, which differs from ours.
        context = ssl.create_default_context(cafile=self.certificate)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False
        return context

    def client(self, *, timeout_s: float) -> httpx.Client:
        """An HTTP client for this gateway."""
        import httpx

        timeout = httpx.Timeout(timeout_s, connect=5)
        return httpx.Client(base_url=self.url, headers=self.headers, verify=self.trusted or True, timeout=timeout)

    def silent(self, error: object) -> str:
        """Return the message for a gateway that does not answer."""
        return f"no answer from {self.url} ({self.said}): {error}; is `baton up` running?"


class ClientOptions(Options):
    """Options that tell a tool its gateway."""

    url: str = Field(
        "",
        description=f"the gateway; empty: that of the `baton up` of this folder, then OPENAI_BASE_URL, then {DEFAULT_URL}",
    )
    api_key: str = Field("", description="key to send; empty: that of `baton up`, or OPENAI_API_KEY with its URL")
    data_dir: Path = Field(Path(".baton"), description="folder of the `baton up` to find")

    def gateway(self, *, admin: bool = False) -> Gateway:
        """The gateway to talk to; with `admin` with its admin key, if there is one. Raises ConfigError."""
        if self.url:
            return Gateway(url=plain(self.url), said="--url", api_key=self.api_key)
        from services.runtime.running import find_running

        found = find_running(self.data_dir)
        if found is not None:
            folder, running = found
            key = self.api_key or key_of(running, admin=admin)
            return Gateway(
                url=running.url,
                said=f"`baton up` in {folder}",
                api_key=key,
                certificate=running.certificate,
                running=running,
            )
        if url := os.environ.get("OPENAI_BASE_URL", ""):
            # The key is sent to no other server, where it may be worth money.
            key = self.api_key or os.environ.get("OPENAI_API_KEY", "")
            return Gateway(url=plain(url, "OPENAI_BASE_URL"), said="OPENAI_BASE_URL", api_key=key)
        return Gateway(url=DEFAULT_URL, said="the default", api_key=self.api_key)


def plain(url: str, name: str = "--url") -> str:
    """The URL without a trailing slash or `/v1`. Raises ConfigError."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{name} {url}: an address begins with http:// or https://, like {DEFAULT_URL}")
    return url.rstrip("/").removesuffix("/v1")


def key_of(running: Running, *, admin: bool = False) -> str:
    """The key of a `baton up`, if it has a readable one. Raises ConfigError."""
    name = (running.admin_key_file if admin else "") or running.api_key_file
    try:
        return Path(name).read_text(encoding="utf-8").strip() if name else ""
    except OSError as error:
        raise ConfigError(f"key of `baton up`, {name}: {error.strerror}") from None
