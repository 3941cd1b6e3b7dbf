"""JSONL: splitting a file into parts of whole lines, checking a batch's lines, and result entries. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from common.errors import InvalidRequestError
from gateway.batches.records import LineError

PART_BYTES = 512 << 10  # a part ends at this size or at PART_LINES
PART_LINES = 256
MAX_CUSTOM_ID = 512
MAX_ERRORS = 100  # listed in a batch's object
SEALS = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed: the batch was cancelled.",
}


class LineCutter:
    """Splits a file into parts of whole lines; the parts joined are the file."""

    def __init__(self, *, file_bytes: int, file_lines: int, line_bytes: int) -> None:
        self._file_bytes, self._file_lines, self._line_bytes = file_bytes, file_lines, line_bytes
        self._whole = bytearray()  # lines of the next part
        self._rest = bytearray()  # an incomplete line
        self._part_lines = 0
        self.bytes = 0
        self.lines = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take more of the file; yield completed parts. Raises InvalidRequestError beyond a limit."""
        self.bytes += len(data)
        if self.bytes > self._file_bytes:
            raise InvalidRequestError(f"the file is larger than {self._file_bytes} bytes: split it", param="file")
        self._rest += data
        start = 0
        while True:
            end = self._rest.find(b"\n", start) + 1
            length = (end or len(self._rest)) - start
            if length > self._line_bytes:
                text = f"line {self.lines + 1} is longer than {self._line_bytes} bytes: shorten it"
                raise InvalidRequestError(text, param="file")
            if not end:
                break
            self._whole += self._rest[start:end]
            self._count_line()
            start = end
            if self._part_lines >= PART_LINES or len(self._whole) >= PART_BYTES:
                yield self._cut()
        del self._rest[:start]

    def finish(self) -> Iterator[bytes]:
        """Finish the file: yield the rest. Raises InvalidRequestError for an empty file, or one line too many."""
        if self._rest:
            self._whole += self._rest
            self._rest.clear()
            self._count_line()
        if not self.bytes:
            raise InvalidRequestError("the file is empty", param="file")
        if self._whole:
            yield self._cut()

    def _count_line(self) -> None:
        self.lines += 1
        self._part_lines += 1
        if self.lines > self._file_lines:
            raise InvalidRequestError(f"the file has more than {self._file_lines} lines: split it", param="file")

    def _cut(self) -> bytes:
        part = bytes(self._whole)
        self._whole.clear()
        self._part_lines = 0
        return part


class InputLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    model: str


class WrongLineError(Exception):
    """A line that can't be run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


_decoder = msgspec.json.Decoder(InputLine)
_model_decoder = msgspec.json.Decoder(_Named)
_json = msgspec.json.Encoder()


def lines_of(part: bytes) -> list[bytes]:
    """The lines of a part, without empty ones."""
    return [line for line in part.split(b"\n") if line.strip()]


def parse_line(raw: bytes, *, endpoint: str, models: Collection[str]) -> InputLine:
    """Parse a line that names one of `models`; other fields are checked later. Raises WrongLineError."""
    try:
        raw.decode()
        line = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WrongLineError("invalid_json_line", f"not a line of a batch: {error}"[:300]) from None
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
        raise WrongLineError("invalid_custom_id", f"custom_id: 1 to {MAX_CUSTOM_ID} characters", "custom_id")
    if line.method != "POST":
        raise WrongLineError("invalid_method", "method: must be POST", "method")
    if line.url != endpoint:
        raise WrongLineError("mismatched_endpoint", f"url: must be the batch's endpoint, {endpoint}", "url")
    named = model_of(line)
    if named not in models:
        known = " or ".join(map(repr, models))
        raise WrongLineError("model_not_found", f"body.model: {named[:100]!r} is not {known}", "body.model")
    return line


def model_of(line: InputLine) -> str:
    """The model in a line's body. Raises WrongLineError."""
    try:
        return _model_decoder.decode(line.body).model
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WrongLineError("invalid_body", f"body: {error}"[:300], "body") from None


class LineChecker:
    """Checks the lines of a file, part by part. All lines name the same model."""

    def __init__(self, *, endpoint: str, models: Collection[str]) -> None:
        self._endpoint = endpoint
        self._models = models
        self._known: set[bytes] = set()  # digests of custom ids
        self._number = 0
        self.model = ""  # the first valid line's model
        self.total = 0
        self.errors: list[LineError] = []

    def check(self, part: bytes) -> None:
        """Note the faults in `part`; line numbers count empty lines, too."""
        for raw in part.removesuffix(b"\n").split(b"\n"):
            self._number += 1
            if not raw.strip():
                continue
            self.total += 1
            try:
                models = [self.model] if self.model else self._models
                line = parse_line(raw, endpoint=self._endpoint, models=models)
                self.model = self.model or model_of(line)
                digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
                if digest in self._known:
                    text = f"custom_id: {line.custom_id[:100]!r} is there twice"
                    raise WrongLineError("duplicate_custom_id", text, "custom_id")
                self._known.add(digest)
            except WrongLineError as error:
                if len(self.errors) < MAX_ERRORS:
                    told = LineError(code=error.code, message=error.message, line=self._number, param=error.param)
                    self.errors.append(told)


def answered(batch: str, line: int, custom_id: str, *, status: int, body: Any) -> bytes:
    """An entry with an answer, or an error with a status."""
    response = {"status_code": status, "request_id": request_id(batch, line), "body": body}
    return _entry(batch, line, custom_id, response=response, error=None)


def unanswered(batch: str, line: int, custom_id: str, *, code: str, message: str) -> bytes:
    """An entry without an answer."""
    return _entry(batch, line, custom_id, response=None, error={"code": code, "message": message})


def request_id(batch: str, line: int) -> str:
    return f"batch_req_{batch.removeprefix('batch_')}_{line}"


def _entry(batch: str, line: int, custom_id: str, *, response: object, error: object) -> bytes:
    entry = {"id": request_id(batch, line), "custom_id": custom_id, "response": response, "error": error}
    return _json.encode(entry)


class Packer:
    """Groups entries into parts, deterministically."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self.bytes = 0
        self.lines = 0

    def add(self, entry: bytes) -> bytes | None:
        """Add an entry; return the part that it completes, if any."""
        self._pending += entry + b"\n"
        self.bytes += len(entry) + 1
        self.lines += 1
        return self.rest() if len(self._pending) >= PART_BYTES else None

    def rest(self) -> bytes | None:
        """The bytes that are in no part yet."""
        part = bytes(self._pending)
        self._pending.clear()
        return part or None
