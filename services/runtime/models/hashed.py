"""A file that is hashed while it grows, so that it gets its name only when it is what was asked for."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from types import TracebackType
from typing import IO

PIECE_BYTES = 1 << 20
GIT_DIGITS, SHA256_DIGITS, MD5_DIGITS = 40, 64, 32
_HASH = re.compile(rf"(?:[0-9a-f]{{{MD5_DIGITS}}}|[0-9a-f]{{{GIT_DIGITS}}}|[0-9a-f]{{{SHA256_DIGITS}}})\Z")


def is_hash(digest: str) -> bool:
    """True if the text is a hash that content can be compared with."""
    return _HASH.match(digest) is not None


class TooLongError(ValueError):
    """More bytes came than the file has."""


class Growing:
    """An unfinished file of a known size. Opening it hashes what an earlier attempt left."""

    def __init__(self, path: Path, *, num_bytes: int, digest: str) -> None:
        self._path, self._num_bytes, self._wanted = path, num_bytes, digest
        self._file = path.open("a+b")
        self.length = 0
        self._digest = self._empty()
        self._file.seek(0)
        while piece := self._file.read(PIECE_BYTES):
            self._digest.update(piece)
            self.length += len(piece)
        if self.length > num_bytes:
            self.begin_again()

    def _empty(self) -> hashlib._Hash:
        if len(self._wanted) == MD5_DIGITS:
            return hashlib.md5(usedforsecurity=False)  # all that the store tells
        if len(self._wanted) != GIT_DIGITS:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self._num_bytes, usedforsecurity=False)  # git's name of a blob

    def __enter__(self) -> Growing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def is_whole(self) -> bool:
        return self.length == self._num_bytes

    def write(self, piece: bytes) -> None:
        """Append. Raises TooLongError."""
        if self.length + len(piece) > self._num_bytes:
            raise TooLongError(f"more than its {self._num_bytes} bytes came")
        self._file.write(piece)
        self._digest.update(piece)
        self.length += len(piece)

    def begin_again(self) -> None:
        """Drop what is there."""
        self._file.seek(0)
        self._file.truncate()
        self._digest, self.length = self._empty(), 0

    def becomes(self, path: Path) -> bool:
        """Give it its name if it is whole and has the right hash; else drop it."""
        is_right = not is_hash(self._wanted) or self._digest.hexdigest() == self._wanted
        if not (self.is_whole and is_right):
            self.begin_again()
            self._path.unlink(missing_ok=True)
            return False
        keep(self._file, self._path, path)
        return True


def keep(file: IO[bytes], written: Path, path: Path) -> None:
    """Give a written file its name. Its bytes are on the disk before: a crash of the machine leaves none that looks whole."""
    file.flush()
    os.fsync(file.fileno())
    written.replace(path)
