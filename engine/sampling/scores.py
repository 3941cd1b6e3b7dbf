"""Prompt logprobs: log probabilities of positions whose next token is known.

A chunk that scores wants the logits of its first `Chunk.scored` positions beside those that it samples from. They are of
the model's own distribution, as sampled tokens' logprobs are.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from common.messages import PromptLogprobs
from engine.passes import Finished, Pass, Sampled
from engine.sampling.host import logprob_columns
from engine.sampling.readback import Readback
from engine.sequence import Chunk

NO_TOKEN = -1  # stands for no sampled token


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a launched pass, on their way to the host: rows for each chunk that is scored."""

    chunks: list[Chunk]
    columns: Readback  # [N, 2 + 2 K] float64: logprob, rank, K ids, K logprobs

    def joined(self, chunks: SequenceOf[Chunk], results: SequenceOf[Sampled | None]) -> list[Sampled | None]:
        """The results of the pass's chunks, with the requested scores."""
        rows, found = self.columns.wait().numpy(), dict[Chunk, PromptLogprobs]()
        at = 0
        for chunk in self.chunks:
            found[chunk] = _packed(rows[at : at + chunk.scored], chunk.sequence.sampling.prompt_logprobs or 0)
            at += chunk.scored
        return [_with(sampled, found.get(chunk), chunk) for chunk, sampled in zip(chunks, results, strict=True)]


@dataclass(frozen=True, slots=True)
class ScoredPass:
    """A pass with scores beside its tokens."""

    chunks: list[Chunk]
    tokens: Pass
    scores: Scores

    def wait(self) -> list[Sampled | None]:
        return self.scores.joined(self.chunks, self.tokens.wait())

    def finished(self) -> Pass:
        """The same as a completed pass, if the tokens are there already."""
        return Finished(self.wait()) if isinstance(self.tokens, Finished) else self


def sampled_rows(chunks: SequenceOf[Chunk]) -> list[int]:
    """The rows of chunks' logits, in the pass's order, to sample from."""
    sampled, row = list[int](), 0
    for chunk in chunks:
        row += chunk.scored
        sampled += range(row, row + chunk.sample)
        row += chunk.sample
    return sampled


def split(logits: torch.Tensor, chunks: SequenceOf[Chunk]) -> tuple[Scores, torch.Tensor | None]:
    """Split the logits [R, V] of chunks, in the pass's order, into scores and the logits to sample from."""
    sampled = sampled_rows(chunks)
    scored = sorted(set(range(len(logits))).difference(sampled))
    scoring = [chunk for chunk in chunks if chunk.scored]
    targets = [token for chunk in scoring for token in _targets(chunk)]
    count = max(chunk.sequence.sampling.prompt_logprobs or 0 for chunk in scoring)
    device = logits.device
    columns = _columns(logits[on(device, scored)].float(), on(device, targets), count)
    rest = logits[on(device, sampled)] if sampled else None
    return Scores(scoring, Readback(columns)), rest


def on(device: torch.device, values: list[int]) -> torch.Tensor:
    """Copy without waiting for the device, which may be running this very pass."""
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def _targets(chunk: Chunk) -> list[int]:
    return chunk.sequence.token_ids[chunk.start + 1 : chunk.start + 1 + chunk.scored]


def _columns(logits: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
    """[N, 2 + 2 K] float64 of logits [N, V] and the tokens [N] that followed."""
    chosen, top_ids, top_logprobs = logprob_columns(logits, targets, count)
    rank = (logits > logits.gather(1, targets[:, None])).sum(dim=-1, keepdim=True) + 1
    return torch.cat([column.double() for column in (chosen, rank, top_ids, top_logprobs)], dim=1)


def _packed(rows: np.ndarray[tuple[int, int], np.dtype[np.float64]], count: int) -> PromptLogprobs:
    width = (rows.shape[1] - 2) // 2
    count = min(count, width)
    return PromptLogprobs(
        logprobs=rows[:, 0].astype("<f4").tobytes(),
        ranks=rows[:, 1].astype("<u4").tobytes(),
        top_ids=rows[:, 2 : 2 + count].astype("<u4").tobytes(),
        top_logprobs=rows[:, 2 + width : 2 + width + count].astype("<f4").tobytes(),
    )


def _with(sampled: Sampled | None, scores: PromptLogprobs | None, chunk: Chunk) -> Sampled | None:
    if scores is None or (chunk.sample and sampled is None):
        return sampled
    if sampled is None:
        return Sampled(NO_TOKEN, None, scores)
    return msgspec.structs.replace(sampled, prompt_logprobs=scores)
