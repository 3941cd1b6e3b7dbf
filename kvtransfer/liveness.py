"""Lock files in /dev/shm that show which workers are alive.

A worker holds a `flock` on its file. The kernel releases it with the process, however that ends, and shows it across PID
namespaces, where a pid means nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

SHM_FOLDER = Path("/dev/shm")


def host() -> str:
    """Identity of this host until it reboots; its containers share it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def shared_memory() -> str:
    """Return the identity of /dev/shm: containers may have one each."""
    return f"{host()}/{SHM_FOLDER.stat().st_dev}"


def create_locked(prefix: str) -> tuple[Path, int]:
    """Create and lock an empty file of mode 0600 with an unguessable name; return it with the locked descriptor."""
    while True:
        path = SHM_FOLDER / f"{prefix}-{secrets.token_hex(16)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink > 0:
                return path, descriptor
        os.close(descriptor)  # another worker's start removed it before the lock was taken


def is_locked(path: Path) -> bool:
    """True if a process holds the file's lock. False for a missing file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # it can't be opened, so it may be locked
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_name(name: str, prefix: str) -> bool:
    """True if `name` has the form that `create_locked` makes."""
    return name.startswith(f"{prefix}-") and "/" not in name


def remove_stale(prefix: str) -> None:
    """Remove this user's unlocked files, left by killed workers."""
    for path in SHM_FOLDER.glob(f"{prefix}-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid() and not is_locked(path):
                path.unlink()
