"""Long texts: a lower bound of their tokens, and positions where they can be split without changing a token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gateway.templates.template import TooLongError

PIECE_CHARS = 32_768
WHOLE_CHARS = 8 * PIECE_CHARS  # a longer piece is counted roughly first
CHARS_A_TOKEN = 4  # a guess
AT_CUTS = 256  # tokens that a split within a word may change, generously
ROUGH = 1.25  # maximum relative error of the rough count
_BETWEEN_WORDS = re.compile(r"[A-Za-z](?= [A-Za-z])")
_TOKEN_ACROSS = re.compile("[A-Za-z][ \u0120\u2581][A-Za-z]")  # with a space as BPE's bytes or SentencePiece write it
_SAMPLE = "the quick Brown fox's x y paws jump over 12 lazy Dogs and it re ally is so WIDE a world of ours"
_SPACES = str.maketrans("", "", " \t\r\n")
# Normalizer -> most bytes of text that may normalize to one.
_SHORTENS = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "Prepend": 1}
_KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts"}  # pre-tokenizers


class Lengths:
    """The bounds for one tokenizer. `described` is its tokenizer.json, `tokens` are all of its tokens."""

    def __init__(self, described: Mapping[str, Any], tokens: Iterable[str], encode: Callable[[str], list[int]]) -> None:
        tokens = list(tokens)
        byte_level = "ByteLevel" in {part["type"] for part in _parts(described.get("pre_tokenizer"), "pretokenizers")}
        longest = max((len(token) if byte_level else len(token.encode()) for token in tokens), default=1)
        shortens = _shortened(described) if byte_level or described["model"].get("byte_fallback") else None
        self._bytes_a_token = None if shortens is None else max(longest, _longest_added(described)) * shortens
        self._absorbs = any(token["lstrip"] or token["rstrip"] for token in described.get("added_tokens", ()))
        self._skips = None if _TOKEN_ACROSS.search("\n".join(tokens)) else _skipped_at_cuts(encode)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens; 0 if unknown."""
        if self._bytes_a_token is None:
            return 0
        parts = (text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS))
        if self._absorbs:
            parts = (part.translate(_SPACES) for part in parts)
        return -(-sum(len(part.encode("utf-8", "surrogatepass")) for part in parts) // self._bytes_a_token)

    def encoded(self, text: str, encode: Callable[[str], list[int]], limit: int | None) -> list[int]:
        """Tokens of a text, encoded in pieces. Raises TooLongError soon after `limit` is passed."""
        ids: list[int] = []
        for piece in self._pieces(text):
            if limit is not None and len(piece) > WHOLE_CHARS:
                _count_roughly(piece, encode, limit, len(ids))
            ids += encode(piece)
            if limit is not None and len(ids) > limit:
                raise TooLongError(f"at least {limit + 1} tokens")
        return ids

    def last(self, text: str, encode: Callable[[str], list[int]], count: int) -> list[int]:
        """The last `count` tokens of a text, encoding little more of it than they take."""
        pieces, found = [*self._pieces(text)], list[int]()
        while pieces and len(found) < count:
            found = _last(pieces.pop(), encode, count - len(found)) + found
        return found[-count:] if count else []

    def _pieces(self, text: str) -> Iterator[str]:
        """Split between words, where no token crosses."""
        start = 0
        if self._skips is not None:
            for at in range(PIECE_CHARS, len(text), PIECE_CHARS):
                found = _BETWEEN_WORDS.search(text, at, at + PIECE_CHARS) if at > start else None
                if found is not None:
                    yield text[start : found.end()]
                    start = found.end() + self._skips
        yield text[start:]


def _count_roughly(text: str, encode: Callable[[str], list[int]], limit: int, count: int) -> None:
    """Raise TooLongError if there are clearly too many tokens after the first `count`."""
    for start in range(0, len(text), PIECE_CHARS):
        count += len(encode(text[start : start + PIECE_CHARS]))
        if count > limit * ROUGH + PIECE_CHARS:
            raise TooLongError(f"at least {limit + 1} tokens")


def _last(piece: str, encode: Callable[[str], list[int]], count: int) -> list[int]:
    """At least the last `count` tokens. A piece's first tokens may differ from those in context, and are dropped."""
    chars = max(WHOLE_CHARS, CHARS_A_TOKEN * count)
    while chars < len(piece):
        ids = encode(piece[-chars:])
        if len(ids) >= count + AT_CUTS:
            return ids[AT_CUTS:]
        chars *= 4
    return encode(piece)


def _skipped_at_cuts(encode: Callable[[str], list[int]]) -> int | None:
    """Characters to drop after a split: a tokenizer may add the space itself. None: never split."""
    whole, cuts = encode(_SAMPLE), [found.end() for found in _BETWEEN_WORDS.finditer(_SAMPLE)]
    for skips in (0, 1):
        if all(encode(_SAMPLE[:cut]) + encode(_SAMPLE[cut + skips :]) == whole for cut in cuts):
            return skips
    return None


def _shortened(described: Mapping[str, Any]) -> int | None:
    """The most bytes of text that normalize to one byte. None: unbounded."""
    for part in _parts(described.get("pre_tokenizer"), "pretokenizers"):
        if part["type"] not in _KEEPS_ALL or part.get("behavior") == "Removed":
            return None
    factor = 1
    for part in _parts(described.get("normalizer"), "normalizers"):
        if part["type"] == "Replace" and len(part["content"]) >= len(
            part["pattern"].get("String", part["content"] + " ")
        ):
            continue
        if part["type"] not in _SHORTENS:
            return None
        factor *= _SHORTENS[part["type"]]
    return factor


def _parts(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer, which may be a sequence."""
    if step is None:
        return []
    return [part for one in step[inner] for part in _parts(one, inner)] if step["type"] == "Sequence" else [step]


def _longest_added(described: Mapping[str, Any]) -> int:
    return max((len(token["content"].encode()) for token in described.get("added_tokens", ())), default=1)
