"""The order of prompts and the size of a pass, by what its requests want: goals in, steps out.

A prompt is *due* when its goal says so, and a stream has *slack* as far as it is ahead of its pace. A pass takes as many prompt
tokens as fit into a comfortable step. Where prompts would be late at that rate, it takes the number, within the slack, that
makes them least late. Nothing moves a prompt's turn but lateness, by one goal, so nobody waits for ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from common.messages import Goal
from decode.request import DecodeRequest
from engine.sequence import Sequence
from worker.device.prompt_budget import PromptBudget

AIM = 0.25  # share of the time until a prompt is due
AGEING = 4.0  # a prompt's computing time counts so many times
PACE = 0.8  # share of a stream's goal for each token
AHEAD_TOKENS = 4  # a stream may wait for what its next tokens win back
SIZES = (128, 256, 384, 512, 768, 1024, 1536, 2048)  # rows of a pass: streams and prompt tokens
COMFORTABLE_ROWS = 512  # larger steps are hardly faster a token
LEAST_PROMPT_TOKENS = 64  # prompts advance whatever the pace
MOST_PROMPTS = 64  # the first ones decide
MANY_TOKENS = 1 << 30
NO_HURRY_S = 10.0  # from the claim until a prompt without a goal is due
NO_HURRY_TOKEN_S = 0.05  # the pace of a stream without one
USUAL = Goal(ttft_ms=1000.0, tpot_ms=50.0)  # gateways of release 0.1.0 send none
# Goals count within these bounds, so that none is a priority of its own.
LEAST_GOAL_S, MOST_GOAL_S = 0.05, NO_HURRY_S / 2


@dataclass(slots=True)
class Plan:
    """A pass being planned."""

    token_budget: int  # tokens left in the pass
    turns: dict[DecodeRequest, float]  # prompts in order
    shares: dict[DecodeRequest, int] = field(default_factory=dict)  # tokens of each
    left_out: set[DecodeRequest] = field(default_factory=set)  # preempted now, or by the next plan
    is_bounded: bool = False  # prompt tokens are limited already
    is_short: bool = False  # a request found no block
    is_full: bool = False  # a waiting request was not admitted
    has_preempted: bool = False
    waits_for_blocks: bool = False  # keeps freed blocks for the waiting request

    def scores_another(self, request: DecodeRequest) -> bool:
        """True if another prompt of the pass is scored, too: the logits of one are enough."""
        return request.sequence.scores_prompt and any(other.sequence.scores_prompt for other in self.shares)

    def add(self, request: DecodeRequest, num_tokens: int) -> None:
        self.shares[request] = num_tokens
        self.token_budget -= num_tokens

    def leave_out(self, request: DecodeRequest) -> None:
        self.left_out.add(request)
        self.token_budget += self.shares.pop(request, 0)


class Pacing(Protocol):
    """The scheduler's view of goals."""

    def turn(self, request: DecodeRequest) -> float:
        """Rank a prompt: the lowest is computed first, among equals the oldest."""
        ...

    def tokens(self, streams: ListOf[DecodeRequest], prompts: ListOf[DecodeRequest], *, context: int | None) -> int:
        """Prompt tokens of the next pass. `streams` are in it; without any, only a handoff may arrive meanwhile.

        `prompts`: all others, the first ones first. `context`: positions before the first one's next token, if known.
        """
        ...

    def tokens_alone(self) -> int:
        """Prompt tokens of a pass beside which nothing waits."""
        ...


@dataclass(frozen=True, slots=True)
class Due:
    """A prompt in its turn: its rest, and the seconds from now until its first token is due."""

    tokens: int
    due_s: float
    goal_s: float


def lateness(prompts: Iterable[Due], tokens_per_s: float) -> float:
    """The time by which prompts would miss their aims at this rate, in goals."""
    total, late = 0, 0.0
    for prompt in prompts:
        total += prompt.tokens
        beyond_s = total / tokens_per_s - AIM * max(0.0, prompt.due_s)
        if beyond_s > 0:
            late += beyond_s / prompt.goal_s
    return late


def best_size(pass_s: Mapping[int, float], prompts: ListOf[Due], *, comfortable_s: float, slack_s: float) -> int:
    """Prompt tokens of the next pass, of sizes that take `pass_s` each, in rising order.

    The one with the least time a token within the comfortable time, unless a larger one within the streams' slack makes prompts
    less late.
    """
    fitting = [tokens for tokens, seconds in pass_s.items() if seconds <= comfortable_s and tokens <= COMFORTABLE_ROWS]
    best = max(fitting, key=lambda tokens: tokens / pass_s[tokens], default=min(pass_s))
    least = lateness(prompts, best / pass_s[best])
    for tokens, seconds in pass_s.items():
        if not least:
            break
        if tokens > best and seconds <= slack_s:
            late = lateness(prompts, tokens / seconds)
            if late < least:
                best, least = tokens, late
    return best


