"""Tokens of a tokenizer.json by their texts, without a tokenizer."""

from __future__ import annotations

from pathlib import Path

from modelfiles.files import TOKENIZER, TOKENIZER_CONFIG, read_json


def token_ids(model: Path) -> dict[str, int]:
    """Every token's number by its text; added ones first. Raises OSError, ValueError."""
    read = read_json(model, TOKENIZER)
    vocab = (read.get("model") or {}).get("vocab")
    if isinstance(vocab, list):  # with a score each
        vocab = {one[0]: at for at, one in enumerate(vocab) if isinstance(one, list) and one}
    known = {text: number for text, number in (vocab or {}).items() if isinstance(number, int)}
    for one in read.get("added_tokens") or ():
        if isinstance(one, dict) and isinstance(one.get("id"), int):
            known[str(one.get("content"))] = one["id"]
    return known


def special_texts_of(model: Path, *names: str) -> list[str]:
    """The texts of special tokens such as `cls_token`, as far as tokenizer_config.json has them. Raises OSError, ValueError."""
    config = read_json(model, TOKENIZER_CONFIG)
    said = [config.get(name) for name in names]
    texts = [one.get("content") if isinstance(one, dict) else one for one in said]
    return [text for text in texts if isinstance(text, str)]
