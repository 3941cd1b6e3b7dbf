"""Vectors and weights of tokens: which of a text's tokens have one, what the nearest add up to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from modelfiles.late import Late, TokenHeads


def seen_of(tokens: Sequence[int], late: Late | None) -> int:
    """The number of a text's first tokens that the others see: not the padding behind a query."""
    count = len(tokens)
    if late is None or late.padding is None or late.padding_is_seen or count > late.query_length:
        return count
    while count > 1 and tokens[count - 1] == late.padding:
        count -= 1
    return count


def with_vectors(tokens: Sequence[int], late: Late | None, heads: TokenHeads | None) -> list[int]:
    """Places of the tokens that have a vector of their own: a document's but for what it skips; bge-m3's behind the first."""
    if heads is not None and heads.size:
        return list(range(1 if tokens[:1] == list(heads.ends[:1]) else 0, len(tokens)))
    is_document = late is not None and len(tokens) > 1 and tokens[1] == late.document
    skipped = late.skipped if late is not None and is_document else frozenset[int]()
    return [at for at, token in enumerate(tokens) if token not in skipped]


def with_weights(tokens: Sequence[int], heads: TokenHeads) -> list[int]:
    """Places of the tokens that have a weight: not those before and behind the text."""
    first, last = 0, len(tokens)
    if heads.ends and tokens[0] == heads.ends[0]:
        first = 1
    if last > first and len(heads.ends) > 1 and tokens[-1] == heads.ends[1]:
        last -= 1
    return list(range(first, last))


def lexical(tokens: Sequence[int], weights: torch.Tensor, heads: TokenHeads) -> torch.Tensor:
    """Return [words, 2]: number and greatest weight of each token above 0, by number. `weights`: [T, 1]."""
    found = dict[int, float]()
    for token, weight in zip(tokens, weights[:, 0].tolist(), strict=True):
        if weight > found.get(token, 0.0) and token not in heads.unweighted:
            found[token] = weight
    rows = [[float(token), weight] for token, weight in sorted(found.items())]
    return torch.tensor(rows, dtype=torch.float32).view(-1, 2)


def maxsim(query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    """Return [1, 1]: for each of a query's vectors [N, E] the greatest product with one of the document's [M, E], added up."""
    if not len(document):
        return query.new_zeros(1, 1)
    return (query @ document.T).amax(1).sum().view(1, 1)
