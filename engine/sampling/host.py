"""Logits -> tokens: a pure function of (logits, tokens so far, sampling parameters, seed, position).

Order: what a grammar forbids, logit bias, repetition penalty (prompt and generated), presence and frequency penalties
(generated), ban of stop tokens before `min_tokens`; then temperature, top_k, top_p, min_p, typical_p; then Gumbel-max with
counter-based noise. Logprobs are of the raw logits of allowed tokens. Rows are independent, so a moved request continues
identically.

R sampled rows, V vocabulary, K most logprobs that any row asks for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from common.messages import SamplingParams, TokenLogprobs
from engine.kernels.sampling import leave_typical
from engine.kernels.sampling.philox import gumbel_noise
from engine.passes import Sampled
from engine.sequence import Chunk, Sequence

MIN_TEMPERATURE = 1e-5  # below, logits / temperature could overflow; the argmax is the same


@dataclass(frozen=True, slots=True)
class SampledRow:
    """The inputs of one token's sampling, besides its logits."""

    sampling: SamplingParams
    token_ids: list[int]  # prompt and generated so far
    num_prompt_tokens: int
    allowed: npt.NDArray[np.bool_] | None = None  # [V], from a grammar; None: all

    @classmethod
    def of(cls, chunk: Chunk, newest: Mapping[Sequence, int], allowed: npt.NDArray[np.bool_] | None = None) -> Self:
        sequence = chunk.sequence
        return cls(sequence.sampling, chunk.known_tokens(newest), sequence.num_prompt_tokens, allowed)

    @property
    def must_go_on(self) -> bool:
        """True if stop tokens are banned."""
        return self.allowed is None and self.num_generated < self.sampling.min_tokens

    @property
    def num_generated(self) -> int:
        """The counter of the row's random numbers."""
        return len(self.token_ids) - self.num_prompt_tokens


def sample(logits: torch.Tensor, rows: SequenceOf[SampledRow]) -> list[Sampled | None]:
    """Sample one token for each row of `logits` [R, V] float32; None where the row holds NaN or +infinity.

    One transfer from the device for any R and K.
    """
    wanted = [row.sampling.logprobs for row in rows]
    logits = _allowed_alone(logits, rows)
    tokens = choose_tokens(logits, rows)
    columns = [logits.amax(dim=-1).isfinite()[:, None], tokens[:, None]]
    if any(count is not None for count in wanted):
        columns += logprob_columns(logits, tokens, max(max(count or 0, 0) for count in wanted))
    values = torch.cat([column.double() for column in columns], dim=1).tolist()  # ids are exact in float64
    return [_sampled(row, count) if row[0] else None for row, count in zip(values, wanted, strict=True)]


def _allowed_alone(logits: torch.Tensor, rows: SequenceOf[SampledRow]) -> torch.Tensor:
    """The logits with only allowed tokens: `logits` itself without grammars, else a copy."""
    masked = {row: known.allowed for row, known in enumerate(rows) if known.allowed is not None}
    if not masked:
        return logits
    allowed = torch.from_numpy(np.stack(list(masked.values())))
    if len(masked) == len(rows):
        return torch.where(allowed, logits, float("-inf"))
    index = torch.tensor(list(masked))
    return logits.index_copy(0, index, torch.where(allowed, logits[index], float("-inf")))


def choose_tokens(logits: torch.Tensor, rows: SequenceOf[SampledRow]) -> torch.Tensor:
    """Return the sampled token ids [R] int64. `logits` stay unchanged."""
    params = [row.sampling for row in rows]
    adjusted = _adjust(logits, rows)
    tokens = adjusted.argmax(dim=-1)
    random = [row for row, param in enumerate(params) if param.temperature > 0]
    if random:
        drawn = torch.tensor(random, device=logits.device)
        positions = [rows[row].num_generated for row in random]
        tokens[drawn] = _draw(adjusted[drawn], [params[row] for row in random], positions)
    return tokens


@dataclass(slots=True)
class _Entries:
    """Sparse [R, V] values, at most one for each (row, token). Ids outside the vocabulary are ignored."""

    vocab_size: int
    rows: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, values: dict[int, float]) -> None:
        for token_id, value in values.items():
            if 0 <= token_id < self.vocab_size:
                self.rows.append(row)
                self.ids.append(token_id)
                self.values.append(value)

    def index(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(self.rows, device=like.device), torch.tensor(self.ids, device=like.device)

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.values, dtype=like.dtype, device=like.device)


