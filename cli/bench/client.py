"""A client that takes timings: streamed answers over plain HTTP/1.1, one keep-alive connection a request in flight.

As in `vllm bench serve`: TTFT from sending the request to the first chunk with a choice, ITL between such chunks,
TPOT = (last - first) / (tokens - 1). Instants are `time.monotonic()`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from cli.said import message_of

ERRORS = (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
LINE_LIMIT = 1 << 20  # bytes of one line of an answer
MAX_REASON = 1 << 16  # bytes of a refusal's body


@dataclass(slots=True)
class Sample:
    """One request as its client saw it, in seconds. `error` is "" for a complete answer."""

    arrived: float  # just before its first byte was written
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    ended: float = 0.0
    error: str = ""
    answer: str = ""  # the answer's id

    @property
    def first_at(self) -> float:
        """Arrival of the first chunk with a choice."""
        return self.arrived + self.ttft

    @property
    def tpot(self) -> float:
        return (self.ended - self.arrived - self.ttft) / max(1, self.tokens - 1)

    @property
    def e2e(self) -> float:
        return self.ended - self.arrived


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of requests."""

    host: str
    port: int
    path: str = "/v1/completions"
    tls: bool = False
    api_key: str = ""
    trusted: ssl.SSLContext | None = None  # instead of the system's authorities

    @classmethod
    def of(cls, url: str, path: str, api_key: str = "", trusted: ssl.SSLContext | None = None) -> Target:
        """Parse `http[s]://host[:port][/prefix]`. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// address")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), prefix + path, tls, api_key, trusted)


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target) -> None:
        self._reader, self._writer, self._target = reader, writer, target

    @classmethod
    async def open(cls, target: Target) -> Connection:
        tls = (target.trusted or ssl.create_default_context()) if target.tls else None
        reader, writer = await asyncio.open_connection(target.host, target.port, limit=LINE_LIMIT, ssl=tls)
        return cls(reader, writer, target)

    def close(self) -> None:
        self._writer.close()

    async def complete(self, body: bytes, sample: Sample) -> None:
        """Send one request and record the arrival of its chunks. Raises ValueError unless the answer is a complete stream."""
        sample.arrived = sample.ended = time.monotonic()
        self._writer.write(self._head(len(body)) + body)
        status, headers = await self._answer_head()
        if status != 200:
            raise ValueError(f"HTTP {status}{await self._reason(headers)}")
        done = False
        pending = b""
        async for chunk, now in self._chunks(headers):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data:"):
                    _take(sample, json.loads(line[5:]), now)
        if not done:
            raise ValueError("the stream ended early")

    def _head(self, length: int) -> bytes:
        key = f"authorization: Bearer {self._target.api_key}\r\n" if self._target.api_key else ""
        return (
            f"POST {self._target.path} HTTP/1.1\r\nhost: {self._target.host}:{self._target.port}\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        ).encode()

    async def _answer_head(self) -> tuple[int, dict[str, str]]:
        words = (await self._reader.readline()).split()
        if len(words) < 2:
            raise ValueError("the connection was closed without an answer")
        headers: dict[str, str] = {}
        while line := (await self._reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip().lower()
        return int(words[1]), headers

    async def _reason(self, headers: dict[str, str]) -> str:
        """Return the reason in an error body, after a colon; "" for an empty one."""
        try:
            if headers.get("transfer-encoding") == "chunked":
                body = b"".join([chunk async for chunk, _ in self._chunks(headers)])
            else:
                body = await self._reader.readexactly(min(int(headers.get("content-length", "0")), MAX_REASON))
        except ERRORS:
            return ""
        said = message_of(body)
        return f": {said}" if said else ""

    async def _chunks(self, headers: dict[str, str]) -> AsyncIterator[tuple[bytes, float]]:
        """Pieces of the body, each with its time of arrival."""
        if headers.get("transfer-encoding") != "chunked":
            raise ValueError("the answer is not streamed in chunks")
        while size := int((await self._reader.readline()).split(b";")[0].strip() or b"0", 16):
            chunk = await self._reader.readexactly(size + 2)
            yield chunk[:-2], time.monotonic()
        await self._reader.readline()


def _take(sample: Sample, event: dict[str, Any], now: float) -> None:
    """Add one event of the stream to `sample`. Raises ValueError for an error event."""
    if event.get("error"):
        raise ValueError(f"stream: {message_of(json.dumps(event).encode())}")
    if usage := event.get("usage"):
        sample.tokens = usage["completion_tokens"]
        sample.prompt_tokens = usage.get("prompt_tokens", 0)
    if not event.get("choices") or _only_role(event["choices"][0]):
        return
    if not sample.ttft:
        sample.ttft, sample.answer = now - sample.arrived, str(event.get("id", ""))
    else:
        sample.gaps.append(now - sample.ended)
    sample.ended = now


def _only_role(choice: dict[str, Any]) -> bool:
    """True if this is a chat's opening chunk, sent before any token."""
    delta = choice.get("delta")
    return delta is not None and "role" in delta and not delta.get("content") and not choice.get("finish_reason")


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolate linearly between the closest ranks; `share` in [0, 1]."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
