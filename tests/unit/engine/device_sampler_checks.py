"""The device's sampler compared with the host's, on a given device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.grammars.grammars import NO_MASKS, Masks
from engine.passes import Sampled
from engine.sampling.device import DeviceSampler, Draw
from engine.sampling.host import SampledRow, sample
from engine.sequence import Chunk, Sequence
from engine.step.staging import NewestTokens
from tests.unit.engine.generate import new_sequence

VOCAB = 300


def random_sampling(draw: random.Random) -> dict[str, object]:
    """Any parameter, each with a good chance to be off."""
    tokens = [draw.randrange(-2, VOCAB + 2) for _ in range(6)]
    return {
        "temperature": draw.choice([0.0, 1e-30, 0.3, 1.0, 4.0]),
        "top_k": draw.choice([0, 0, 1, 5, VOCAB - 1, VOCAB, VOCAB + 9]),
        "top_p": draw.choice([1.0, 1.0, 0.0, 0.2, 0.9, 0.999]),
        "min_p": draw.choice([0.0, 0.0, 0.02, 0.5, 1.0]),
        "typical_p": draw.choice([1.0, 1.0, 0.0, 0.3, 0.95]),
        "seed": draw.randrange(2**64),
        "repetition_penalty": draw.choice([1.0, 1.0, 1.3, 0.7]),
        "presence_penalty": draw.choice([0.0, 0.0, 0.6, -0.6]),
        "frequency_penalty": draw.choice([0.0, 0.0, 0.3, -0.3]),
        "logit_bias": draw.choice([{}, {}, {token: draw.uniform(-9, 9) for token in tokens}]),
        "logprobs": draw.choice([None, None, 0, 3, 20]),
        "min_tokens": draw.choice([0, 0, 3]),
        "stop_token_ids": tokens[:3],
    }


def random_sequence(draw: random.Random, name: str) -> Sequence:
    prompt = [draw.randrange(20) for _ in range(draw.randint(1, 40))]  # few different tokens: penalties matter
    sequence = new_sequence(name, prompt, **random_sampling(draw))
    sequence.num_prompt_tokens = draw.randint(1, len(prompt))
    return sequence


def random_logits(rows: int) -> torch.Tensor:
    """A view of something wider; rows with many equal values among them."""
    logits = 3 * torch.randn(rows, VOCAB + 5)
    logits[::3] = logits[::3].round()
    logits[:, :20] += 2
    return logits[:, :VOCAB]


def schedule(sequence: Sequence) -> Chunk:
    return sequence.schedule(sequence.num_unscheduled)


def expected(logits: torch.Tensor, chunks: list[Chunk], newest: dict[Sequence, int]) -> list[Sampled | None]:
    return sample(logits, [SampledRow.of(chunk, newest) for chunk in chunks])


def check(actual: list[Sampled | None], wanted: list[Sampled | None], logits: torch.Tensor) -> None:
    """The same tokens and log probabilities; equally likely tokens may be listed in any order."""
    assert [row and row.token_id for row in actual] == [row and row.token_id for row in wanted]
    for row, (one, other) in enumerate(zip(actual, wanted, strict=True)):
        if one is None or other is None or other.logprobs is None:
            assert one is None or one.logprobs is None
            continue
        assert one.logprobs is not None
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, rel=1e-5, abs=1e-5)
        assert one.logprobs.top_logprobs == pytest.approx(other.logprobs.top_logprobs, rel=1e-5, abs=1e-5)
        raw = logits[row].log_softmax(dim=-1)
        assert one.logprobs.top_logprobs == pytest.approx(raw[one.logprobs.top_ids].tolist(), rel=1e-5, abs=1e-5)
        assert len(set(one.logprobs.top_ids)) == len(other.logprobs.top_ids)


def check_drafted(seed: int, device: torch.device) -> None:
    """Rows behind drafted tokens, of which any number is accepted before the next draft."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sampler = DeviceSampler(VOCAB, 32, device)
    sequences = [random_sequence(draw, str(row)) for row in range(draw.randint(1, 8))]
    for sequence in sequences:
        sequence.restart(len(sequence.token_ids) - 1)
    for _ in range(4):
        chunks = [sequence.schedule(1, tuple(draw.choices(range(20), k=draw.randint(0, 3)))) for sequence in sequences]
        rows = [row for chunk in chunks for row in chunk.rows]
        logits = random_logits(len(rows))
        check(
            sampler.launch(logits.to(device), rows, NewestTokens.none(device)).wait(),
            expected(logits, rows, {}),
            logits,
        )
        for chunk in chunks:
            num_accepted = draw.randint(0, len(chunk.drafted))
            chunk.sequence.finish(chunk, num_accepted)
            for token in (*chunk.drafted[:num_accepted], draw.randrange(20)):
                chunk.sequence.append(token)


