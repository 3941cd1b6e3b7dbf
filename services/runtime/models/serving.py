"""The processes of this machine that serve a kept model: each holds a shared lock on the model's file, with its name in it.

The kernel frees a lock with its process. Names are for people: a line that outlived its process is passed over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from common.settings import ConfigError
from services.runtime import hub
from services.runtime.running import birth_of

REMOVAL_S = 60.0
LOOK_EACH_S = 0.01
MAX_BYTES = 64 << 10
MAX_NAMED = 8
SOMEBODY = "a process of this machine"
_serving: list[IO[str]] = []


def serve(model: Path, name: str) -> None:
    """Tell others that this process serves a kept model, as long as it lives: `baton rm` leaves it alone.

    `name`: of the process. Raises ConfigError if somebody removes the model now.
    """
    lock = lock_file(model)
    if lock is None:
        return
    with contextlib.suppress(OSError):  # a cache that can't be written to, where nobody removes anything either
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a+")
        if not _lent(file, fcntl.LOCK_SH):
            raise ConfigError(f"{model}: another process removes it: start again when that is done")
        _serving.append(file)
        with _looking():
            _write(file, [*_living(lock), f"{os.getpid()} {birth_of(os.getpid())} {name}"])
    if not model.exists():
        raise ConfigError(f"{model}: it was removed a moment ago: `baton pull` fetches it again")


def is_served(model: Path) -> bool:
    """True if a process of this machine serves it."""
    lock = lock_file(model)
    if lock is None or not lock.is_file():
        return False
    with _looking(), contextlib.ExitStack() as held:
        return not locked(held, lock)


def servers_of(model: Path) -> str:
    """The processes of this machine that serve a model, as an error says them; "" if none does."""
    lock = lock_file(model)
    if lock is None or not is_served(model):
        return ""
    told = [line.split(" ", 2) for line in _living(lock)]
    names = [f"{name} (process {pid})" for pid, _, name in told]
    more = [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return ", ".join([*names[:MAX_NAMED], *more]) or SOMEBODY


def left_alone(held: contextlib.ExitStack, model: Path) -> str:
    """Keep others from serving a model until `held` is closed; or return who serves it."""
    lock = lock_file(model)
    if lock is None:
        return ""
    with _looking():
        is_free = locked(held, lock)
    return "" if is_free else servers_of(model) or SOMEBODY


def _living(lock: Path) -> list[str]:
    """The lines of processes that live."""
    with contextlib.suppress(OSError):
        told = lock.read_bytes()[:MAX_BYTES].decode(errors="replace").splitlines()
        return [line for line in told if _lives(line)]
    return []


def _lives(line: str) -> bool:
    pid, _, rest = line.partition(" ")
    born, _, name = rest.partition(" ")
    return bool(name) and pid.isdecimal() and birth_of(int(pid)) == born != ""


def _write(file: IO[str], lines: list[str]) -> None:
    file.truncate(0)
    file.write("".join(f"{line}\n" for line in lines))
    file.flush()


def _lent(file: IO[str], kind: int) -> bool:
    """Wait for a lock. Who looks has it for a moment, who removes for as long as that takes."""
    give_up_at = time.monotonic() + REMOVAL_S
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up_at:
                return False
            time.sleep(LOOK_EACH_S)
        else:
            return True


@contextlib.contextmanager
def _looking() -> Iterator[None]:
    """Look for who serves one process at a time: two that look at once would take each other for one that does."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # where nothing can be written, nothing is locked
            folder = hub.cache() / ".locks"
            folder.mkdir(parents=True, exist_ok=True)
            _lent(held.enter_context((folder / "baton-looking.lock").open("a")), fcntl.LOCK_EX)
        yield


def locked(held: contextlib.ExitStack, lock: Path) -> bool:
    """True if nobody else has the lock; then it is kept until `held` is closed."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(lock.open("a"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def lock_file(model: Path) -> Path | None:
    """The file that those who serve a model hold; None if it is in no cache of ours."""
    path = model.absolute()
    if any(path == hub.kept(name) for name in hub.NAMED):
        return path.parent / ".locks" / f"baton-served-{path.name}"
    for cache, there in ((hub.cache(), path), (hub.cache().resolve(), path.parent.resolve() / path.name)):
        with contextlib.suppress(ValueError):
            folder, _, commit, *inside = there.relative_to(cache).parts
            return hub.cache() / ".locks" / folder / f"baton-served-{'-'.join((commit, *inside))}"
    return None
