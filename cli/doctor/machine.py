"""Checks of this machine: Python, packages, limits, shared memory, ports, the model's folder."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from cli.doctor.finding import Finding
from common.model.files import TOKENIZER, read_file
from common.model.gguf import GgufError, is_gguf, read_header
from common.settings import ROOT
from services.runtime.servers import port_is_free

NOFILE = 4_096  # connections of clients and peers, threads that read weights
SHM_BYTES = 512 << 20  # two CPU workers with the default pool of 256 MiB
ESSENTIAL = ("msgspec", "nats-py", "redis", "pydantic")
MAX_HEADER = 100 << 20  # bytes; safetensors' own bound


def python_and_packages(constraints: Path = ROOT / "constraints.txt") -> Iterator[Finding]:
    """Compare installed packages with CI's."""
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


def limits() -> Iterator[Finding]:
    """Check open files and shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < NOFILE:
        remedy = f"ulimit -n {NOFILE}" + (
            "" if hard >= NOFILE or hard == resource.RLIM_INFINITY else " as root (LimitNOFILE)"
        )
        yield Finding("nofile", "warn", f"{soft} open files at most", remedy)
    else:
        yield Finding("nofile", "ok", f"{soft} open files at most")
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Finding("shm", "fail", "no /dev/shm", "mount a tmpfs there, or use --transport ucx")
        return
    free = shutil.disk_usage(folder).free
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


def model(folder: Path) -> Iterator[Finding]:
    """Check the model's configuration, tokenizer and every byte of its weights."""
    if is_gguf(folder):
        yield from _gguf(folder)
        return
    if not folder.is_dir():
        yield Finding("model", "fail", f"no folder {folder}", "give --model the folder of a Hugging Face checkpoint")
        return
    for name in ("config.json", "tokenizer.json"):
        yield _json_file(folder / name)
    index = folder / "model.safetensors.index.json"
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values())) if index.exists() else []
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        yield Finding("weights", "fail", f"{index.name} can't be read ({type(error).__name__})", "download it again")
        return
    files = [folder / name for name in names] or sorted(folder.glob("*.safetensors"))
    broken = [(path, problem) for path in files if (problem := _broken(path))]
    for path, problem in broken:
        yield Finding("weights", "fail", f"{path.name} {problem}", "download it again")
    if not files:
        yield Finding("weights", "fail", f"no .safetensors in {folder}", "download the weights, or convert them")
    elif not broken:
        size = sum(path.stat().st_size for path in files)
        yield Finding("weights", "ok", f"{len(files)} file(s), {size / 2**20:.1f} MiB, complete")


def _gguf(file: Path) -> Iterator[Finding]:
    """Check that all parts are there, whole, and that the text's rules are known."""
    try:
        header = read_header(file)
        size = sum(each.stat().st_size for each in header.files)
        yield Finding("weights", "ok", f"{len(header.files)} file(s), {size / 2**20:.1f} MiB, complete")
        read_file(file, TOKENIZER)
        yield Finding("model", "ok", f"{header.metadata.get('general.architecture')}, {file.name}")
    except (GgufError, OSError) as error:
        text, _, remedy = str(error).rpartition(": ")
        yield Finding("model", "fail", text, remedy)


def _json_file(path: Path) -> Finding:
    try:
        json.loads(path.read_bytes())
    except OSError:
        return Finding("model", "fail", f"no {path.name} in {path.parent}", "download it")
    except ValueError:
        return Finding("model", "fail", f"{path.name} is not JSON", "download it again")
    return Finding("model", "ok", path.name)


def _broken(path: Path) -> str:
    """What is wrong with a safetensors file, whose header tells its length; "" for nothing."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(MAX_HEADER, size):
                return "has no valid header"
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError:
        return "is missing"
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        return "has no valid header"
    whole = 8 + length + max(ends, default=0)
    return "" if size == whole else f"has {size} bytes of {whole}"


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
