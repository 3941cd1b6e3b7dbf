"""The choice of prompt tokens for the next pass (chunked prefill), and of prompts to give up. Decides only; the role acts.

Prompts whose first token can't come in time are given up: computing them would make later prompts late, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.engine import Chunk
from engine.sequence import Sequence
from prefill.request import PrefillRequest
from prefill.stop import Stop
from worker.device.costs import PromptCost
from worker.device.trials import Trials

# Passes above this size compute no faster a token (8B model on an H200).
FULL_PASS_TOKENS = 2048
# Longer prompts are cut before their tail, so that their blocks are pushed while the tail is computed.
LONG_PROMPT_TOKENS = 4096
# Computing the tail takes longer than pushing the blocks of 8,192 tokens (H200).
TAIL_TOKENS = 256


def next_chunks(
    requests: Iterable[PrefillRequest],
    token_budget: int,
    *,
    full_pass_tokens: int = FULL_PASS_TOKENS,
    trials: Trials | None = None,
    schedule: Callable[[Sequence, int], Chunk] = Sequence.schedule,
    cover: Callable[[Sequence, int], int] = lambda _, num_tokens: num_tokens,
) -> list[Chunk]:
    """Plan a pass of admitted requests, oldest first: up to `token_budget` of the first prompt, then filled up.

    Later prompts only fill up to a full pass: a larger one would delay the first prompt's token and bring theirs no earlier.
    Nobody joins the tail of a long prompt. A prompt goes on while its chunk before is in flight. `trials` holds suspects back;
    `schedule` makes a sequence's next tokens a chunk; `cover` takes what they need besides, and says for how many there was room.
    """
    chunks: list[Chunk] = []
    requests = [request for request in requests if _has_work(request)]
    held_back = (trials or Trials()).held_back([request.sequence for request in requests])
    room = token_budget
    for request in requests:
        if room <= 0:
            break
        if request.sequence in held_back or _scores_another(request, chunks):
            continue
        missing = request.sequence.num_next
        is_tail = not chunks and missing <= TAIL_TOKENS and request.sequence.num_tokens > LONG_PROMPT_TOKENS
        num_tokens = missing - TAIL_TOKENS if LONG_PROMPT_TOKENS < missing <= room else min(missing, room)
        num_tokens = cover(request.sequence, num_tokens)
        if not num_tokens:
            continue  # it depends on passes in flight, its own or others'
        chunks.append(schedule(request.sequence, num_tokens))
        token_budget -= num_tokens
        room = 0 if is_tail else min(token_budget, full_pass_tokens - sum(chunk.num_tokens for chunk in chunks))
    return chunks


def _scores_another(request: PrefillRequest, chunks: list[Chunk]) -> bool:
    """True if two prompts of the pass would be scored: the logits of one are enough."""
    return request.sequence.scores_prompt and any(chunk.scored for chunk in chunks)


def _has_work(request: PrefillRequest) -> bool:
    """True if part of the prompt is in no pass yet. After the sampled token the decode worker continues."""
    is_sampled = request.first_token is not None or request.sequence.num_pending > 0
    return request.admitted and not request.stopped and not is_sampled


class InFlight:
    """The prompt tokens of passes in flight, and since when the first of these passes runs."""

    def __init__(self) -> None:
        self._tokens = 0
        self._began_at = 0.0

    def launched(self, tokens: int, now: float) -> None:
        """A pass of so many tokens follows those in flight."""
        if not self._tokens:
            self._began_at = now
        self._tokens += tokens

    def landed(self, tokens: int, now: float) -> None:
        """The first of the passes is over, or a chunk of it: the next one runs."""
        self._tokens -= tokens
        self._began_at = now

    def over_at(self, now: float, cost: PromptCost) -> float:
        """The earliest instant at which a pass planned now begins."""
        return max(now, self._began_at + cost.least_s(self._tokens))


def stop_late(requests: Iterable[PrefillRequest], in_flight: InFlight, cost: PromptCost, now: float) -> None:
    """Give up the requests without a first token whose deadline is over, or will be before the token can come.

    The estimate is the best case, one pass of the prompt alone without context: nobody is given up who could be in time.
    """
    begins_at = in_flight.over_at(now, cost)
    for request in requests:
        if request.first_token is not None or request.stopped:
            continue
        if request.expired:
            request.stop(Stop.DEADLINE)
        elif request.admitted and not request.sequence.num_pending:  # before, nobody knows what is cached of it
            done_at = begins_at + cost.least_s(request.sequence.num_unscheduled)
            if done_at > request.claimed.first_token_by:
                request.stop(Stop.LATE)
