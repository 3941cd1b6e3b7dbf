"""Which prompt tokens the next pass computes. It chooses, the role acts."""

from __future__ import annotations

from collections.abc import Iterable

from engine.engine import Chunk
from prefill.request import PrefillRequest
from worker.trials import Trials

FULL_PASS = 2048  # tokens from which on a pass computes no faster a token (8B model on an H200)
LONG_PROMPT = 4096  # tokens; the blocks of such a prompt are pushed while its last few are computed
TAIL = 256  # tokens that are left for that: computing them takes longer than pushing 8,192 tokens' blocks (H200)


def next_chunks(requests: Iterable[PrefillRequest], token_budget: int, *, trials: Trials | None = None) -> list[Chunk]:
    """Choose a pass of admitted requests, oldest first: the first one's prompt up to `token_budget`, more while it is not full.

    Later prompts get what is missing to a full pass: in larger ones the first token of the first would wait for the others, and
    theirs come no earlier. Nobody joins the tail of a long prompt. A prompt goes on with its next chunk while the one before is
    in flight. Of those that may have killed a worker `trials` says who is held back.
    """
    chunks: list[Chunk] = []
    requests = [request for request in requests if _has_work(request)]
    held_back = (trials or Trials()).held_back([request.sequence for request in requests])
    room = token_budget
    for request in requests:
        if room <= 0:
            break
        if request.sequence in held_back:
            continue
        missing = request.sequence.num_unscheduled
        is_tail = not chunks and missing <= TAIL and request.sequence.num_tokens > LONG_PROMPT
        num_tokens = missing - TAIL if LONG_PROMPT < missing <= room else min(missing, room)
        chunks.append(request.sequence.schedule(num_tokens))
        token_budget -= num_tokens
        room = 0 if is_tail else min(token_budget, FULL_PASS - sum(chunk.num_tokens for chunk in chunks))
    return chunks


def _has_work(request: PrefillRequest) -> bool:
    """Whether a part of the prompt is in no pass yet: after the one that samples, the rest is the decode worker's."""
    is_sampled = request.first_token is not None or request.sequence.num_pending > 0
    return request.admitted and not request.stopped and not is_sampled