class GoalPacing:
    """Paces a scheduler by its requests' goals and the device's costs; a fixed step target leaves only the order to it."""

    def __init__(self, budget: PromptBudget, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock

    def turn(self, request: DecodeRequest) -> float:
        """The instant by which a prompt counts; one that can't be in time counts a goal later."""
        if request.sequence.num_generated:
            return request.received_at  # a stream that gave way: somebody reads it
        goal, cost = _goal_of(request), self._budget.prompt_cost
        own_s = cost.least_s(max(1, request.job.num_prompt_tokens - request.num_cached))
        if goal.ttft_ms is None:
            return request.began_at + NO_HURRY_S + AGEING * own_s
        goal_s = _counted_s(goal)
        due = request.received_at + goal.ttft_s(request.job.num_prompt_tokens)
        done_at = self._clock() + cost.least_s(request.num_to_compute)
        return request.received_at + goal_s + AGEING * own_s + (done_at > due) * goal_s

    def tokens(self, streams: ListOf[DecodeRequest], prompts: ListOf[DecodeRequest], *, context: int | None) -> int:
        decoding = len(streams)
        pass_s = self._pass_s(decoding, context) if streams and self._budget.follows_goals else {}
        if not pass_s:
            backlog = sum(prompt.num_to_compute for prompt in prompts)
            return self._budget.tokens(backlog, decoding=decoding, context=context)
        now, rows = self._clock(), self._budget.step_cost.rows
        return best_size(
            pass_s,
            [_due(prompt, now) for prompt in islice(prompts, MOST_PROMPTS)],
            comfortable_s=self._budget.target_ms / 1000 * rows.growth(decoding),
            slack_s=min(_slack_s(stream, now, step_s=rows.ms(decoding) / 1000) for stream in streams),
        )

    def tokens_alone(self) -> int:
        """No more than what delays a prompt that arrives meanwhile by two full passes."""
        return SIZES[-1] if self._budget.follows_goals and self._budget.target_ms else MANY_TOKENS

    def _pass_s(self, decoding: int, context: int | None) -> dict[int, float]:
        """Predicted seconds by prompt tokens, in rising order; empty while nothing was measured.

        Captured passes take what they were timed at. Larger ones take at least as long as the host needs to launch them.
        """
        budget, slots = self._budget, self._budget.slots(decoding)
        captured = budget.step_cost.predicted_ms(slots, context)
        found = {tokens: ms / 1000 for tokens, ms in captured.items() if tokens >= LEAST_PROMPT_TOKENS}
        largest = slots + max(found) if found else 0
        sizes = [rows - decoding for rows in SIZES if rows > largest and rows - decoding >= LEAST_PROMPT_TOKENS]
        for tokens in sizes or ([] if found else [LEAST_PROMPT_TOKENS]):
            seconds = budget.pass_s(tokens, decoding=decoding, context=context or 0)
            found[tokens] = max(seconds, budget.launch_s) if seconds else 0.0
        is_known = min(found.values()) > 0 and max(found.values()) < math.inf
        return found if is_known and budget.target_ms else {}


def _goal_of(request: DecodeRequest) -> Goal:
    """The goal, which only the lowest tier may lack."""
    goal = request.job.goal
    return USUAL if goal.ttft_ms is None and request.job.priority >= 0 else goal


def _counted_s(goal: Goal) -> float:
    """The goal of a first token without its part per token, as far as it counts in turns."""
    return min(max(goal.ttft_s(0), LEAST_GOAL_S), MOST_GOAL_S)


def _due(request: DecodeRequest, now: float) -> Due:
    goal, tokens = _goal_of(request), max(1, request.num_to_compute)
    if goal.ttft_ms is None:
        return Due(tokens, request.began_at + NO_HURRY_S - now, NO_HURRY_S)
    goal_s = max(goal.ttft_s(request.job.num_prompt_tokens), LEAST_GOAL_S)
    return Due(tokens, request.received_at + goal_s - now, goal_s)


def _slack_s(request: DecodeRequest, now: float, *, step_s: float) -> float:
    """The time that a stream may wait for its next token. Nobody's pace is less than a step without prompts."""
    sequence = request.sequence
    left = min(sequence.sampling.max_tokens - sequence.num_generated, AHEAD_TOKENS)
    num_paced = sequence.num_generated - request.num_before + left
    elapsed_s = now - (request.first_token_at or request.began_at)
    return PACE * max(step_s, min(request.job.goal.tpot_s, NO_HURRY_TOKEN_S)) * num_paced - elapsed_s


class Unpaced:
    """First come, first served, in passes as large as the device takes them."""

    def turn(self, request: DecodeRequest) -> float:
        return 0.0

    def tokens(self, streams: ListOf[DecodeRequest], prompts: ListOf[DecodeRequest], *, context: int | None) -> int:
        return MANY_TOKENS

    def tokens_alone(self) -> int:
        return MANY_TOKENS


UNPACED = Unpaced()


class Division(Protocol):
    """The division of streams among the passes that are in flight at a time."""

    are_several: bool

    def of_next(
        self, candidates: list[DecodeRequest], running: ListOf[DecodeRequest], *, others_wait: bool
    ) -> list[DecodeRequest]:
        """The candidates for the next pass, see `MicroBatches`."""
        ...

    def planned(self, sequences: ListOf[Sequence]) -> None:
        """Record the next pass."""
        ...


class Undivided:
    """All streams are in each pass."""

    are_several = False

    def of_next(
        self, candidates: list[DecodeRequest], running: ListOf[DecodeRequest], *, others_wait: bool
    ) -> list[DecodeRequest]:
        return candidates

    def planned(self, sequences: ListOf[Sequence]) -> None: ...


UNDIVIDED = Undivided()
