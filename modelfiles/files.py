"""The files of a model: a folder in Hugging Face's format, or a GGUF file with the same facts in its metadata.

A tokenizer.json beside a GGUF file wins over the one inside, with the files that belong to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from modelfiles import tokenizer as inside
from modelfiles.gguf import GgufError, is_gguf, parts_of, read_header

TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
CONFIG, TEMPLATE = "config.json", "chat_template.jinja"
_INSIDE: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    TOKENIZER: inside.tokenizer_json,
    TOKENIZER_CONFIG: inside.tokenizer_config,
    GENERATION_CONFIG: inside.generation_config,
}


def is_model(model: Path) -> bool:
    """True if the path has something that can be loaded."""
    return model.is_file() if is_gguf(model) else (model / CONFIG).is_file()


def found(model: Path, kind: str = "") -> Path:
    """Return the first file of a split model; for a folder with a single GGUF file and nothing else to load, that file.

    `kind` is a part of the file's name, such as "Q4_K_M". Raises GgufError when there are several, or none of the kind.
    """
    if is_gguf(model):
        return parts_of(model)[0]
    if not model.is_dir() or ((model / CONFIG).is_file() and any(model.glob("*.safetensors")) and not kind):
        return model
    models = [file for file in gguf_files(model) if parts_of(file)[0] == file]
    of_kind = [file for file in models if kind.lower() in file.name.lower()]
    if len(of_kind) > 1 or (kind and not of_kind):
        names = ", ".join(file.name for file in models[:8])
        raise GgufError(f"{model} holds {'several' if of_kind else f'no {kind}'} ({names}): name one of the files")
    return of_kind[0] if of_kind else model


def gguf_files(folder: Path) -> list[Path]:
    """GGUF models in a folder and its subfolders, split ones included; companion files such as projectors are left out."""
    files = sorted([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")])
    return [file for file in files if not any(part in file.name.lower() for part in ("mmproj", "imatrix"))]


def name_of(model: Path) -> str:
    """Return the default name of a model: the folder's, or the file's without its part number."""
    if not is_gguf(model):
        return model.resolve().name
    whole, _, number = model.stem.rpartition("-00001-of-")
    return whole if whole and number.isdigit() else model.stem


def read_file(model: Path, name: str) -> bytes | None:
    """Return a file of the model that defines its text processing; None if absent. Raises OSError, GgufError."""
    folder = model.parent if is_gguf(model) else model
    if is_gguf(model) and not (folder / TOKENIZER).is_file():
        return _made(model, name) if name in _INSIDE else None
    path = folder / name
    return path.read_bytes() if path.is_file() else None


def read_json(model: Path, name: str) -> dict[str, Any]:
    """Return `read_file` as JSON; empty if absent. Also raises ValueError."""
    return json.loads(read_file(model, name) or b"{}")


def num_tokens(model: Path) -> int | None:
    """Number of tokens in a GGUF file, padding included; None: read config.json."""
    return inside.num_tokens(read_header(model).metadata) if is_gguf(model) else None


def _made(model: Path, name: str) -> bytes:
    stat = model.stat()
    return _made_of(model, name, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)
def _made_of(model: Path, name: str, size: int, changed_ns: int) -> bytes:
    try:
        return json.dumps(_INSIDE[name](read_header(model).metadata), ensure_ascii=False).encode()
    except GgufError as error:
        raise GgufError(f"{model}: {error}" if str(model) not in str(error) else str(error)) from None
