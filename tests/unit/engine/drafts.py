"""Drafts of known quality: what a sequence will answer, with wrong tokens in random places."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from engine.sequence import Sequence
from tests.models import VOCAB_SIZE


class Drafts:
    """Drafts of 0 to `LONGEST` tokens from known answers, by prompt."""

    LONGEST = 4

    def __init__(
        self, answers: Mapping[tuple[int, ...], SequenceOf[int]], *, wrong: float = 0.3, seed: int = 0
    ) -> None:
        """`wrong`: the chance of a token to be another one."""
        self._answers = answers
        self._wrong = wrong
        self._draw = random.Random(seed)

    def __call__(self, sequence: Sequence) -> list[int]:
        answer = self._answers[tuple(sequence.token_ids[: sequence.num_prompt_tokens])]
        known = sequence.num_generated
        right = answer[known : known + self._draw.randint(0, self.LONGEST)]
        return [self._draw.randrange(VOCAB_SIZE) if self._draw.random() < self._wrong else token for token in right]
