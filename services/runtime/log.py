"""Log lines: an event name and fields, for people (`text`) or machines (`json`), on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time

from common.log import printable
from common.tracing import trace_id

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime", "taskName"}


def start_logging(*, service: str, level: str, form: str) -> None:
    """Set up the root logger of this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(service) if form == "json" else _Text(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("uvicorn.access", "httpx", "asyncio", "nats", "ucx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
    return fields | {"trace_id": trace} if (trace := trace_id.get()) else fields


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
