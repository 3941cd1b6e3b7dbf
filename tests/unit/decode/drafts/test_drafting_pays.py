"""Lookup and lengths together, in computed milliseconds: copying gets faster, and nothing gets slower."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from decode.drafts.lengths import Candidate, DraftLengths
from decode.drafts.settings import LookupSettings
from decode.drafts.suffix import Lookup
from tests.unit.decode.drafts.lookups import sequence_of

SYNC_MS = 1.0  # a fifth of a step: much
PROMPT, ANSWER = 400, 400


def step_ms(rows: int) -> float:
    return 4.3 + 0.012 * rows


def gain(texts: list[list[int]], *, most_rows: int) -> float:
    """Decode a batch of given texts; returns the speed against the same without drafts, until the first has ended."""
    lookup, lengths = Lookup(LookupSettings()), DraftLengths(more_ms=lambda _: SYNC_MS)
    batch = {sequence_of(text[:PROMPT]): text for text in texts}
    spent, num_tokens = 0.0, 0
    while all(len(sequence.token_ids) < len(text) for sequence, text in batch.items()):
        drafts = {sequence: lookup.draft(sequence, 16) for sequence in batch if lengths.may_draft(sequence)}
        candidates = [
            Candidate(sequence, len(draft), lookup.match_length(sequence))
            for sequence, draft in drafts.items()
            if draft
        ]
        chosen = lengths.choose(candidates, rows=len(batch), most_rows=most_rows, step_ms=step_ms)
        spent += step_ms(len(batch) + sum(chosen)) + (SYNC_MS if any(chosen) else 0.0)
        share = {candidate.sequence: length for candidate, length in zip(candidates, chosen, strict=True)}
        for sequence, text in batch.items():
            known, length = len(sequence.token_ids), share.get(sequence, 0)
            truth = text[known : known + length]
            accepted = next((at for at in range(len(truth)) if truth[at] != drafts[sequence][at]), len(truth))
            sequence.token_ids += text[known : known + accepted + 1]
            num_tokens += accepted + 1
            if length:
                lengths.verified(sequence, length, accepted)
    return num_tokens / len(texts) * step_ms(len(texts)) / spent


def edited(dice: random.Random) -> list[int]:
    """A prompt and its copy, in which each twentieth token is another."""
    prompt = [dice.randrange(1000) for _ in range(PROMPT)]
    return [*prompt, *(token if dice.random() > 0.05 else 1000 for token in prompt[:ANSWER])]


def ordinary(dice: random.Random) -> list[int]:
    """Frequent and rare tokens in random order: short matches, which mislead."""
    weights = [1 / (rank + 1) for rank in range(200)]
    return dice.choices(range(200), weights, k=PROMPT + ANSWER)


def misleading(dice: random.Random) -> list[int]:
    """The same three tokens again and again, followed by the one of eight that is the longest ago."""
    rest = iter(dice.sample(range(1000, 9000), PROMPT + ANSWER))
    runs = [(1, 2, 3, 10 + turn % 8, *itertools.islice(rest, 4)) for turn in range((PROMPT + ANSWER) // 8)]
    return [token for run in runs for token in run]


@pytest.mark.parametrize(("batch", "least"), [(1, 2.0), (8, 1.9), (32, 1.5)])
def test_copying_is_faster(batch: int, least: float) -> None:
    dice = random.Random(batch)
    assert gain([edited(dice) for _ in range(batch)], most_rows=256) > least


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("text", [ordinary, misleading])
def test_nothing_is_slower(batch: int, text: Callable[[random.Random], list[int]]) -> None:
    dice = random.Random(batch)
    assert gain([text(dice) for _ in range(batch)], most_rows=256) > 0.98
