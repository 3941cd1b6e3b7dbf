"""The files of a model: a folder in Hugging Face's format, or a GGUF file with the same facts in its metadata.

A tokenizer.json beside a GGUF file wins over the one inside, with the files that belong to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from modelfiles import sentencepiece, tekken
from modelfiles import tokenizer as inside
from modelfiles.gguf import GgufError, forget_headers, is_gguf, parts_of, read_header
from modelfiles.sentencepiece import MODEL, TokenizerFileError
from modelfiles.tekken import TEKKEN

TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
MAX_TOKENIZER_BYTES = 256 << 20
CONFIG, TEMPLATE = "config.json", "chat_template.jinja"
COMPANIONS = ("mmproj", "imatrix")  # words in the names of GGUF files that are no models
_QUANT = re.compile(
    r"[._-]((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4\w*))(?:-\d{5}-of-\d{5})?\.gguf\Z", re.I
)
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

    `kind` is the file's name or a part of it, such as "Q4_K_M". Raises GgufError when there are several, or none of the kind.
    """
    if is_gguf(model):
        return parts_of(model)[0]
    if not model.is_dir() or ((model / CONFIG).is_file() and any(model.glob("*.safetensors")) and not kind):
        return model
    models = [file for file in gguf_files(model) if parts_of(file)[0] == file]
    meant = of_kind([str(file.relative_to(model)) for file in models], kind)
    if len(meant) > 1 or (kind and not meant):
        raise GgufError(f"{model} holds {_not_one(models, meant, kind)}")
    return model / meant[0] if meant else model


def _not_one(models: Sequence[Path], meant: Sequence[str], kind: str) -> str:
    if not models:
        return f"no GGUF file: leave :{kind} out"
    names = ", ".join(file.name for file in models[:8])
    return f"{'several' if meant else f'no {kind}'} ({names}): name one of the files"


def of_kind(names: Sequence[str], kind: str) -> list[str]:
    """The names that a word means: the file itself, else those with that quantisation, else those that contain it.

    A quantisation that stands in another one's name, as Q4_K_M in UD-Q4_K_M, means its own file.
    """
    wanted = kind.lower()
    same = [name for name in names if wanted in (name.lower(), name.lower().rpartition("/")[2])]
    same = same or [name for name in names if quantisation_of(name).lower() == wanted]
    word = re.compile(rf"(?:\A|[./-]){re.escape(wanted)}(?:[./-]|\Z)")
    return same or [name for name in names if word.search(name.lower())] or [n for n in names if wanted in n.lower()]


def quantisation_of(name: str) -> str:
    """The quantisation in a GGUF file's name; the name if it has none."""
    quant = _QUANT.search(name)
    return quant[1] if quant else name


def gguf_files(folder: Path) -> list[Path]:
    """GGUF models in a folder and its subfolders, split ones included; companion files such as projectors are left out."""
    files = sorted([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")])
    return [file for file in files if not any(part in file.name.lower() for part in COMPANIONS)]


def name_of(model: Path) -> str:
    """Return the default name of a model: the folder's, or the file's without its part number."""
    if not is_gguf(model):
        return model.resolve().name
    whole, _, number = model.stem.rpartition("-00001-of-")
    return whole if whole and number.isdigit() else model.stem


def read_file(model: Path, name: str) -> bytes | None:
    """Return a file of the model that defines its text processing; None if absent.

    A tokenizer.json is made of tekken.json or tokenizer.model where one of these is all there is. Raises OSError, GgufError,
    TokenizerFileError.
    """
    folder = model.parent if is_gguf(model) else model
    if is_gguf(model) and not (folder / TOKENIZER).is_file():
        return _made(model, name) if name in _INSIDE else None
    path = folder / name
    if path.is_file():
        return path.read_bytes()
    return _converted(folder, name) if name in (TOKENIZER, TOKENIZER_CONFIG) else None


def has_tokenizer(model: Path) -> bool:
    """True if the model has a tokenizer, though maybe an unreadable one. Raises OSError, GgufError."""
    folder = model.parent if is_gguf(model) else model
    if (folder / TOKENIZER).is_file():
        return True
    return inside.is_there(read_header(model).metadata) if is_gguf(model) else bool(other_tokenizer(folder))


def other_tokenizer(folder: Path) -> str:
    """The file that stands for a missing tokenizer.json: tekken.json, or SentencePiece's; "" if there is none."""
    if (folder / TOKENIZER).is_file():
        return ""
    return next((name for name in (TEKKEN, MODEL) if (folder / name).is_file()), "")


def _converted(folder: Path, name: str) -> bytes | None:
    """The file as another tokenizer's file has it. Raises OSError, TokenizerFileError."""
    if not (other := other_tokenizer(folder)):
        return None
    stat = (folder / other).stat()
    return _converted_of(folder, other, name, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)
def _converted_of(folder: Path, other: str, name: str, size: int, changed_ns: int) -> bytes:
    if size > MAX_TOKENIZER_BYTES:
        raise TokenizerFileError(f"{folder / other} has {size} bytes")
    try:
        if other == TEKKEN:
            is_whole = name == TOKENIZER
            made = tekken.tokenizer_json((folder / other).read_bytes()) if is_whole else tekken.tokenizer_config()
        else:
            metadata, is_legacy = _pieces_of(folder, size, changed_ns)
            made = _INSIDE[name](metadata)
            if name == TOKENIZER and not is_legacy:
                made = inside.without_legacy(made)
    except (TokenizerFileError, GgufError) as error:
        raise TokenizerFileError(f"{folder}: {error}") from None
    return json.dumps(made, ensure_ascii=False).encode()


@lru_cache(maxsize=1)
def _pieces_of(folder: Path, size: int, changed_ns: int) -> tuple[Mapping[str, Any], bool]:
    """SentencePiece's file as a GGUF file's metadata, parsed once for both files; and True unless its model is no legacy one."""
    beside = [_object(folder / each) for each in (TOKENIZER_CONFIG, "added_tokens.json")]
    metadata = sentencepiece.metadata_of((folder / MODEL).read_bytes(), beside[0], sentencepiece.added_tokens(*beside))
    return metadata, beside[0].get("legacy") is not False


def _object(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none. Raises TokenizerFileError."""
    try:
        found = json.loads(file.read_bytes()) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise TokenizerFileError(f"{file.name} is not JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def read_json(model: Path, name: str) -> dict[str, Any]:
    """Return `read_file` as JSON; empty if absent. Also raises ValueError."""
    return json.loads(read_file(model, name) or b"{}")


def forget_files() -> None:
    """Free what is kept of files that were read: a process that has begun asks for none of it, and it is megabytes."""
    for kept in (_made_of, _converted_of, _pieces_of):
        kept.cache_clear()
    forget_headers()


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
