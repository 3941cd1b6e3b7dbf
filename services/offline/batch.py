"""A JSONL file of requests to one of answers, in OpenAI's form, here: what was answered before a kill is not asked again."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from common.settings import ConfigError
from gateway.batches.lines import InputLine, answered
from services.offline.bounded import bounded
from services.offline.offline import Offline
from services.offline.pooling import OfflinePooling

MAX_LINE = 64 << 20
MAX_ANSWER = 1 << 30  # bytes of a line of answers
BATCH = "offline"


class _Entry(msgspec.Struct, frozen=True):
    """The name of the request, in a line of answers."""

    custom_id: str


_lines = msgspec.json.Decoder(InputLine)
_entries = msgspec.json.Decoder(_Entry)


@dataclass(slots=True)
class Counts:
    """Progress of a batch, in requests."""

    total: int
    answered: int = 0
    failed: int = 0


def checked(path: Path) -> int:
    """The number of requests. Raises ConfigError, naming the line, for what is no request or has another's custom_id."""
    known: set[bytes] = set()
    for number, line in read(path):
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
        if digest in known:
            raise ConfigError(f"{path}, line {number}: custom_id {line.custom_id[:100]!r} is there twice")
        known.add(digest)
    return len(known)


def read(path: Path) -> Iterator[tuple[int, InputLine]]:
    """The requests with their lines' numbers. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
                if raw.strip():
                    yield number, _read(path, number, raw)
    except OSError as error:
        raise ConfigError(f"-i {path}: {error.strerror}") from None


def _read(path: Path, number: int, raw: bytes) -> InputLine:
    try:
        line = _lines.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}, line {number}: no request of a batch: {error}"[:300]) from None
    if line.method != "POST" or not line.custom_id:
        raise ConfigError(f"{path}, line {number}: a custom_id, and POST as its method, are needed")
    return line


class Answers:
    """The file of answers. One process has it; a line that a kill cut off is removed. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self.known: set[str] = set()
        try:
            path.touch(exist_ok=True)
            self._file: BinaryIO = path.open("r+b")
        except OSError as error:
            raise ConfigError(f"-o {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(self._read(path))
            self._file.seek(0, os.SEEK_END)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"-o {path}: another process writes it") from None
        except OSError as error:
            self._file.close()
            raise ConfigError(f"-o {path}: {error.strerror}") from None
        except ConfigError:
            self._file.close()
            raise

    def _read(self, path: Path) -> int:
        """Note what is answered; return the bytes that stay. Raises ConfigError for a file of something else."""
        end = 0
        for number, raw in enumerate(iter(lambda: self._file.readline(MAX_ANSWER), b""), 1):
            if not raw.endswith(b"\n") and _is_cut_off(raw):
                break
            try:
                self.known.add(_entries.decode(raw).custom_id)
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                raise ConfigError(f"-o {path}, line {number}: no answer of a batch: give another file") from None
            end += len(raw)
        return end

    def add(self, entry: bytes) -> None:
        """Write a line at once."""
        data = memoryview(entry + b"\n")
        while data:
            data = data[os.write(self._file.fileno(), data) :]

    def close(self) -> None:
        """Wait for the disk."""
        os.fsync(self._file.fileno())
        self._file.close()


def _is_cut_off(raw: bytes) -> bool:
    """True for the beginning of an answer: an object without its end, or without the line's."""
    try:
        _entries.decode(raw)
    except msgspec.ValidationError:
        return False  # a whole object, and another one
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return raw == b"{" or raw.startswith(b'{"')
    return True


async def run(
    offline: Offline | OfflinePooling, source: Path, answers: Answers, counts: Counts, told: Callable[[], None]
) -> None:
    """Answer every request of `source` that has none in `answers`. `told()` is called after each."""

    async def one(number: int, line: InputLine) -> None:
        status, body = await offline.answered(line.url, bytes(line.body))
        answers.add(answered(BATCH, number, line.custom_id, status=status, body=body))
        counts.answered += 1
        counts.failed += status != 200
        told()

    async with bounded(offline.most) as start:
        for number, line in read(source):
            if line.custom_id not in answers.known:
                await start(one(number, line))


def progress(counts: Counts) -> Callable[[], None]:
    """A bar on a terminal; else nothing."""
    if not sys.stderr.isatty():
        return lambda: None
    from tqdm import tqdm

    bar = tqdm(total=counts.total, initial=counts.answered, unit="request", desc="run-batch")
    return lambda: bar.update() and None
