"""Checks of this machine: Python, packages, limits, shared memory, ports."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from common.settings import ROOT
from services.runtime.checks.finding import Finding
from services.runtime.servers import port_is_free
from services.worker.host_share import HostMB

NOFILE = 4_096  # client and peer connections, weight-reading threads
SHM_FOLDER = Path("/dev/shm")
SHM_BYTES = 512 << 20  # two CPU workers with the default pool of 256 MiB
ESSENTIAL = ("msgspec", "nats-py", "redis", "pydantic")


def python_and_packages(constraints: Path = ROOT / "constraints.txt") -> Iterator[Finding]:
    """Compare the installed packages with those tested in CI."""
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield Finding("python", "ok", version)
    else:
        yield Finding("python", "fail", f"{version} is not tested", "use Python 3.11 or 3.12")
    wanted = dict(_pinned(constraints))
    installed = {name: found for name in {*wanted, *ESSENTIAL} if (found := _installed(name))}
    for name in ESSENTIAL:
        if name not in installed:
            yield Finding("packages", "fail", f"{name} is missing", "run `make setup`")
    other = {name: found for name, found in installed.items() if name in wanted and _public(found) != wanted[name]}
    for name, found in sorted(other.items()):
        yield Finding("packages", "warn", f"{name} {found}, tested with {wanted[name]}", "run `make setup`")
    if not other:
        yield Finding("packages", "ok", f"{len(installed)} installed packages are those of {constraints.name}")


def limits(host: HostMB) -> Iterator[Finding]:
    """Check open files, and shared memory, which is `host`'s, too, where workers share that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < NOFILE:
        remedy = f"ulimit -n {NOFILE}" + (
            "" if hard >= NOFILE or hard == resource.RLIM_INFINITY else " as root (LimitNOFILE)"
        )
        yield Finding("nofile", "warn", f"{soft} open files at most", remedy)
    else:
        yield Finding("nofile", "ok", f"{soft} open files at most")
    yield from _shared_memory(host, SHM_FOLDER)


def _shared_memory(host: HostMB, folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield Finding("shm", "fail", "no /dev/shm", "mount a tmpfs there, or use --transport ucx")
        return
    size, _, free = shutil.disk_usage(folder)
    if host.is_shared and size >> 20 < (shared_mb := host.resolved()):
        text = f"{size >> 20} MiB in /dev/shm, of which --kv-host-mb shares {shared_mb}"
        yield Finding(
            "shm", "fail", text, f"give containers --shm-size {shared_mb + (SHM_BYTES >> 20)}m, or share less"
        )
        return
    text = f"{free / 2**20:.0f} MiB free in /dev/shm"
    if free < SHM_BYTES:
        remedy = "give containers --shm-size 2g or --ipc host, or lower --kv-memory-mb"
        yield Finding("shm", "warn", text, remedy)
    else:
        yield Finding("shm", "ok", text)


def port(host: str, number: int) -> Iterator[Finding]:
    """Check that the gateway could listen; 0 is not checked."""
    if not number:
        return
    if port_is_free(number, host):
        yield Finding("port", "ok", f"{host}:{number} is free")
    else:
        yield Finding("port", "warn", f"{host}:{number} is in use", "is a gateway running already? else choose --port")


def _pinned(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        name, equals, version = line.partition("#")[0].partition(";")[0].strip().partition("==")
        if equals:
            yield name.lower().replace("_", "-"), version


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _public(version: str) -> str:
    return version.partition("+")[0]
