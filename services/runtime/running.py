"""The record of a running `baton up`: a file that tools read, so that they find it without options."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.access import write_secret
from common.settings import ROOT

FILE = "up.json"
MAX_BYTES = 64 << 10


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """Fields are only added, with defaults: a tool may be older or newer than what runs. Secrets stay in files of their own."""

    url: str
    pid: int
    born: str = ""  # when the kernel started it: numbers are given out again
    started_unix: float = 0.0
    release: str = ""
    model: str = ""  # the folder; "": several models
    served_model_name: str = ""
    observer: dict[str, str] = {}  # settings with which a tool reaches NATS and Redis, to look on
    api_key_file: str = ""  # "": no key is needed, or only its hash is known here
    admin_key_file: str = ""
    certificate: str = ""  # the gateway's own (PEM), where it serves HTTPS
    logs: str = ""
    own_urls: list[str] = []  # each gateway by itself, where several share `url`

    @property
    def is_alive(self) -> bool:
        return self.born == birth_of(self.pid) != ""


@contextlib.contextmanager
def announced(running: Running, folder: Path) -> Iterator[None]:
    """Tools find `running` by `folder` while the context is open."""
    file = folder / FILE
    unfinished = folder / f"{FILE}.new"
    write_secret(unfinished, msgspec.json.format(msgspec.json.encode(running), indent=2).decode() + "\n")
    unfinished.rename(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def find_running(folder: Path) -> tuple[Path, Running] | None:
    """The folder and words of a live `baton up`: of `folder` here or in a folder above, else in Baton's own."""
    above = list[Path]()
    with contextlib.suppress(FileNotFoundError):  # the folder that we are in was removed
        above = [Path.cwd(), *Path.cwd().parents]
    for place in dict.fromkeys([*above, ROOT]):
        running = read_running(place / folder)
        if running is not None:
            return place / folder, running
    return None


def read_running(folder: Path) -> Running | None:
    """Return the record in `folder`; None when nothing runs there, or another user may have written it."""
    file = folder / FILE
    try:
        with file.open("rb") as opened:
            facts = os.fstat(opened.fileno())
            if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
                return None
            running = msgspec.json.decode(opened.read(MAX_BYTES), type=Running)
    except (OSError, msgspec.DecodeError):
        return None
    return running if running.is_alive else None


def birth_of(pid: int) -> str:
    """When the process started, in the kernel's words; "" when there is none."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except (OSError, OverflowError):
        return ""
    with contextlib.suppress(OSError, IndexError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if words[0] == "Z" else words[19]
    return "unknown"  # a system without /proc
