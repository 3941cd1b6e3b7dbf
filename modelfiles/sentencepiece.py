"""A SentencePiece model (tokenizer.model) in the terms of a GGUF file's tokenizer, which has the same pieces, scores and types.

The file is a protobuf message; four of its fields are read. Only byte-pair encodings, as Llama, Mistral and Gemma have them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

MODEL = "tokenizer.model"
MAX_PIECES = 1 << 20
_NUMBER = re.compile("[0-9]{1,9}")
_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_IDENTITY = ("", "identity")
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_BESIDE = "put the model's tokenizer.json beside it"


class TokenizerFileError(ValueError):
    """A tokenizer's file that can't be read, or has rules that are not known."""


def metadata_of(raw: bytes, config: Mapping[str, Any], added: Mapping[str, int]) -> dict[str, Any]:
    """The keys of `modelfiles.tokenizer`. `config`: tokenizer_config.json; `added`: further tokens. Raises TokenizerFileError."""
    try:
        pieces, trainer, normalizer = _read(raw)
        kind, ids = _value(trainer, 3, 1), {name: _value(trainer, number, default) for name, number, default in _IDS}
        rules, own_rules = _value(normalizer, 1, b"").decode("utf-8", "replace"), _value(normalizer, 2, b"")
        prepends, removes = _value(normalizer, 3, 1), _value(normalizer, 4, 1)
    except (struct.error, IndexError, UnicodeDecodeError):
        raise TokenizerFileError(f"{MODEL} is cut off, or no SentencePiece model") from None
    if not 0 < len(pieces) <= MAX_PIECES:
        raise TokenizerFileError(f"{MODEL} has {len(pieces)} pieces")
    if kind != _BPE:
        raise TokenizerFileError(f"{MODEL} is no byte-pair encoding: {_BESIDE}")
    if rules not in _IDENTITY or own_rules:
        raise TokenizerFileError(f"{MODEL} normalises text by rules of its own: {_BESIDE}")
    if removes:
        raise TokenizerFileError(f"{MODEL} removes spaces, which is not known: {_BESIDE}")
    tokens, scores, types = ([each[column] for each in pieces] for column in range(3))
    special = _special(config)
    for text, index in sorted(added.items(), key=lambda each: each[1]):
        if index != len(tokens):
            continue  # one of the pieces
        tokens.append(text)
        scores.append(0.0)
        types.append(_CONTROL if special.get(text, True) else _USER_DEFINED)
    known = {f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items() if 0 <= index < len(pieces)}
    return known | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": bool(prepends) and config.get("add_prefix_space") is not False,
        "tokenizer.ggml.add_bos_token": config.get("add_bos_token", True) is not False,
        "tokenizer.ggml.add_eos_token": config.get("add_eos_token", False) is True,
    }


# Names in GGUF, numbers in TrainerSpec and what they are if not given.
_IDS = (("unknown", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("padding", 43, -1))


def added_tokens(config: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, int]:
    """Tokens that tokenizer_config.json and added_tokens.json add."""
    found = {text: index for text, index in beside.items() if isinstance(index, int)}
    described = config.get("added_tokens_decoder")
    for index, token in described.items() if isinstance(described, dict) else ():
        if _NUMBER.fullmatch(str(index)) and isinstance(token, dict) and isinstance(token.get("content"), str):
            found[token["content"]] = int(index)
    return found


def _special(config: Mapping[str, Any]) -> dict[str, bool]:
    described = config.get("added_tokens_decoder")
    tokens = described.values() if isinstance(described, dict) else ()
    return {str(token.get("content")): token.get("special") is True for token in tokens if isinstance(token, dict)}


Fields = dict[int, Any]
Value = TypeVar("Value", int, float, bytes)


def _read(raw: bytes) -> tuple[list[tuple[str, float, int]], Fields, Fields]:
    """Pieces as (text, score, type), and the fields of TrainerSpec and NormalizerSpec."""
    pieces: list[tuple[str, float, int]] = []
    trainer: Fields = {}
    normalizer: Fields = {}
    for number, value in _fields(raw):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            piece = dict(_fields(value))
            pieces.append((_value(piece, 1, b"").decode(), _value(piece, 2, 0.0), _value(piece, 3, _NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    return pieces, trainer, normalizer


def _value(fields: Fields, number: int, default: Value) -> Value:
    """A field, or its default. Raises IndexError for one of another kind."""
    found = fields.get(number, default)
    if type(found) is not type(default):
        raise IndexError
    return found


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an int, bytes, or a float of 32 bits. Raises IndexError, struct.error."""
    at, end = 0, len(raw)
    while at < end:
        key, at = _varint(raw, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(raw, at)
            yield key >> 3, value - (1 << 64) if value >> 63 else value
        elif kind == _FIXED_32:
            yield key >> 3, struct.unpack_from("<f", raw, at)[0]
            at += 4
        elif kind == _FIXED_64:
            at += 8
        elif kind == _BYTES:
            length, at = _varint(raw, at)
            if at + length > end:
                raise IndexError
            yield key >> 3, raw[at : at + length]
            at += length
        else:
            raise IndexError


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError
