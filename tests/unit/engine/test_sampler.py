"""Sampling: filters against a brute-force twin, penalties, logprobs, and independence from the rest of the batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.host import SampledRow, _adjust, _filter, choose_tokens, sample
from engine.sequence import Sequence
from tests.examples import examples
from tests.unit.engine.generate import new_sequence

VOCAB = 24


def random_logits(rows: int, *, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def rows_of(sequences: list[Sequence]) -> list[SampledRow]:
    return [SampledRow(known.sampling, known.token_ids, known.num_prompt_tokens) for known in sequences]


def sampled_ids(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    return choose_tokens(logits, rows_of(sequences)).tolist()


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = random_logits(3)
    assert sampled_ids(logits, [new_sequence("a", [1])] * 3) == logits.argmax(dim=-1).tolist()


def test_a_tiny_temperature_is_as_good_as_greedy() -> None:
    logits = random_logits(3)
    assert sampled_ids(logits, [new_sequence("a", [1], temperature=1e-30)] * 3) == logits.argmax(dim=-1).tolist()


def test_draws_follow_the_softmax() -> None:
    count, temperature = 4000, 1.7
    logits = random_logits(1).expand(count, VOCAB)
    sequences = [new_sequence("a", [1], temperature=temperature, seed=seed) for seed in range(count)]
    observed = torch.bincount(torch.tensor(sampled_ids(logits, sequences)), minlength=VOCAB).double()
    expected = (logits[0] / temperature).softmax(dim=-1).double() * count
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    assert chi_square < 55  # 23 degrees of freedom: p < 0.0002


def test_a_row_draws_the_same_token_alone_and_among_others() -> None:
    logits = random_logits(8)
    sequences = [
        new_sequence("a", [1] * (row + 1), temperature=row % 3, seed=row, top_p=0.9, top_k=row, logprobs=row or None)
        for row in range(8)
    ]
    together = sampled_ids(logits, sequences)
    alone = [sampled_ids(logits[row : row + 1], [sequences[row]])[0] for row in range(8)]
    assert together == alone


def test_a_resumed_request_draws_what_it_would_have_drawn() -> None:
    logits = random_logits(1)
    original = new_sequence("a", [1, 2], temperature=1.0, seed=3)
    original.append(7)
    resumed = new_sequence("a", [1, 2, 7], temperature=1.0, seed=3)
    resumed.num_prompt_tokens = 2
    assert sampled_ids(logits, [original]) == sampled_ids(logits, [resumed])


def test_seed_and_position_change_the_draw() -> None:
    logits = torch.zeros(40, VOCAB)
    by_seed = sampled_ids(logits, [new_sequence("a", [1], temperature=1.0, seed=seed) for seed in range(40)])
    sequences = [new_sequence("a", [1] * 41, temperature=1.0) for _ in range(40)]
    for row, sequence in enumerate(sequences):
        sequence.num_prompt_tokens = 1 + row
    assert len(set(by_seed)) > 10
    assert len(set(sampled_ids(logits, sequences))) > 10


@examples(25)
@given(
    seed=st.integers(0, 1000),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.sampled_from([0.0, 0.01, 0.3, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    typical_p=st.sampled_from([0.0, 0.2, 0.6, 0.95, 1.0]),
)
def test_filters_keep_what_their_definition_says(
    seed: int, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    scores = random_logits(2, seed=seed)
    params = new_sequence("a", [1], top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p).sampling
    unfiltered = new_sequence("b", [1]).sampling
    filtered = _filter(scores, [params, unfiltered])
    assert torch.equal(filtered[1], scores[1])
    kept = {token for token, score in enumerate(filtered[0].tolist()) if score > -math.inf}
    likely = _kept_by_definition(scores[0].double(), top_k or VOCAB, top_p, min_p)
    assert kept == _typical_by_definition(scores[0].double(), likely, typical_p)


def _kept_by_definition(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    order = scores.argsort(descending=True).tolist()[:top_k]
    weights = [math.exp(scores[token].item() - scores[order[0]].item()) for token in order]
    total, before, kept = sum(weights), 0.0, set[int]()
    for token, weight in zip(order, weights, strict=True):
        if before / total < top_p and weight >= min_p:
            kept.add(token)
        before += weight
    return kept or {order[0]}


def _typical_by_definition(scores: torch.Tensor, likely: set[int], typical_p: float) -> set[int]:
    """As the paper has it: probabilities of what is left, their entropy, the nearest surprises first."""
    if typical_p == 1:
        return likely
    total = sum(math.exp(scores[token].item()) for token in likely)
    chances = {token: math.exp(scores[token].item()) / total for token in likely}
    entropy = -sum(chance * math.log(chance) for chance in chances.values())
    nearest = sorted(likely, key=lambda token: abs(-math.log(chances[token]) - entropy))
    together = [0.0, *itertools.accumulate(chances[token] for token in nearest)]
    return {token for at, token in enumerate(nearest) if at == 0 or together[at] < typical_p}


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"typical_p": 3 / VOCAB}], ids=str)
def test_of_equal_scores_exactly_as_many_stay_as_wanted(filters: dict[str, float]) -> None:
    filtered = _filter(torch.zeros(1, VOCAB), [new_sequence("a", [1], **filters).sampling])
    assert filtered[0].isfinite().nonzero().flatten().tolist() == [0, 1, 2]


def test_the_most_likely_token_may_be_untypical() -> None:
    """One token of 0.4 among a hundred of 0.006: most of what is drawn is of those, and the one says too little."""
    scores = torch.tensor([[0.4, *[0.006] * 100]]).log()
    filtered = _filter(scores, [new_sequence("a", [1], typical_p=0.3).sampling])
    assert filtered[0, 0] == -math.inf
    assert filtered[0, 1:51].isfinite().all()
    assert int(filtered[0].isfinite().sum()) < 53


def test_typical_p_keeps_what_transformers_keeps() -> None:
    scores = random_logits(40)
    warped = transformers.TypicalLogitsWarper(mass=0.6)(torch.zeros(1, 1), scores)
    filtered = _filter(scores, [new_sequence("a", [1], typical_p=0.6).sampling] * 40)
    assert torch.equal(filtered, warped)


def test_logit_bias_decides() -> None:
    logits = random_logits(2)
    sequences = [new_sequence("a", [1], logit_bias={5: 100.0}), new_sequence("b", [1])]
    assert sampled_ids(logits, sequences) == [5, logits[1].argmax().item()]


def test_ids_outside_the_vocabulary_harm_nobody() -> None:
    logits = random_logits(2)
    wild = new_sequence("a", [1], logit_bias={VOCAB: 9.0, -1: 9.0}, stop_token_ids=[10**6], min_tokens=1)
    assert sampled_ids(logits, [wild, new_sequence("b", [1])]) == logits.argmax(dim=-1).tolist()


def test_stop_tokens_are_banned_until_min_tokens_were_generated() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 9.0
    sequence = new_sequence("a", [1], min_tokens=1, stop_token_ids=[4])
    assert sampled_ids(logits, [sequence]) != [4]
    sequence.append(2)
    assert sampled_ids(logits, [sequence]) == [4]


def test_penalties_count_what_they_should() -> None:
    """Repetition: prompt and generated, once; presence: generated, once; frequency: generated, each time."""
    sequence = new_sequence("a", [1, 2])
    for token in (2, 3, 3):
        sequence.append(token)
    logits = torch.full((1, 6), 4.0)
    logits[0, 1] = -4.0

    def adjusted(**penalties: object) -> list[float]:
        sequence.sampling = new_sequence("x", [1], **penalties).sampling
        return _adjust(logits, rows_of([sequence]))[0].tolist()

    assert adjusted(repetition_penalty=2.0) == [4, -8, 2, 2, 4, 4]
    assert adjusted(presence_penalty=1.0) == [4, -4, 3, 3, 4, 4]
    assert adjusted(frequency_penalty=1.0) == [4, -4, 3, 2, 4, 4]
    assert adjusted(repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 1.0}) == [5, -8, 1, 1, 4, 4]


def test_the_callers_logits_are_left_alone() -> None:
    logits = random_logits(1)
    before = logits.clone()
    sequence = new_sequence("a", [1], logit_bias={5: 100.0}, repetition_penalty=2.0, temperature=1.0, top_k=2)
    sample(logits, rows_of([sequence]))
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(3)
    sequences = [
        new_sequence("a", [1], logit_bias={5: 100.0}, logprobs=2, temperature=2.0),
        new_sequence("b", [1], logprobs=0),
        new_sequence("c", [1]),
    ]
    first, second, third = sample(logits, rows_of(sequences))
    raw = logits.log_softmax(dim=-1)
    assert first is not None
    assert first.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(raw[0, 5].item())
    assert first.logprobs.top_ids == raw[0].topk(2).indices.tolist()
    assert first.logprobs.top_logprobs == pytest.approx(raw[0].topk(2).values.tolist())
    assert second is not None
    assert second.logprobs is not None
    assert (second.logprobs.top_ids, second.logprobs.top_logprobs) == ([], [])
    assert third is not None
    assert third.logprobs is None


def test_more_logprobs_than_tokens_are_all_tokens() -> None:
    (only,) = sample(random_logits(1), rows_of([new_sequence("a", [1], logprobs=VOCAB + 5)]))
    assert only is not None
    assert only.logprobs is not None
    assert sorted(only.logprobs.top_ids) == list(range(VOCAB))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_usable_logits_gives_none_and_spares_the_others(value: float, temperature: float) -> None:
    logits = random_logits(3)
    sequences = [new_sequence("a", [1], temperature=temperature, logprobs=1)] * 3
    expected = sample(logits, rows_of(sequences))
    logits[1, 7] = value
    assert sample(logits, rows_of(sequences)) == [expected[0], None, expected[2]]
