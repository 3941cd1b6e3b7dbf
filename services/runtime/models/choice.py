"""The files of a hub's repository that serving needs: safetensors or one GGUF model, and what defines its text.

Pickled weights are never among them, and no code; bge-m3's two heads are, which nothing unpickles (modelfiles/torchfile.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from modelfiles.files import CONFIG, TOKENIZER, of_kind
from services.runtime.checks.model import gigabytes
from services.runtime.checks.weights import INDEX, SINGLE
from services.runtime.hub import Named

MAX_FILES = 4096
MAX_SHOWN = 24
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.+-]*){0,2}\Z")
_PART = re.compile(r"(?P<whole>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf\Z")
_TEXT = re.compile(
    r"(?:(?!.*\.bin\.index\.json\Z)[^/]+\.json|[^/]+\.(?:jinja|tiktoken|model)|merges\.txt|vocab\.txt|LICENSE[^/]*"
    r"|artifact\.metadata|(?:sparse|colbert)_linear\.pt|additional_chat_templates/[^/]+\.jinja|\d+_[A-Za-z]+/(?:config\.json|model\.safetensors))\Z"
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_OTHER_GGUF = ("mmproj", "imatrix")


class ChoiceError(ValueError):
    """The repository has no such files, or several that the name could mean."""


class Listed(NamedTuple):
    """A file as its store lists it. A digest of another length than those names content, and is no hash."""

    name: str
    num_bytes: int
    digest: str  # SHA-256, git's SHA-1 of a blob, or MD5
    at: str = ""  # its place in the store, where that is not its name


def chosen(named: Named, files: Mapping[str, Listed], weight_map: Callable[[Listed], Sequence[str]]) -> list[Listed]:
    """The files to fetch. `weight_map` returns the files that an index names. Raises ChoiceError."""
    files = {name: file for name, file in files.items() if _NAME.match(name)}
    models = gguf_models(files)
    has_safetensors = CONFIG in files and any(name.endswith(".safetensors") for name in files)
    if named.kind or (models and not has_safetensors):
        return [*_the_one(named, models), *(text_of(files) if TOKENIZER in files else [])]
    if not has_safetensors:
        raise ChoiceError(_nothing(named, files))
    return [*_safetensors(files, weight_map), *text_of(files)]


def text_of(files: Mapping[str, Listed]) -> list[Listed]:
    """Files that define configuration and text: JSON, tokenizers and templates."""
    return [file for name, file in sorted(files.items()) if _NAME.match(name) and _TEXT.match(name)]


def gguf_models(files: Mapping[str, Listed]) -> dict[str, list[Listed]]:
    """GGUF models by the name of their first file; projectors and the like are left out."""
    models: dict[str, list[Listed]] = {}
    for name, file in sorted(files.items()):
        if not name.endswith(".gguf") or any(part in name.lower() for part in _OTHER_GGUF):
            continue
        part = _PART.match(name)
        models.setdefault(f"{part['whole']}-00001-of-{part['parts']}.gguf" if part else name, []).append(file)
    return models


def _the_one(named: Named, models: Mapping[str, list[Listed]]) -> list[Listed]:
    """The files of the GGUF model that the name means."""
    meant = of_kind([*models], named.kind)
    if not models:
        raise ChoiceError(f"it has no GGUF file, which a name behind the colon means: leave :{named.kind} out")
    if len(meant) != 1:
        shown = [f"  {first}  {gigabytes(sum(file.num_bytes for file in models[first]))}" for first in models]
        more = [f"  … and {len(shown) - MAX_SHOWN} more"] if len(shown) > MAX_SHOWN else []
        there = "\n".join([*shown[:MAX_SHOWN], *more])
        which = f"several are {named.kind!r}" if named.kind else "which of its GGUF files?"
        which = which if meant else f"it has no {named.kind!r}"
        example = f"{named.repo}:Q4_K_M"
        raise ChoiceError(f"{which}; name one of them, as {example}, or by its file's name:\n{there}")
    parts = models[meant[0]]
    described = _PART.match(meant[0])
    if described and len(parts) != int(described["parts"]):
        raise ChoiceError(f"{meant[0]}: {len(parts)} of its {int(described['parts'])} parts are there")
    return parts


def _safetensors(files: Mapping[str, Listed], weight_map: Callable[[Listed], Sequence[str]]) -> list[Listed]:
    """The files that the engine would load."""
    if INDEX in files:
        names = sorted(set(weight_map(files[INDEX])))
        if missing := [name for name in names if name not in files]:
            raise ChoiceError(f"its {INDEX} names {missing[0]:.80}, which is not there")
        return [files[name] for name in names]
    if SINGLE in files:
        return [files[SINGLE]]
    found = [file for name, file in sorted(files.items()) if name.endswith(".safetensors") and "/" not in name]
    return [file for file in found if not file.name.startswith("consolidated")] or found


def _nothing(named: Named, files: Mapping[str, Listed]) -> str:
    if any(name.endswith(".safetensors") for name in files):
        return f"it has no {CONFIG}: it is not in Hugging Face's format"
    if any(name.endswith(_PICKLES) for name in files):
        return (
            "it holds pickled weights only, which can run code when loaded: choose one with safetensors or GGUF files"
        )
    return "it has neither safetensors nor GGUF files"
