"""Pre-tokenization rules of byte-level BPEs, by their names in GGUF files (`tokenizer.ggml.pre`).

The rules are facts about others' tokenizers, and stand in splits.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_WORDS_OF_GPT_2, _DIGITS = "gpt-2", "digits"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """One rule in the form of tokenizer.json."""

    pre_tokenizer: Mapping[str, Any]
    normalizer: str = ""  # "NFC"
    whole_words: bool = False
    begins_with_bos: bool = False


@cache
def splits() -> Mapping[str, Splits]:
    """Return all rules by name."""
    described = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    found: dict[str, Splits] = {}
    for rule in described["rules"]:
        names, steps = rule.pop("names"), rule.pop("steps")
        cuts = [_step(step, described["expressions"]) for step in steps if step != _WORDS_OF_GPT_2]
        cuts.append(_BYTES | {"use_regex": _WORDS_OF_GPT_2 in steps})
        sequence = {"type": "Sequence", "pretokenizers": cuts}
        found |= dict.fromkeys(names, Splits(pre_tokenizer=sequence, **rule))
    return found


def _step(name: str, expressions: Mapping[str, str]) -> dict[str, Any]:
    if name == _DIGITS:
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": expressions[name]}, "behavior": "Isolated", "invert": False}
