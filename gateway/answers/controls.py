"""Encoding of prompts such that only the template's own text becomes control tokens.

A tokenizer finds its added tokens in any text. A second one shares its vocabulary and rules, but knows control tokens by secret
names only, which what the template wrote gets.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gateway.templates.shade import Shade

_PRIVATE = range(0xE000, 0xF900)  # code points of secret names, which no normalizer changes
_FIRST_NUMBER = 0xF0000
_NAME_CHARS = 10
FEW_KINDS = 4
_WORDS = frozenset("▁'-_")
_BARS = re.compile(r"^[<\[]*[|｜]|[|｜][>\]]*$")


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


def _byte_chars() -> dict[int, str]:
    """GPT-2's byte table: printable bytes map to themselves, others to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


BYTE_CHARS = _byte_chars()
