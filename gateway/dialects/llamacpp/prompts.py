"""A completion's prompts: a text, token ids, both mixed, or several of these."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from gateway.answers.ask import Joined, Text, TokenIds
from gateway.answers.start import MAX_SEQUENCES

Prompts = list[Text | TokenIds | Joined]
_FORMS = "must be a text, token ids, a list of both, or a list of prompts"


def prompts_of(said: Any) -> Prompts:
    """Raises ValueError."""
    if not isinstance(said, list) or _is_one(said):
        return [_one(said)]
    if len(said) > MAX_SEQUENCES:
        raise ValueError(f"at most {MAX_SEQUENCES} prompts are allowed")
    return [_one(entry) for entry in said]


def _is_one(said: list[Any]) -> bool:
    """True if a list is one prompt: several texts alone are several prompts."""
    kinds = set(map(type, said))
    return not kinds or int in kinds


def _one(said: Any) -> Text | TokenIds | Joined:
    match said:
        case str():
            return Text(said)
        case {"prompt_string": str(text), **others}:
            if others.get("multimodal_data"):
                raise ValueError("only text is read: leave multimodal_data out")
            return Text(text)
        case [_, *_] if set(map(type, said)) == {int}:
            if min(said) < 0 or max(said) >= 2**32:
                raise ValueError("a token's id is 0 to 4294967295")
            return TokenIds(said)
        case [_, *_] if set(map(type, said)) == {int, str}:
            return _mixed(said)
    raise ValueError(_FORMS)


def _mixed(said: list[Any]) -> Joined:
    """Tokenise a mixed prompt; only a leading text gets BOS."""
    parts: list[Text | TokenIds] = []
    for kind, run in groupby(said, type):
        if kind is int:
            (ids,) = prompts_of(list(run))
            assert isinstance(ids, TokenIds)
            parts.append(ids)
        else:
            parts += [Text(text, adds_special=not parts and index == 0) for index, text in enumerate(run)]
    return Joined(parts)
