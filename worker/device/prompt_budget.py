"""The prompt budget: the number of prompt tokens that may join the next pass without delaying decoding too long.

Pure: it reads no clock and waits for nothing. Two rules share the work:

    size    a step gets the prompt tokens that cost least each while it stays within the target (`StepTargets`)
    turns   steps above the target run up a debt; while there is one, every second step has no prompts
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.engine import Chunk
from worker.device.costs import NOTHING, PromptCost, StepCost, Waited, pairs_of
from worker.device.step_policy import StepPolicy

LEAST_IN_STAGES = 512  # tokens of a pass in stages, with rows that decode


@dataclass(frozen=True, slots=True)
class PassLoad:
    """The load of one pass."""

    decoding: int = 0  # rows that sample a token, also behind drafted ones
    prompt_tokens: int = 0
    pairs: float = 0.0  # sum of prompt tokens times their context: the work of attention

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> PassLoad:
        decoding = prompt_tokens = 0
        pairs = 0.0
        for chunk in chunks:
            if chunk.decodes and chunk.sample:
                decoding += chunk.num_tokens
            else:
                prompt_tokens += chunk.num_tokens
                pairs += pairs_of(chunk.start, chunk.end)
        return cls(decoding, prompt_tokens, pairs)


class PromptBudget:
    """Bounds the prompt tokens of a pass by total tokens and predicted time."""

    def __init__(
        self,
        *,
        token_budget: int,
        target_ms: float = 0.0,
        pass_ms: Mapping[tuple[int, int], float] | None = None,
        draft_ms: Mapping[int, float] = NOTHING,
        policy: StepPolicy | None = None,
    ) -> None:
        """`target_ms`: average of steps with prompts; 0 = no bound. `pass_ms`, `draft_ms`: see `StepCost`."""
        self.token_budget = token_budget
        self.target_ms = target_ms
        self._policy = policy or StepPolicy()
        alone_s = {tokens: ms / 1000 for (slots, tokens), ms in (pass_ms or {}).items() if not slots}
        self.prompt_cost = PromptCost(alone_s)  # passes with prompts alone
        self.step_cost = StepCost(pass_ms or {}, self._policy.sizes, self._policy.averaging, draft_ms)
        self.launch_s = 0.0  # host time of an uncaptured pass; of a stage's part
        self._first_rate = self.prompt_cost.tokens_per_s  # timed one pass after the other
        self.follows_goals = False  # whether the target is only a comfortable step, which goals may exceed
        self._credit_ms = 0.0
        self._num_decoding = 1  # the newest step's
        self._took_prompts = False  # True if the newest planned step has prompts

    @property
    def credit_ms(self) -> float:
        """Time by which the last steps undercut the target; below 0 it is a debt."""
        return self._credit_ms

    @property
    def local_tokens_per_s(self) -> float:
        """Prompt tokens a second in steps that meet the target; 0 = not measured yet."""
        if not self.target_ms:
            return self.prompt_cost.average_tokens_per_s
        tokens, ms = self._share(self._num_decoding, context=None)
        turns = self._turns(ms)
        return 1000 * turns * tokens / (turns * ms + (1 - turns) * self.step_cost.bare_ms) if ms else 0.0

    def tokens(self, backlog: int = 0, *, decoding: int = 1, context: int | None = None) -> int:
        """Prompt tokens that the next pass may compute beside `decoding` sequences.

        0 `decoding`: only a handoff may arrive meanwhile. `backlog`: waiting prompt tokens; many of them raise the budget.
        `context`: positions before the prompt's next token, if known.
        """
        if not self.target_ms:
            return self.token_budget
        tokens = self._share(decoding, context=context)[0] if decoding else self._arrival_share()
        if decoding and self._took_prompts and self._credit_ms < 0:
            tokens = 0
        pressing = (backlog - self._policy.backlog.max_waiting_tokens) // self._policy.backlog.passes
        return min(self.token_budget, max(tokens, pressing))

    def in_stages(self, stages: int, backlog: int) -> int:
        """Tokens of a pass with which `backlog` waiting prompt tokens leave the last of the stages soonest.

        N passes of S stages take N + S - 1 turns, and each turn has the fixed part of a pass. Fewer tokens than a stage
        computes while its host launches a pass gain nothing. The passes are of about the same size.
        """
        cost = self.prompt_cost
        if stages == 1 or not cost.tokens_per_s:
            return self.token_budget
        best = math.sqrt(backlog * cost.fixed_ms / 1000 * cost.tokens_per_s / (stages - 1))
        least = max(LEAST_IN_STAGES, self.launch_s * stages * self._first_rate)
        passes, tile = max(1, round(backlog / max(best, least))), self._policy.sizes.tile_tokens
        return min(self.token_budget, max(LEAST_IN_STAGES, -(-backlog // passes // tile) * tile))

    def slots(self, decoding: int) -> int:
        """Slots of a step with `decoding` sequences."""
        return self._policy.sizes.slots(decoding)

    def pass_s(self, tokens: int, *, decoding: int, context: int) -> float:
        """Predicted seconds of `decoding` sequences and so many prompt tokens, the first behind `context` positions.

        The weights are read once for both, and rows of either go through the same products; 0 = not measured yet.
        """
        rows = self.step_cost.rows
        own_s = max(0.0, rows.ms(decoding) - rows.ms(1)) / 1000
        return own_s + self.prompt_cost.seconds(tokens + decoding, tokens * (context + tokens / 2))

    def planned(self, *, decoding: int, prompt_tokens: int) -> None:
        self._num_decoding = decoding
        self._took_prompts = prompt_tokens > 0

    def measured(
        self, load: PassLoad, seconds: float, *, after_idling: bool = False, waited: Waited | None = None
    ) -> None:
        """Learn from a finished pass. `after_idling`: the device was idle before it. `waited`: see `StepCost.add_bare`."""
        ms = 1000 * seconds
        if load.decoding:
            turns, credit_ms = self._policy.turns, self._credit_ms + self.target_ms - ms
            self._credit_ms = min(turns.max_credit_ms, max(-turns.max_debt_ms, credit_ms))
        if not load.prompt_tokens:
            self.step_cost.add_bare(ms, rows=load.decoding, waited=waited)
        elif not load.decoding:
            self.prompt_cost.add(load.prompt_tokens, load.pairs, seconds, after_idling=after_idling)
        else:
            self.step_cost.add_mixed(
                decoding=load.decoding,
                prompt_tokens=load.prompt_tokens,
                context=load.pairs / load.prompt_tokens,
                seconds=seconds,
            )

    def _arrival_share(self) -> int:
        """Whole tiles that take about as long as an arriving handoff may wait."""
        tokens = int(self._policy.backlog.arrival_pass_s * self.prompt_cost.average_tokens_per_s)
        return tokens - tokens % self._policy.sizes.tile_tokens or self.token_budget

    def _share(self, decoding: int, *, context: int | None) -> tuple[int, float]:
        """Prompt tokens for a step of `decoding` sequences, and its predicted ms; 0 ms = not measured yet."""
        slots = self._policy.sizes.slots(decoding)
        predicted = self.step_cost.predicted_ms(slots, context)
        return self._cheapest(predicted) if predicted else self._by_rate(slots)

    def _cheapest(self, predicted: Mapping[int, float]) -> tuple[int, float]:
        """Among sizes within the target, the one with the least time a token; else the shortest step."""
        fitting = [tokens for tokens, ms in predicted.items() if ms <= self.target_ms]
        best = max(fitting or [min(predicted)], key=lambda tokens: tokens / predicted[tokens])
        return best, predicted[best]

    def _by_rate(self, slots: int) -> tuple[int, float]:
        """The whole tiles that fit by the measured rate, for batch sizes without timed steps."""
        sizes, bare_ms, rate = self._policy.sizes, self.step_cost.bare_ms, self.step_cost.prompt_tokens_per_s
        tokens = sizes.unmeasured_prompt_tokens
        if rate:
            tokens = int(sizes.rounding_ratio * (self.target_ms - bare_ms) / 1000 * rate)
        whole = tokens + slots - (tokens + slots) % sizes.tile_tokens - slots
        tokens = min(self.token_budget, max(sizes.min_prompt_tokens, whole))
        return tokens, bare_ms + 1000 * tokens / rate if rate else 0.0

    def _turns(self, mixed_ms: float) -> float:
        """The share of steps with prompts (`mixed_ms` each) at which the average step meets the target."""
        if mixed_ms <= self.target_ms:
            return 1.0
        room_ms, added_ms = self.target_ms - self.step_cost.bare_ms, mixed_ms - self.step_cost.bare_ms
        return max(self._policy.turns.min_share, min(1.0, room_ms / max(added_ms, 0.001)))
