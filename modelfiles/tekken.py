"""A tekken.json (Mistral's tokenizer files since Nemo) as a tokenizer.json: byte pairs by rank, as in tiktoken."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from typing import Any

from modelfiles.byte_level import BYTE_CHARS
from modelfiles.sentencepiece import TokenizerFileError

TEKKEN = "tekken.json"
MAX_TOKENS = 1 << 20
MAX_TOKEN_BYTES = 512
BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"


def tokenizer_json(raw: bytes) -> dict[str, Any]:
    """Convert to a tokenizer.json. Raises TokenizerFileError."""
    try:
        described = json.loads(raw)
        config, listed = described["config"], described["vocab"]
        count, num_special = int(config["default_vocab_size"]), int(config["default_num_special_tokens"])
        pattern = str(config["pattern"])
        if not 256 <= count - num_special <= min(len(listed), MAX_TOKENS) or not 0 < num_special <= MAX_TOKENS:
            raise TokenizerFileError(
                f"{TEKKEN} has {len(listed)} tokens, and {count} with {num_special} special ones are named"
            )
        ranks = {base64.b64decode(entry["token_bytes"], validate=True): rank for rank, entry in _in_order(listed)}
        ranks = {token: rank for token, rank in ranks.items() if rank < count - num_special}
        special = _special(described.get("special_tokens"), num_special)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError, binascii.Error) as error:
        if isinstance(error, TokenizerFileError):
            raise
        raise TokenizerFileError(f"{TEKKEN} can't be read ({type(error).__name__})") from None
    if len(ranks) != count - num_special or max(map(len, ranks)) > MAX_TOKEN_BYTES:
        raise TokenizerFileError(f"{TEKKEN}: tokens are there twice, or have more than {MAX_TOKEN_BYTES} bytes")
    names = {token: "".join(map(BYTE_CHARS.__getitem__, token)) for token in ranks}
    vocabulary = dict(special)
    vocabulary |= {names[token]: rank + num_special for token, rank in ranks.items()}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(text, index) for text, index in special.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_split(pattern), _BYTES | {"use_regex": False}]},
        "post_processor": _around(special[BOS]),
        "decoder": _BYTES | {"use_regex": True},
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
            "ignore_merges": True,
            "vocab": vocabulary,
            "merges": [[names[left], names[right]] for left, right in _merges(ranks)],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """Names of the special tokens that every such file has."""
    return {"bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN}


def _in_order(listed: list[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for place, entry in enumerate(listed):
        if entry["rank"] != place:
            raise TokenizerFileError(f"{TEKKEN}: the rank {entry['rank']!r:.20} is at place {place}")
        yield place, entry


def _special(listed: object, count: int) -> dict[str, int]:
    """Special tokens with their ids, places without a name filled as by Mistral's own library."""
    if not isinstance(listed, list):
        raise TokenizerFileError(
            f"{TEKKEN} names no special tokens, as older ones: put the model's tokenizer.json beside it"
        )
    named = {int(each["rank"]): str(each["token_str"]) for each in listed}
    found = {named.get(index, f"<SPECIAL_{index}>"): index for index in range(count)}
    if len(found) != count or BOS not in found or len(named) != len(listed):
        raise TokenizerFileError(f"{TEKKEN}: special tokens are there twice, or lack {BOS}")
    return found


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """All pairs that make a token, by its rank, and then by theirs."""
    for token in ranks:
        ways = [
            (ranks[token[:cut]], ranks[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in ranks and token[cut:] in ranks
        ]
        for _, _, cut in sorted(ways):
            yield token[:cut], token[cut:]


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _added(text: str, index: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": text} | flags | {"special": True}


def _around(bos: int) -> dict[str, Any]:
    parts = [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [bos], "tokens": [BOS]}},
    }


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
