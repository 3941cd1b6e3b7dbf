"""A model of a list in Ollama's form, whatever it makes."""

from __future__ import annotations

import hashlib
import re

from gateway.answers.catalogue import LATEST
from gateway.answers.tokenizer import Saved
from gateway.http.problem import Json

NEVER = "2300-01-01T00:00:00Z"  # the model stays loaded
_OF_CLASS = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def entry(name: str, own_name: str, fingerprint: str, saved: Saved) -> Json:
    """One of `name`'s entries; `own_name` differs for an alias, `fingerprint` is "" without a worker."""
    tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "size": 0,  # workers don't report it
        "digest": hashlib.sha256((fingerprint or own_name).encode()).hexdigest(),
        "details": details(name, own_name, saved),
    }


def details(name: str, own_name: str, saved: Saved) -> Json:
    family = family_of(saved)
    return {
        "parent_model": own_name if own_name != name else "",
        "format": "safetensors" if saved.architecture else "gguf",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": saved.quantised.upper() or _DTYPES.get(saved.dtype, saved.dtype),
    }


def family_of(saved: Saved) -> str:
    """The family of a class: `Qwen3ForCausalLM` is `qwen3`."""
    return _OF_CLASS.sub("", saved.architecture).lower() or "unknown"
