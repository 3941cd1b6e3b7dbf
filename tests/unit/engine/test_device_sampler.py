"""The device's sampler gives what `engine.sampling.host` gives: mixed parameters, overlapping passes, resumed sequences."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch

from engine.grammars.grammars import NO_MASKS, Masks
from engine.sampling.device import DeviceSampler
from engine.step.staging import NewestTokens
from tests.unit.engine.device_sampler_checks import (
    VOCAB,
    check,
    check_drafted,
    check_mixture,
    check_overlap,
    expected,
    random_logits,
    schedule,
)
from tests.unit.engine.generate import new_sequence
from tests.unit.engine.launches import Recorder

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(40))
def test_random_mixtures(seed: int) -> None:
    check_mixture(seed, CPU)


@pytest.mark.quick(first=4)
@pytest.mark.parametrize("seed", range(12))
def test_rows_behind_drafted_tokens(seed: int) -> None:
    check_drafted(seed, CPU)


@pytest.mark.quick(first=4)
@pytest.mark.parametrize("seed", range(12))
def test_overlapping_passes_of_changing_sequences(seed: int) -> None:
    check_overlap(seed, CPU)


def test_a_token_that_was_discarded_is_not_counted() -> None:
    """The host resumes a sequence from its own tokens, whatever a lost pass had sampled."""
    sampler = DeviceSampler(VOCAB, 4, CPU)
    sequence = new_sequence("a", [1, 2], frequency_penalty=5.0)
    first = sampler.launch(random_logits(1), [schedule(sequence)], NewestTokens.none(CPU))
    sampler.launch(random_logits(1), [schedule(sequence)], first.newest)
    sequence.restart(0)
    sequence.append(7)
    logits = random_logits(1)
    chunks = [schedule(sequence)]
    check(sampler.launch(logits, chunks, first.newest).wait(), expected(logits, chunks, {}), logits)


def test_sequences_that_are_gone_leave_their_room() -> None:
    sampler = DeviceSampler(VOCAB, 4, CPU)
    gc.freeze()  # what is loaded would take most of each collection
    for _ in range(50):
        chunks = [schedule(new_sequence("a", [1, 2], presence_penalty=1.0)) for _ in range(4)]
        sampler.launch(random_logits(4), chunks, NewestTokens.none(CPU))
        del chunks
        gc.collect()
    gc.unfreeze()
    assert len(sampler._counts.counts) == 4
    assert len(sampler._table.words) == 64


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_usable_logits_gives_none_and_spares_the_others(value: float, temperature: float) -> None:
    sampler = DeviceSampler(VOCAB, 4, CPU)
    chunks = [schedule(new_sequence("a", [1], temperature=temperature, logprobs=1, top_k=9)) for _ in range(3)]
    logits = random_logits(3)
    wanted = expected(logits, chunks, {})
    logits[1, 7] = value
    draw = sampler.launch(logits, chunks, NewestTokens.none(CPU))
    actual = draw.wait()
    assert actual[1] is None
    assert [row and row.token_id for row in actual] == [
        wanted[0] and wanted[0].token_id,
        None,
        wanted[2] and wanted[2].token_id,
    ]
    assert 0 <= int(draw.token_ids[1]) < VOCAB


def test_a_pending_token_that_nobody_samples_is_refused_and_nothing_is_counted() -> None:
    sampler = DeviceSampler(VOCAB, 4, CPU)
    sequences = [new_sequence(name, [1], frequency_penalty=5.0) for name in "ab"]
    before = sampler.launch(random_logits(2), [schedule(sequence) for sequence in sequences], NewestTokens.none(CPU))
    chunks = [schedule(sequence) for sequence in sequences]
    with pytest.raises(ValueError, match="request b: nobody samples"):
        sampler.launch(random_logits(2), chunks, NewestTokens(before.token_ids, sequences[:1]))
    known = dict(zip(sequences, before.token_ids.tolist(), strict=True))
    logits = random_logits(2)
    check(sampler.launch(logits, chunks, before.newest).wait(), expected(logits, chunks, known), logits)


def launched(masks: Masks) -> list[str]:
    sampler, logits = DeviceSampler(VOCAB, 4, CPU), random_logits(2)
    chunks = [schedule(new_sequence(name, [1])) for name in "ab"]
    with Recorder() as recorder:
        sampler.launch(logits, chunks, NewestTokens.none(CPU), masks)
    return [launch.partition(" ")[0] for launch in recorder.launches]


def test_a_pass_without_grammars_launches_and_copies_nothing_for_them() -> None:
    """By the record of launches: a mask costs one copy of all its words, and what masks the row, before the choice."""
    without, masked = launched(NO_MASKS), launched(Masks(rows=[1], words=np.full((1, -(-VOCAB // 64)), -1)))
    started = without.index("aten.argmax.default")
    more = masked[started : started + len(masked) - len(without)]
    assert masked[:started] + masked[started + len(more) :] == without
    assert (more[0], more[-1], more.count("aten.copy_.default")) == ("aten.copy_.default", "aten.index_put_.default", 1)
