"""A place that models are fetched from: its client's form, and reading a file over HTTP from some place on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Protocol

import httpx

from common.settings import ConfigError
from services.runtime.hub import Named
from services.runtime.models.choice import Listed
from services.runtime.models.hashed import Growing

LOOPBACK = ("127.0.0.1", "localhost")  # asked over plain HTTP
TIMEOUT_S = 30.0
BUSY = (408, 425, 429)
MAX_JSON = 16 << 20
_RANGE = re.compile(r"bytes (\d+)-")


class AgainError(Exception):
    """Another attempt may go on where this one ended."""


class MissingError(ConfigError):
    """The store has no such model."""


class RefusedError(ConfigError):
    """The store asks who reads, or knows the token no more. `challenge`: how it wants to be told, by the store itself."""

    def __init__(self, message: str, challenge: str) -> None:
        super().__init__(message)
        self.challenge = challenge


class StoreClient(Protocol):
    """Reads one revision of one repository."""

    commit: str  # 40 digits that name the content; set by `listed`

    @property
    def setting(self) -> str:
        """The variable that says where the store is."""
        ...

    @property
    def where(self) -> str:
        """The store's address, without secrets."""
        ...

    def listed(self) -> dict[str, Listed]:
        """The files by name, with sizes and hashes. Raises ConfigError, AgainError."""
        ...

    def go_on(self, file: Listed, growing: Growing, came: Callable[[int], None]) -> None:
        """Read a file from where `growing` ends. Raises ConfigError, AgainError."""
        ...


class Web:
    """Requests to one store. Errors are one line with a remedy; credentials go to its own host alone."""

    def __init__(self, named: Named, *, remedy: str) -> None:
        """`remedy`: for who is not let in."""
        self._named = named
        self._remedy = remedy
        self._client = httpx.Client(timeout=TIMEOUT_S, follow_redirects=True, max_redirects=5)

    def get(self, url: str, headers: Mapping[str, str]) -> httpx.Response:
        """A small answer, also a 401. Raises ConfigError, AgainError."""
        try:
            with self._client.stream("GET", url, headers=dict(headers)) as answer:
                if answer.status_code != 401:
                    self.check(answer)
                content = b""
                for piece in answer.iter_bytes():
                    content += piece
                    if len(content) > MAX_JSON:
                        raise ConfigError(
                            f"{self._named}: {answer.url.host} answers with more than {MAX_JSON >> 20} MiB"
                        )
                return httpx.Response(
                    answer.status_code, headers=answer.headers, content=content, request=answer.request
                )
        except httpx.TransportError as error:
            raise AgainError(f"{type(error).__name__}: {error}"[:200]) from None

    def go_on(self, url: str, headers: Mapping[str, str], growing: Growing, came: Callable[[int], None]) -> None:
        """Read from where `growing` ends. Raises ConfigError, RefusedError among them, AgainError, TooLongError."""
        wanted = {**headers, "accept-encoding": "identity"}
        if growing.length:
            wanted["range"] = f"bytes={growing.length}-"
        try:
            with self._client.stream("GET", url, headers=wanted) as answer:
                if answer.status_code != 416:
                    self.check(answer)
                begin = _RANGE.match(answer.headers.get("content-range", ""))
                if growing.length and not (answer.status_code == 206 and begin and int(begin[1]) == growing.length):
                    came(-growing.length)
                    growing.begin_again()
                    if answer.status_code != 200:
                        raise AgainError("it would not go on from there")
                for piece in answer.iter_bytes():
                    growing.write(piece)
                    came(len(piece))
        except httpx.TransportError as error:
            raise AgainError(f"{type(error).__name__}: {error}"[:200]) from None

    def check(self, answer: httpx.Response) -> None:
        """Raises ConfigError, AgainError."""
        status, host = answer.status_code, answer.url.host
        if status < 400:
            return
        if status >= 500 or status in BUSY:
            raise AgainError(f"{host} answers {status}")
        if status == 404:
            raise MissingError(f"{self._named}: {host} has no such model, or no such revision: check the name")
        if status == 401:
            challenge = "" if answer.history else answer.headers.get("www-authenticate", "")
            raise RefusedError(f"{self._named}: {host} refuses it ({status}): {self._remedy}", challenge)
        if status == 403:
            raise ConfigError(f"{self._named}: {host} refuses it ({status}): {self._remedy}")
        raise ConfigError(f"{self._named}: {host} answers {status}")
