"""The record of a running `baton up`: a file in which tools find it without options."""

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
    """The record. Fields are only added, with defaults: a tool may be older or newer. Secrets stay in files of their own."""

    url: str
    pid: int
    born: str = ""  # the kernel's start time: pids are reused
    started_unix: float = 0.0
    release: str = ""
    model: str = ""  # the folder; "": several models
    served_model_name: str = ""
    observer: dict[str, str] = {}  # settings for tools that observe NATS and Redis
    api_key_file: str = ""  # "": no key is needed, or only its hash is known
    admin_key_file: str = ""
    certificate: str = ""  # the gateway's own (PEM), where it serves HTTPS
    logs: str = ""
    own_urls: list[str] = []  # one for each gateway, where several share `url`

    @property
    def is_alive(self) -> bool:
        return self.born == birth_of(self.pid) != ""


@contextlib.contextmanager
def announced(running: Running, folder: Path) -> Iterator[None]:
    """Context manager: publish the record in `folder`."""
    file = folder / FILE
    unfinished = folder / f"{FILE}.new"
    write_secret(unfinished, msgspec.json.format(msgspec.json.encode(running), indent=2).decode() + "\n")
    unfinished.rename(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def find_running(folder: Path) -> tuple[Path, Running] | None:
    """The folder and record of a live `baton up`: in `folder`, here or above, else in Baton's own."""
    above = list[Path]()
    with contextlib.suppress(FileNotFoundError):  # the working directory was removed
        above = [Path.cwd(), *Path.cwd().parents]
    for place in dict.fromkeys([*above, ROOT]):
        running = read_running(place / folder)
        if running is not None:
            return place / folder, running
    return None


def read_running(folder: Path) -> Running | None:
    """Return the record in `folder`; None if nothing runs there, or another user may have written it."""
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
    """The process's start time in the kernel's words; "" for no process."""
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