def _adjust(logits: torch.Tensor, rows: SequenceOf[SampledRow]) -> torch.Tensor:
    """Apply bias, penalties and bans to rows that have any; return `logits` itself if none has."""
    bias, repetition, repeated, banned = (_Entries(logits.shape[1]) for _ in range(4))
    for row, known in enumerate(rows):
        params = known.sampling
        if params.logit_bias:
            bias.add(row, params.logit_bias)
        if params.repetition_penalty != 1.0:
            repetition.add(row, dict.fromkeys(known.token_ids, params.repetition_penalty))
        if params.presence_penalty or params.frequency_penalty:
            repeated.add(row, _repetition_costs(known))
        if known.must_go_on:
            banned.add(row, dict.fromkeys(params.stop_token_ids, 0.0))
    if not (bias.rows or repetition.rows or repeated.rows or banned.rows):
        return logits
    adjusted = logits.clone()
    if bias.rows:
        adjusted[bias.index(logits)] += bias.tensor(logits)
    if repetition.rows:
        index, penalty = repetition.index(logits), repetition.tensor(logits)
        scores = adjusted[index]
        adjusted[index] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if repeated.rows:
        adjusted[repeated.index(logits)] -= repeated.tensor(logits)
    if banned.rows:
        adjusted[banned.index(logits)] = float("-inf")
    return adjusted


def _repetition_costs(row: SampledRow) -> dict[int, float]:
    params = row.sampling
    counts = Counter(row.token_ids[row.num_prompt_tokens :])
    return {token: params.presence_penalty + params.frequency_penalty * count for token, count in counts.items()}


def _draw(logits: torch.Tensor, params: SequenceOf[SamplingParams], positions: SequenceOf[int]) -> torch.Tensor:
    """Draw one token for each row of `logits` [R, V] from its filtered distribution. Returns [R] int64."""
    device = logits.device
    temperature = torch.tensor([max(param.temperature, MIN_TEMPERATURE) for param in params], device=device)
    scores = logits / temperature[:, None]
    if any(map(has_filters, params)):
        scores = _filter(scores, params)
    seeds = torch.tensor([as_int64(param.seed) for param in params], device=device)
    noise = gumbel_noise(seeds, torch.tensor(positions, device=device), logits.shape[1])
    return (scores + noise).argmax(dim=-1)


def has_filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 or params.typical_p < 1.0


def _filter(scores: torch.Tensor, params: SequenceOf[SamplingParams]) -> torch.Tensor:
    """Set to -inf the tokens excluded by top_k, then by top_p of the rest, then by min_p, always keeping the most likely one;
    then by typical_p of the rest.

    Ties are broken by the smaller token id, so that exactly top_k tokens remain.
    """
    device, vocab_size = scores.device, scores.shape[1]
    top_k = torch.tensor([param.top_k if param.top_k > 0 else vocab_size for param in params], device=device)
    top_p = torch.tensor([param.top_p for param in params], device=device)
    min_p = torch.tensor([param.min_p for param in params], device=device)
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(vocab_size, device=device) >= top_k[:, None], float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # probability of all more likely tokens
    excluded = ((before >= top_p[:, None]) & (top_p < 1.0)[:, None]) | (
        probabilities < min_p[:, None] * probabilities[:, :1]
    )
    excluded[:, 0] = False
    ordered = ordered.masked_fill(excluded, float("-inf"))
    kept = torch.empty_like(scores).scatter_(1, order, ordered)
    typical = [row for row, param in enumerate(params) if param.typical_p < 1.0]
    if typical:
        share = torch.tensor([[params[row].typical_p] for row in typical], dtype=torch.float64, device=device)
        kept[typical] = leave_typical(kept[typical], share)
    return kept


def as_int64(seed: int) -> int:
    """The same 64 bits as a signed number, for torch."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def logprob_columns(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> list[torch.Tensor]:
    """[R, 1] the sampled tokens' log probabilities, [R, K] ids and [R, K] log probabilities of the most likely tokens."""
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(min(count, logits.shape[1]), dim=-1)
    return [logprobs.gather(1, tokens[:, None]), top.indices, top.values]


def _sampled(row: list[float], num_logprobs: int | None) -> Sampled:
    """Unpack one row: finite, token id and, for batches with logprobs: logprob, K ids, K logprobs."""
    token_id = int(row[1])
    if num_logprobs is None:
        return Sampled(token_id, None)
    width = (len(row) - 3) // 2
    ids = [int(value) for value in row[3 : 3 + max(0, min(num_logprobs, width))]]
    return Sampled(token_id, token_logprobs(row[2], ids, row[3 + width : 3 + width + len(ids)]))


def token_logprobs(chosen: float, top_ids: list[int], top_logprobs: list[float]) -> TokenLogprobs:
    """The log probability of the sampled token and of the most likely ones; impossible tokens are left out."""
    possible = sum(logprob > -math.inf for logprob in top_logprobs)  # sorted by likelihood
    return TokenLogprobs(logprob=chosen, top_ids=top_ids[:possible], top_logprobs=top_logprobs[:possible])


def in_order(
    chunks: list[Chunk],
    sampling: list[Chunk],
    sampled: SequenceOf[Sampled | None],
    problems: Mapping[Chunk, str],
) -> list[Sampled | None]:
    """Results in the order of the chunks."""
    if sampling == chunks and not problems:
        return list(sampled)
    results = dict(zip(map(id, sampling), sampled, strict=True))  # hashes of the chunks' fields take longer
    results |= {id(chunk): Sampled(0, None, problem=problem) for chunk, problem in problems.items()}
    return [results[id(chunk)] if chunk.sample else None for chunk in chunks]
