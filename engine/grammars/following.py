"""The state of one sequence within its grammar.

V vocabulary. A mask is [V / 32] uint32: bit v % 32 of word v // 32 says whether token v may come next.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from copy import copy

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from common.messages import Grammar, SamplingParams

Mask = npt.NDArray[np.uint32]

EVERYTHING = np.uint32(0xFFFFFFFF)


class Following:
    """Tracks the generated tokens of one sequence. One thread at a time.

    If the grammar says what ends the reasoning, it begins there: the answer can't end, and after the budget must close it.
    """

    def __init__(
        self, grammar: Grammar, sampling: SamplingParams, matcher: LLMatcher | None, ends: ListOf[int]
    ) -> None:
        """`matcher`: None for a grammar without text. `ends`: the tokens by which it allows an answer to end."""
        self.num_followed = 0  # generated tokens
        self.problem = ""  # why there is no next token; the state is final then
        self.forced: dict[int, list[int]] = {}  # by generated tokens: those that the text must go on with
        self._matcher = matcher
        self._closing = grammar.after or []
        self._is_thinking = bool(self._closing)
        self._budget = grammar.budget
        self._tail: list[int] = []  # the reasoning's last tokens, at most as many as close it
        self._is_over = False
        self._stops = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._ends = ends
        self._allowed = grammar.allowed
        self._banned = grammar.banned
        self._kept = max(map(len, grammar.banned), default=0)  # tokens needed to detect banned runs
        self._newest: list[int] = []  # the last `_kept` tokens
        self._is_plain = self._stops == set(ends)  # the matcher's masks need no change

    @property
    def is_free(self) -> bool:
        """True if any token may come next, so that no mask is needed."""
        if self.problem or self._is_over:
            return True
        forces = self._is_thinking and self._budget is not None
        return not (self._matcher is not None or forces or self._allowed or self._banned)

    @property
    def asked(self) -> LLMatcher | None:
        """Return the matcher that must fill the next mask before `complete`; None: no matcher."""
        return None if self._is_thinking or self.is_free else self._matcher

    def follow(self, tokens: list[int]) -> None:
        """Advance by the next generated tokens."""
        self.num_followed += len(tokens)
        if self._banned:
            self._newest = [*self._newest, *tokens][-self._kept :]
        if not self._is_thinking:
            self._match(tokens)
            return
        for at, token in enumerate(tokens):
            if self.problem or self._is_over:
                return
            if not self._is_thinking:
                self._match(tokens[at:])
                return
            self._is_over = self._matcher is None and token in self._stops
            self._tail = [*self._tail, token][-len(self._closing) :]
            self._is_thinking = self._tail != self._closing

    def behind(self, token: int) -> Following:
        """The state after one more token, a drafted one; this one stays."""
        other = copy(self)
        if self._matcher is not None:
            other._matcher = self._matcher.deep_copy()
        other.follow([token])
        return other

    def _match(self, tokens: list[int]) -> None:
        """Advance the matcher; a stop token ends the answer and is not part of its text."""
        if self.problem or self._is_over:
            return
        if not self._stops.isdisjoint(tokens):
            tokens = tokens[: next(at for at, token in enumerate(tokens) if token in self._stops)]
            self._is_over = True
        if self._matcher is None or not tokens:
            return
        if min(tokens) < 0 or not self._matcher.consume_tokens(tokens):
            self._fail(self._matcher.get_error() or "a token outside the vocabulary")

    def complete(self, mask: Mask) -> None:
        """Complete the next `mask`, which `asked` filled, if any. If it is empty, call `ends_here`."""
        if self._is_thinking:
            self._complete_thinking(mask)
        elif self._matcher is not None and self._matcher.is_error():
            self._fail(self._matcher.get_error())
        elif self._matcher is None:
            mask[:] = EVERYTHING
            self._forbid_early_ends(mask)
        elif not self._is_plain or self.num_followed < self._min_tokens:
            self._complete_ends(mask)
        if self._allowed or self._banned:
            self._limit(mask)

    def look_ahead(self, at: Following) -> None:
        """Keep what the text must go on with behind `at`: this state or one behind drafted tokens."""
        matcher = at.asked
        forced = matcher.compute_ff_tokens() if matcher is not None else []
        self.forced = {**self.forced, at.num_followed: forced} if at is not self else {at.num_followed: forced}

    def ends_here(self) -> None:
        """Record that nothing may come next, not even the end."""
        if not self.problem:
            self._fail("no token of this vocabulary may come next")

    def _limit(self, mask: Mask) -> None:
        """Leave only allowed tokens, and none that would complete a banned run. Tokens that close the reasoning stay."""
        if self._is_thinking and self._budget is not None and self.num_followed >= self._budget:
            return
        if self._allowed:
            only = np.zeros_like(mask)
            _allow(only, self._allowed)
            mask &= only
        for *before, last in self._banned:
            if not before or self._newest[-len(before) :] == before:
                _forbid(mask, [last])

    def _complete_thinking(self, mask: Mask) -> None:
        if self._budget is not None and self.num_followed >= self._budget:
            mask[:] = 0
            _allow(mask, [self._closing[self._num_closed()]])
            return
        mask[:] = EVERYTHING
        if self._matcher is not None:
            _forbid(mask, self._stops)
        self._forbid_early_ends(mask)

    def _forbid_early_ends(self, mask: Mask) -> None:
        """Ban stop tokens without a matcher: the sampler leaves it to masks if a masked row may stop."""
        if self.num_followed < self._min_tokens:
            _forbid(mask, self._stops)

    def _num_closed(self) -> int:
        """Number of closing tokens at the reasoning's end."""
        longest = range(min(len(self._tail), len(self._closing) - 1), 0, -1)
        return next((count for count in longest if self._tail[-count:] == self._closing[:count]), 0)

    def _complete_ends(self, mask: Mask) -> None:
        """Let the request's stop tokens end the answer. Before `min_tokens`, only if nothing else may come next."""
        may_end = any(mask[token >> 5] >> np.uint32(token & 31) & 1 for token in self._ends)
        _forbid(mask, self._ends)
        if self.num_followed >= self._min_tokens:
            if may_end:
                _allow(mask, self._stops)
            return
        before = mask.copy()
        _forbid(mask, self._stops)
        if not mask.any():
            mask[:] = before
            if may_end:
                _allow(mask, self._stops)

    def _fail(self, why: str) -> None:
        self.problem = f"the grammar can't be followed: {next(iter(why.splitlines()), 'unknown')}"


def _allow(mask: Mask, tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token >> 5] |= np.uint32(1 << (token & 31))


def _forbid(mask: Mask, tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token >> 5] &= ~np.uint32(1 << (token & 31))
