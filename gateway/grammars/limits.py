"""Limits on tokens throughout an answer: allowed ones, and banned words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from common.errors import InvalidRequestError
from common.messages import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """The client's limits. `bad_words` are texts."""

    allowed: Sequence[int] = ()
    bad_words: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.allowed or self.bad_words)

    def added_to(self, grammar: Grammar | None, encode: Callable[[str], list[int]], vocab_size: int) -> Grammar:
        """The grammar, or a free one, with these limits. `encode` makes plain tokens. Raises InvalidRequestError."""
        outside = [token for token in self.allowed if token >= vocab_size]
        if outside:
            raise InvalidRequestError(
                f"allowed_token_ids: token {outside[0]} is not in the vocabulary", param="allowed_token_ids"
            )
        banned: dict[tuple[int, ...], None] = {}
        for word in self.bad_words:
            banned |= dict.fromkeys(_runs(word, encode))
        return msgspec.structs.replace(
            grammar or Grammar(), allowed=list(dict.fromkeys(self.allowed)), banned=[list(run) for run in banned]
        )


NO_LIMITS = TokenLimits()


def _runs(word: str, encode: Callable[[str], list[int]]) -> list[tuple[int, ...]]:
    """Token runs that spell the word at an answer's beginning, and after a space."""
    return [tuple(encode(word)), tuple(encode(" " + word.lstrip()))]
