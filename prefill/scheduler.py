"""Which prompt tokens the next pass computes. Pure: it chooses, the role acts."""

from __future__ import annotations

from collections.abc import Iterable

from engine.engine import Chunk
from prefill.request import PrefillRequest


def next_chunks(requests: Iterable[PrefillRequest], token_budget: int) -> list[Chunk]:
    """Fill `token_budget` from admitted requests, oldest first; the last one may get only a part of its prompt (a chunk).

    Oldest first to the end, not round-robin: the first prompts finish earlier and none finishes later.
    """
    chunks: list[Chunk] = []
    for request in requests:
        if token_budget <= 0:
            break
        sequence = request.sequence
        missing = len(sequence.token_ids) - sequence.num_computed
        if not request.admitted or request.stopped or request.first_token is not None:
            continue
        num_tokens = min(missing, token_budget)
        chunks.append(Chunk(sequence=sequence, num_tokens=num_tokens, sample=num_tokens == missing))
        token_budget -= num_tokens
    return chunks
