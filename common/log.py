"""Log lines: an event name and fields, for people (`text`) or machines (`json`), on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from importlib.metadata import version

from common.tracing import trace_id

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime", "taskName"}


def start_logging(*, service: str, level: str, form: str) -> None:
    """Set up the root logger of this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(service) if form == "json" else _Text(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("uvicorn.access", "httpx", "asyncio", "nats", "ucx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def difference(library: str, lacks: list[str], lost: str) -> dict[str, object]:
    """Fields of a warning: the private parts that `library` lacks, so that its own implementation runs."""
    told: dict[str, object] = {"library": library, "version": version(library), "lacks": lacks, "lost": lost}
    return told | {"remedy": "install the release that constraints.txt names"}


class Outage:
    """Logs once when a server goes away and once when it is back, however many tries there are in between."""

    def __init__(self, log: logging.Logger, server: str) -> None:
        self._log = log
        self._server = server
        self._since = 0.0
        self.tries = 0  # failed tries since the server went away

    def failed(self, error: str) -> None:
        """Record a failed try."""
        self.tries += 1
        if self.tries == 1:
            self._since = time.monotonic()
            self._log.warning(f"{self._server}.away", extra={"error": error})

    def ended(self) -> None:
        """Record a try that succeeded."""
        if self.tries:
            away_s = round(time.monotonic() - self._since, 1)
            self._log.info(f"{self._server}.back", extra={"tries": self.tries, "away_s": away_s})
            self.tries = 0


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
    return fields | {"trace_id": trace} if (trace := trace_id.get()) else fields


def printable(value: object) -> str:
    """Escape text for one log line: foreign text can neither break the line nor control a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value))


class _Text(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={printable(value)}" for name, value in _fields(record).items())
        line = f"{clock}.{int(record.msecs):03d} {record.levelname[0]} {self._service} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
        }
        line |= _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
