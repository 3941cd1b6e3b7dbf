"""The identity of a process on NATS and Redis: a user and a password, from a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from common import subjects
from common.settings import ConfigError

MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Login:
    """A user and a password; never shown in logs."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Login(user={self.user!r}, password=***)"


def inbox_of(user: str) -> str:
    """The prefix of a user's answer subjects: no other user may listen there."""
    return f"_INBOX.{subjects.check_id(user)}"


def read_login(file: Path) -> Login:
    """Read `user:password` from a file. Raises ConfigError, which names the file and never its content."""
    try:
        text = file.read_bytes()[:MAX_FILE_BYTES].decode()
    except OSError as error:
        raise ConfigError(f"credentials file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"credentials file {file}: not text; put user:password on one line") from None
    user, colon, password = text.strip().partition(":")
    if not user or not colon or not password or "\n" in password:
        raise ConfigError(f"credentials file {file}: put user:password on one line")
    return Login(user, password)


def write_secret(file: Path, text: str) -> None:
    """Write a file that only its owner may read, from its first byte on."""
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
