"""Which prompt tokens the next pass computes. It chooses, the role acts."""

from __future__ import annotations

from collections.abc import Iterable

from engine.engine import Chunk
from prefill.request import PrefillRequest


def next_chunks(requests: Iterable[PrefillRequest], token_budget: int) -> list[Chunk]:
    """Fill `token_budget` from admitted requests, oldest first; the last one may get only a part of its prompt (a chunk).

    Oldest first to the end, not round-robin: the first prompts finish earlier and none finishes later. A prompt goes on
    with its next chunk while the one before is in flight.
    """
    chunks: list[Chunk] = []
    for request in requests:
        if token_budget <= 0:
            break
        if not _has_work(request):
            continue
        num_tokens = min(request.sequence.num_unscheduled, token_budget)
        chunks.append(request.sequence.schedule(num_tokens))
        token_budget -= num_tokens
    return chunks


def _has_work(request: PrefillRequest) -> bool:
    """Whether a part of the prompt is in no pass yet: after the one that samples, the rest is the decode worker's."""
    is_sampled = request.first_token is not None or request.sequence.num_pending > 0
    return request.admitted and not request.stopped and not is_sampled
