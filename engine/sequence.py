"""A request inside a worker: its tokens, its blocks, and the computed part of its KV.

The next pass is planned while the device computes one. A sequence therefore has three frontiers:

    num_computed <= num_scheduled <= len(token_ids) + num_pending
    (finished passes)  (launched too)      (tokens that a pass in flight will sample count as known)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from common.messages import NO_KEEP, Grammar, Keep, PromptLogprobs, SamplingParams
from common.words import Finish
from engine.groups import Table

# Tokens of a chunk whose prompt is scored: each needs logits over the whole vocabulary.
MAX_SCORED_TOKENS = 64


@dataclass(slots=True, eq=False)
class Hold:
    """The wish under which a sequence's blocks are released: one state of a session, if it names one."""

    keep: Keep
    tier: int = 0  # the sign of the request's priority
    until: float = -math.inf  # since the last release, unless a newer state superseded this one
    blocks: dict[int, None] = field(default_factory=dict)  # ordered by their release
    num_handed_on: int = 0  # blocks that newer states of the session have now
    is_timed: bool = False
    request_id: str = ""

    @classmethod
    def of(cls, keep: Keep, priority: int, request_id: str = "") -> Hold | None:
        """The hold of a request; None if it says nothing."""
        tier = (priority > 0) - (priority < 0)
        return cls(keep, tier, request_id=request_id) if tier or keep != NO_KEEP else None

    def follows(self, other: Hold) -> bool:
        """True if both are states of one session."""
        return bool(self.keep.session) and self.keep.session == other.keep.session


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Sequence:
    """A sequence, changed by the worker's event loop only; the engine's thread reads it by a chunk's positions.

    There is one table for each group of the pool's layout. Tables cover every scheduled position. They keep the entries that a
    pass in flight reads or writes.
    """

    request_id: str
    attempt: int
    token_ids: list[int]  # prompt and generated
    num_prompt_tokens: int
    sampling: SamplingParams
    hash_root: bytes
    tables: list[Table] = field(default_factory=list)  # empty: it has no blocks
    num_computed: int = 0  # leading tokens whose KV is in the pool
    num_scheduled: int = 0  # the same, including passes in flight
    num_pending: int = 0  # tokens sampled by passes in flight
    num_cached: int = 0  # leading tokens whose KV came from the prefix cache
    num_found: int | None = None  # the same at its first admission
    num_stateless: int = 0  # tokens behind those whose KV was cached, but no state
    digests: list[bytes] = field(default_factory=list)  # leading full blocks published so far
    known_digests: list[bytes] = field(default_factory=list)  # leading full blocks, hashed when it waits or is admitted
    branches: tuple[int, ...] = ()  # tokens behind which other prompts may go on
    suspect_until: int = 0  # generated tokens that clear a suspect; see `worker.device.trials`
    prompt_logprobs: PromptLogprobs | None = None  # as far as known
    grammar: Grammar | None = None
    speculation: int = -1  # most drafted tokens of a pass; -1: the worker's
    drafts_from: int = 0  # generated tokens at which a pause of its drafts ends
    proposed: tuple[int, tuple[int, ...]] = (0, ())  # by a draft head: known tokens then, and drafted ones
    prediction: list[int] = field(default_factory=list)  # tokens that the client expects in the answer
    hold: Hold | None = None  # what its request says about keeping its blocks cached

    @property
    def num_tokens(self) -> int:
        """Known tokens plus those sampled by passes in flight."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_unscheduled(self) -> int:
        """Tokens that are in no pass yet."""
        return self.num_tokens - self.num_scheduled

    @property
    def num_next(self) -> int:
        """Tokens that the next pass may compute."""
        return min(self.num_unscheduled, MAX_SCORED_TOKENS) if self.scores_prompt else self.num_unscheduled

    @property
    def scores_prompt(self) -> bool:
        """True if prompt logprobs are wanted and not known yet. Such a prompt is computed whole, cached or not."""
        return self.sampling.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt_tokens

    @property
    def num_generated(self) -> int:
        """Known generated tokens, across attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_suspect(self) -> bool:
        """True if it may have killed a worker and has not passed `suspect_until`."""
        return self.num_generated < self.suspect_until

    def found(self, num_tokens: int, *, stateless: int = 0) -> None:
        """Record the prefix hit at its first admission; later ones include its own blocks."""
        self.num_cached = num_tokens
        if self.num_found is None:
            self.num_found, self.num_stateless = num_tokens, stateless

    def schedule(self, num_tokens: int, drafted: tuple[int, ...] = ()) -> Chunk:
        """Schedule the next `num_tokens` positions for a pass; reaching the last token samples the next.

        `drafted`: a guess at what follows the last token, none of which is pending. The pass verifies it, and until `finish`
        nothing else of the sequence can be scheduled.
        """
        chunk = Chunk(
            sequence=self,
            start=self.num_scheduled,
            num_tokens=num_tokens + len(drafted),
            sample=self.num_scheduled + num_tokens == self.num_tokens,
            scored=self._num_scored(num_tokens) if self.scores_prompt else 0,
            drafted=drafted,
        )
        self.num_scheduled = chunk.end
        self.num_pending += chunk.sample
        return chunk

    def _num_scored(self, num_tokens: int) -> int:
        """The number of next positions whose next token is known: all but the prompt's last."""
        last = self.num_prompt_tokens - 1
        return max(0, min(self.num_scheduled + num_tokens, last) - self.num_scheduled)

    def scored(self, chunk: Chunk, logprobs: PromptLogprobs) -> None:
        """Store prompt logprobs of a chunk; a restarted prompt finds the same again."""
        known = self.prompt_logprobs
        self.prompt_logprobs = known.first(chunk.start).then(logprobs) if known is not None else logprobs

    def finish(self, chunk: Chunk, num_accepted: int = 0) -> None:
        """Record the end of a pass with `chunk`: its KV is in the pool. Sampled tokens go to `append`.

        The next pass goes on after the accepted drafts and overwrites the KV of the others.
        """
        end = chunk.end - len(chunk.drafted) + num_accepted
        self.num_computed = max(self.num_computed, end)
        if chunk.drafted:
            self.num_scheduled = end

    def append(self, token_id: int) -> None:
        """Add a sampled token; the next pass computes its KV."""
        self.token_ids.append(token_id)
        if self.num_pending:
            self.num_pending -= 1

    def propose(self, drafts: tuple[int, ...]) -> None:
        """Keep what a draft head expects behind the known tokens."""
        self.proposed = len(self.token_ids), drafts

    def restart(self, num_computed: int) -> None:
        """Keep only the first `num_computed` positions; no pass is in flight."""
        self.num_computed = self.num_scheduled = num_computed
        self.num_pending = 0

    def finish_reason(self) -> Finish:
        """Return STOP after a stop token, LENGTH at `max_tokens`, else NONE."""
        num_generated, sampling = len(self.token_ids) - self.num_prompt_tokens, self.sampling
        if num_generated > 0 and self.token_ids[-1] in sampling.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if num_generated >= sampling.max_tokens else Finish.NONE