def check_mixture(seed: int, device: torch.device) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sampler = DeviceSampler(VOCAB, 16, device)
    chunks = [schedule(random_sequence(draw, str(row))) for row in range(draw.randint(1, 16))]
    logits = random_logits(len(chunks))
    masks = random_masks(draw, len(chunks))
    allowed = masks.allowed(VOCAB) if masks.rows else {}
    actual = sampler.launch(logits.to(device), chunks, NewestTokens.none(device), masks).wait()
    wanted = sample(logits, [SampledRow.of(chunk, {}, allowed.get(row)) for row, chunk in enumerate(chunks)])
    for row, mask in allowed.items():
        logits[row, torch.from_numpy(~mask)] = float("-inf")
    check(actual, wanted, logits)


def random_masks(draw: random.Random, rows: int) -> Masks:
    """Half of the time some rows have a grammar: of few tokens, or of most."""
    if draw.random() < 0.5:
        return NO_MASKS
    masked = sorted(draw.sample(range(rows), draw.randint(1, rows)))
    words = np.zeros((len(masked), -(-VOCAB // 64)), dtype=np.int64)
    for mask in words.view(np.uint8):
        bits = np.array([draw.random() < draw.choice((0.02, 0.9)) for _ in range(8 * mask.size)])
        bits[draw.randrange(VOCAB)] = True
        mask[:] = np.packbits(bits, bitorder="little")
    return Masks(rows=masked, words=words)


class Loop:
    """A worker's loop in small: launches the next pass before it looks at the one before, and checks every token."""

    def __init__(self, device: torch.device, *, max_rows: int) -> None:
        self.device = device
        self.sampler = DeviceSampler(VOCAB, max_rows, device)
        self.newest = NewestTokens.none(device)
        self.known: dict[Sequence, int] = {}  # what the pass before sampled, as the host's sampler says
        self.in_flight: tuple[list[Chunk], Draw] | None = None

    def launch(self, sequences: list[Sequence]) -> None:
        chunks = [schedule(sequence) for sequence in sequences]
        logits = random_logits(len(chunks))
        draw = self.sampler.launch(logits.to(self.device), chunks, self.newest)
        wanted = expected(logits, chunks, self.known)
        check(draw.wait(), wanted, logits)
        self.land()
        self.newest, self.in_flight = draw.newest, (chunks, draw)
        self.known = {chunk.sequence: row.token_id for chunk, row in zip(chunks, wanted, strict=True) if row}

    def land(self) -> None:
        """Append what the pass in flight sampled."""
        if self.in_flight is not None:
            chunks, draw = self.in_flight
            for chunk, sampled in zip(chunks, draw.wait(), strict=True):
                assert sampled is not None
                chunk.sequence.finish(chunk)
                chunk.sequence.append(sampled.token_id)
        self.in_flight = None


def check_overlap(seed: int, device: torch.device) -> None:
    """Sequences come, go, sit out and are preempted; there are more than the sampler has room for."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    loop = Loop(device, max_rows=5)
    sequences = [random_sequence(draw, str(number)) for number in range(8)]
    for turn in range(25):
        if turn % 3 == 0:
            loop.land()
            for sequence in sequences:
                if draw.random() < 0.3:
                    sequence.restart(draw.randrange(len(sequence.token_ids)))
        candidates = [chunk.sequence for chunk in loop.in_flight[0]] if loop.in_flight else sequences
        running = draw.sample(candidates, draw.randint(1, min(5, len(candidates))))
        loop.launch(running)
        if turn % 5 == 4:
            loop.land()
            sequences[draw.randrange(8)] = random_sequence(draw, f"new {turn}")
