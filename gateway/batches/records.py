"""Files and batches as stored, the statuses of a batch, and OpenAI's form of both. No I/O."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from common import subjects
from gateway.keeping.layout import token_of

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
# Status -> the statuses that may follow it.
NEXT: dict[Status, frozenset[Status]] = {
    "validating": frozenset({"in_progress", "failed", "cancelling"}),
    "in_progress": frozenset({"finalizing", "cancelling"}),
    "finalizing": frozenset({"completed", "expired", "failed"}),
    "cancelling": frozenset({"cancelled", "failed"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
}
OVER = frozenset(status for status, following in NEXT.items() if not following)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A complete file."""

    id: str
    tenant: str
    filename: str
    purpose: str = "batch"
    bytes: int = 0
    lines: int = 0
    parts: int = 0
    created_at: int = 0  # unix seconds, as are all times here
    expires_at: int = 0

    @property
    def subject(self) -> str:
        return subjects.batch_file(token_of(self.tenant), self.id)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """An error in a line of an input file; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch and its progress. `times` has the time of each status so far."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    model: str = ""
    status: Status = "validating"
    created_at: int = 0
    expires_at: int = 0
    times: dict[str, int] = {}
    parts: int = 0  # the input file's parts
    queued_parts: int = 0
    queued: int = 0  # queued lines
    total: int = 0
    completed: int = 0
    failed: int = 0
    seal: str = ""  # error code for lines without a result
    errors: list[LineError] = []
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def subject(self) -> str:
        return subjects.batch_record(token_of(self.tenant), self.id)

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    def to(self, status: Status, now: float, **changes: Any) -> BatchRecord:
        """The record in its next status. Raises ValueError for an illegal transition."""
        if status not in NEXT[self.status]:
            raise ValueError(f"a batch that is {self.status} can't be {status}")
        times = self.times | {f"{status}_at": int(now)}
        return msgspec.structs.replace(self, status=status, times=times, **changes)

    def as_json(self) -> dict[str, Any]:
        ends: tuple[Status, ...] = ("in_progress", "finalizing", "completed", "failed", "expired")
        ends += ("cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": [msgspec.to_builtins(error) for error in self.errors]}
            if self.errors
            else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(f"{status}_at") for status in ends},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Work: a line to run. Its text stays in the file, so queues stay small."""

    batch: str
    tenant: str
    line: int  # its number in the batch, from 0
    endpoint: str
    file: str
    part: int
    place: int  # position in `lines_of(part)`


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Work: a batch that needs its next step."""

    batch: str
    tenant: str
    created_at: int = 0


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line's result: an entry of the output or the error file, without its newline."""

    entry: bytes
    failed: bool = False


file_decoder = msgspec.msgpack.Decoder(FileRecord)
batch_decoder = msgspec.msgpack.Decoder(BatchRecord)
line_decoder = msgspec.msgpack.Decoder(Line)
step_decoder = msgspec.msgpack.Decoder(Step)
result_decoder = msgspec.msgpack.Decoder(Result)
encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of the Batch API."""

    store_bytes: int = 2 << 30
    file_bytes: int = 100 << 20
    file_lines: int = 50_000
    line_bytes: int = 1 << 20
    concurrency: int = 16  # lines running here
    window_s: float = 86_400.0
    keep_s: float = 30 * 86_400.0
    tenant_share: float = 0.5  # maximum share of the store for one tenant's files
    tenant_files: int = 1_000
    tenant_batches: int = 100  # running at a time
    tenant_kept_batches: int = 10_000  # ended ones included; all are read before one begins


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def new_batch_id() -> str:
    return f"batch_{uuid.uuid4().hex}"


def is_id(text: str) -> bool:
    """True if it may be part of a subject."""
    return len(text) <= 64 and text.isascii() and text.replace("-", "").replace("_", "").isalnum()


def first_step(record: BatchRecord) -> Step:
    return Step(batch=record.id, tenant=record.tenant, created_at=record.created_at)
