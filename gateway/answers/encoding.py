"""Encoding prompts such that only the template's own text becomes control tokens, and long texts piece by piece.

A tokenizer finds its added tokens in any text. A second one shares its vocabulary and rules, but knows control tokens by secret
names only, which what the template wrote gets.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gateway.templates.shade import Shade
from gateway.templates.template import TooLongError
from modelfiles.byte_level import BYTE_CHARS

_PRIVATE = range(0xE000, 0xF900)  # code points of secret names, which no normalizer changes
_FIRST_NUMBER = 0xF0000
_NAME_CHARS = 10
FEW_KINDS = 4
_WORDS = frozenset("▁'-_")
_BARS = re.compile(r"^[<\[]*[|｜]|[|｜][>\]]*$")
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


class ControlTokens:
    """The control tokens of a tokenizer: special ones, and other added ones that delimit parts of prompts or answers, such as
    `<think>`. Others, such as Gemma's `<div>`, are words. Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer, model: Mapping[str, Any], named: str) -> None:
        """`model`: the one of tokenizer.json; `named`: the texts of the chat template and of the answer's parser."""
        added = tokenizer.get_added_tokens_decoder()
        controls = {token.content: index for index, token in added.items() if _is_control(token, named)}
        self.ids = frozenset(controls.values())
        self.shade = Shade(controls)
        self._tokenizer = tokenizer
        secret = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(_NAME_CHARS))
        self._names = {text: secret + chr(_FIRST_NUMBER + number) for number, text in enumerate(controls)}
        own = Tokenizer(tokenizer.model).get_vocab().values()
        # New tokens are numbered from the vocabulary's size on, which may have gaps.
        gaps = [f"{secret}{number}" for number in range(max(own, default=-1) + 1 - len(own))]
        self._plain = self._without_controls(added, gaps)
        # Control tokens whose ids differ in the second tokenizer.
        others = {self._plain.token_to_id(name): controls[text] for text, name in self._names.items()}
        others |= {
            found: index
            for index, token in added.items()
            if token.content not in controls and (found := self._plain.token_to_id(token.content)) != index
        }
        self._renumbered = {found: index for found, index in others.items() if found is not None}
        self._from_text = self.ids.intersection(own) - _unknown(tokenizer, model)
        empty, one = (tokenizer.encode(text, add_special_tokens=True).ids for text in ("", "a"))
        before = next((at for at, pair in enumerate(zip(empty, one, strict=False)) if pair[0] != pair[1]), len(empty))
        self.around = empty[:before], empty[before:]

    def named(self, shaded: str, plain: str) -> str:
        """A rendered prompt with control tokens replaced by their secret names."""
        pieces, end = [], 0
        for start, stop in self.shade.controls(shaded):
            pieces += [plain[end:start], self._names[plain[start:stop]]]
            end = stop
        return "".join([*pieces, plain[end:]])

    def encode_named(self, text: str) -> list[int]:
        """Tokens of a text in which only secret names are control tokens."""
        ids = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._from_text.isdisjoint(ids):
            ids = [part for index in ids for part in (self._spelled(index) if index in self._from_text else (index,))]
        return self._numbered(ids)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """First and last character of each token of a text without control tokens."""
        return self._plain.encode_batch([text], add_special_tokens=False)[0].offsets

    def _numbered(self, ids: list[int]) -> list[int]:
        """Map ids to the first tokenizer's. Most prompts have few kinds of differing tokens."""
        found, places = self._renumbered.keys() & set(ids), list[tuple[int, int]]()
        if len(found) > FEW_KINDS:
            return [self._renumbered.get(index, index) for index in ids]
        for index in found:
            at = -1
            for _ in range(ids.count(index)):
                at = ids.index(index, at + 1)
                places.append((at, self._renumbered[index]))
        for at, own in places:  # after all were found: an id may be another's
            ids[at] = own
        return ids

    def _spelled(self, index: int) -> Iterator[int]:
        """A control token found in user text, spelled as tokens of its characters or bytes."""
        for character in self._tokenizer.id_to_token(index) or "":
            bytes_of_it = character.encode()
            for names in (
                (character,),
                map(BYTE_CHARS.__getitem__, bytes_of_it),
                map("<0x{:02X}>".format, bytes_of_it),
            ):
                found = [self._tokenizer.token_to_id(name) for name in names]
                if None not in found:
                    yield from filter(None.__ne__, found)
                    break

    def _without_controls(self, added: Mapping[int, AddedToken], gaps: list[str]) -> Tokenizer:
        plain = Tokenizer(self._tokenizer.model)  # shares the vocabulary
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(self._tokenizer, part) is not None:
                setattr(plain, part, getattr(self._tokenizer, part))
        plain.add_tokens(gaps)
        plain.add_tokens(
            [self._renamed(token) if token.content in self._names else token for _, token in sorted(added.items())]
        )
        return plain

    def _renamed(self, token: AddedToken) -> AddedToken:
        return AddedToken(
            self._names[token.content],
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=False,
            normalized=token.normalized and self._is_found_within_text(token),
            special=False,
        )

    def _is_found_within_text(self, token: AddedToken) -> bool:
        """True if normalizing leaves the token's name unchanged."""
        normalizer = self._tokenizer.normalizer
        name = self._names[token.content]
        return normalizer is None or normalizer.normalize_str(name) == name


def _is_control(token: AddedToken, named: str) -> bool:
    """True for tokens with bars, such as `<|fim_prefix|>`, and for the other end of a named pair."""
    text = token.content
    if not text.strip("▁ \t\r\n"):
        return False
    if token.special or _BARS.search(text):
        return True
    if all(one.isalnum() or one.isspace() or one in _WORDS for one in text):
        return False
    other = text.replace("/", "", 1) if text[1:2] == "/" else f"{text[0]}/{text[1:]}"
    return text in named or other in named


def _unknown(tokenizer: Tokenizer, model: Mapping[str, Any]) -> frozenset[int]:
    """The unknown token: any text may contain it."""
    by_name = tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else None
    return frozenset(index for index in (by_name, model.get("unk_id")) if index is not None)


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
