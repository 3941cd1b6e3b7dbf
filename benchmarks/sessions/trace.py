"""Sessions of agents in the shape of recorded ones, scaled to a machine.

Recorded: a median of 43 turns a session, 142,000 prompt tokens and 444 answer tokens a turn, over 95 % of a prompt seen before,
and a tool that runs between two turns (SemiAnalysis' AgentX traces, as vLLM's blog of September 2026 reports them).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

TURNS = 43
CONTEXT = 142_000
ANSWER_SHARE = 444 / CONTEXT
NEW_SHARE = 0.02  # of the mean prompt, each turn: a tool's result and the answer before
LEAST_ANSWER = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens that a turn adds to the session's prompt, the length of its answer, and the time of the tool behind it."""

    new_tokens: Sequence[int]
    answer_tokens: int
    pause_s: float


def sessions(
    count: int, *, turns: int, context: int, pause_s: float, vocab_size: int, seed: int = 0
) -> list[list[Turn]]:
    """So many sessions that share nothing. `context`: tokens of the mean prompt; `pause_s`: of the mean pause."""
    random_ = random.Random(seed)
    answer = max(LEAST_ANSWER, round(ANSWER_SHARE * context))
    added = max(1, round(NEW_SHARE * context))
    first = max(1, context - (turns - 1) * (added + answer) // 2)

    def turn(at: int) -> Turn:
        count = added if at else first
        tokens = [random_.randrange(vocab_size) for _ in range(count)]
        return Turn(tokens, answer, random_.expovariate(1 / pause_s) if pause_s else 0.0)

    return [[turn(at) for at in range(turns)] for _ in range(count)]


def longest_prompt(session: Sequence[Turn]) -> int:
    """Tokens of a session behind its last answer."""
    return sum(len(turn.new_tokens) + turn.answer_tokens for turn in session)