class Chunk(msgspec.Struct, frozen=True):
    """One sequence's share of a pass: positions [start, start + num_tokens), the drafted tokens' included."""

    sequence: Sequence
    start: int
    num_tokens: int
    sample: bool  # the chunk ends at the last token: sample the next one
    scored: int = 0  # leading positions: how likely was the next token?
    drafted: tuple[int, ...] = ()  # after the sequence's own tokens; one is sampled behind each

    @property
    def end(self) -> int:
        """The position after the chunk, which is the context length then."""
        return self.start + self.num_tokens

    @property
    def decodes(self) -> bool:
        """True if each of its tokens is a row of the decode step: such chunks come first in a pass."""
        return self.num_tokens == 1 or bool(self.drafted)

    @property
    def rows(self) -> list[Chunk]:
        """The chunk in rows of a decode step, with a context of its own each; a chunk without drafts is one row."""
        if not self.drafted:
            return [self]
        return [
            Chunk(self.sequence, self.start + at, 1, sample=True, drafted=self.drafted[:at])
            for at in range(self.num_tokens)
        ]

    def known_tokens(self, newest: Mapping[Sequence, int]) -> list[int]:
        """Return the tokens up to the chunk's end; `newest` has the last one if neither sequence nor draft has it."""
        tokens = [*self.sequence.token_ids[: self.end], *self.drafted]
        if len(tokens) < self.end:
            tokens.append(newest[self.sequence])
        return tokens

    @property
    def sampled_index(self) -> int:
        """The number of generated tokens before the sampled one: the counter of its random numbers."""
        return self.end - self.sequence.num_prompt_tokens
