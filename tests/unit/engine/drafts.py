"""Drafts of known quality, which are answers with wrong tokens in random places, and drafts beside their reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Protocol

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.sequence import Sequence
from tests.models import VOCAB_SIZE
from tests.unit.engine.generate import Generator, move, new_sequence

PROMPTS = [[3 + (number * 37 + at * 11) % 400 for at in range(length)] for number, length in enumerate((39, 5, 70))]


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


class Reference(Protocol):
    """A head's published arithmetic in plain torch."""

    def drafts(self, token_ids: list[int], count: int) -> tuple[int, ...]:
        """The tokens that it drafts behind these."""


class Alone:
    """A draft model in an engine of its own."""

    def __init__(self, folder: Path) -> None:
        self._generator = Generator(Engine(EngineConfig(model=folder, cache=CacheConfig(num_blocks=64))))

    def drafts(self, token_ids: list[int], count: int) -> tuple[int, ...]:
        """The tokens that it would write, without an end."""
        (written,) = self._generator.run([new_sequence("alone", token_ids, max_tokens=count)])
        return tuple(written)


def check_hand_over(
    prefill: Engine,
    decode: Engine,
    prompts: Iterable[list[int]] = PROMPTS,
    *,
    compare: Callable[[Generator, Sequence], None] = lambda here, stayed: None,
) -> None:
    """Assert that tokens and drafts behind a handoff are those of one engine, which `compare` sees with its sequence."""
    source, there, here = Generator(prefill), Generator(decode), Generator(decode)
    for prompt in prompts:
        moved, stayed = (new_sequence("a", prompt) for _ in range(2))
        source.start(moved)
        move(moved, source, there)
        there.go_on([moved])
        here.run([stayed])
        assert moved.token_ids == stayed.token_ids
        compare(here, stayed)
        drafts = [[result and result.drafts for result in each.results.pop("a")] for each in (there, here)]
        assert drafts[0] == drafts[1][1:]
        there.release(moved)


def new_sequences(**sampling: Any) -> list[Sequence]:
    return [new_sequence(str(number), prompt, max_tokens=14, **sampling) for number, prompt in enumerate(PROMPTS)]


def compare_drafts(generator: Generator, sequences: list[Sequence], reference: Reference) -> int:
    """Compare every draft; return how many there were."""
    count = 0
    for sequence in sequences:
        for at, result in enumerate(generator.results[sequence.request_id], start=sequence.num_prompt_tokens + 1):
            if result is not None and result.drafts:
                assert result.drafts == reference.drafts(sequence.token_ids[:at], len(result.drafts))
                count += 1
    return count
