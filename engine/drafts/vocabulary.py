"""The tokens of a tokenizer.json by their ids, for comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple


class Difference(NamedTuple):
    """A token that two vocabularies don't have in common; None: there is none of this id."""

    id: int
    here: str | None
    there: str | None


def tokens_of(raw: bytes) -> dict[int, str]:
    """Return each id's token, as it is stored, added ones too. Raises ValueError."""
    fields = json.loads(raw)
    vocab = fields["model"]["vocab"]
    tokens = {each: token for token, each in vocab.items()} if isinstance(vocab, dict) else dict(_numbered(vocab))
    return tokens | {added["id"]: added["content"] for added in fields.get("added_tokens") or ()}


def _numbered(vocab: list[tuple[str, float]]) -> list[tuple[int, str]]:
    """A unigram model's tokens, which are listed with their scores."""
    return [(number, token) for number, (token, _) in enumerate(vocab)]


def first_difference(here: Mapping[int, str], there: Mapping[int, str]) -> Difference | None:
    """Return the first id whose tokens differ."""
    differing = [each for each in {*here, *there} if here.get(each) != there.get(each)]
    if not differing:
        return None
    first = min(differing)
    return Difference(first, here.get(first), there.get(first))
