"""Checks of the sampling kernels against their twins.

`test_triton.py` runs them in Triton's interpreter; on a GPU, `tests/gpu/bench_sampling.py` and `tests/gpu/test_kernels.py` may.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from engine.kernels import sampling
from engine.kernels.sampling import RowWord, SampledTokens, SamplingInputs
from tests.unit.engine.device_sampler_checks import check_mixture, check_overlap
from tests.unit.kernels.triton_checks import checking

Row = dict[str, float]
FILTERS = {"top_k", "top_p", "min_p", "typical_p"}


def choice_of(rows: list[Row], vocab_size: int, device: str) -> SamplingInputs:
    """The words for these rows: names of words, `bias` and `bans` (how many), `counts` (whether it has a line)."""
    words = np.zeros((len(rows), len(RowWord)), dtype=np.int64)
    lists: list[int] = []
    filtered = [row for row, asked in enumerate(rows) if asked.get("temperature") and asked.keys() & FILTERS]
    start = words.size + len(filtered)
    for row, asked in enumerate(rows):
        numbers = words[row].view(np.float64)
        numbers[RowWord.TEMPERATURE] = asked.get("temperature", 0.0)
        words[row, RowWord.TOP_K] = asked.get("top_k", vocab_size)
        numbers[RowWord.TOP_P], numbers[RowWord.MIN_P] = asked.get("top_p", 1.0), asked.get("min_p", 0.0)
        numbers[RowWord.TYPICAL_P] = asked.get("typical_p", 1.0)
        words[row, RowWord.SEED] = random.randrange(-(2**63), 2**63)
        words[row, RowWord.POSITION] = random.randrange(2**31)
        words[row, RowWord.COUNTS] = row if asked.get("counts") else -1
        numbers[RowWord.REPETITION] = asked.get("repetition", 1.0)
        numbers[RowWord.PRESENCE], numbers[RowWord.FREQUENCY] = asked.get("presence", 0.0), asked.get("frequency", 0.0)
        words[row, RowWord.BIAS] = start + len(lists)
        biased = random.sample(range(vocab_size), int(asked.get("bias", 0)))
        bits = np.array([random.uniform(-5, 5) for _ in biased], dtype=np.float32).view(np.uint32)
        lists += [token << 32 | int(value) for token, value in zip(biased, bits, strict=True)]
        words[row, RowWord.BANNED] = start + len(lists)
        lists += random.sample(range(vocab_size), int(asked.get("bans", 0)))
        words[row, RowWord.END] = start + len(lists)
        words[row, RowWord.FILTERED] = row in filtered
    counts = torch.randint(0, 4, (len(rows), vocab_size), dtype=torch.int16)
    counts[torch.rand(len(rows), vocab_size) < 0.3] |= -0x8000
    return SamplingInputs(
        words=torch.cat((torch.from_numpy(words).flatten(), torch.tensor([*filtered, *lists]).long())).to(device),
        counts=counts.to(device),
        filtered=len(filtered),
        filtered_at=words.size,
        random=any(asked.get("temperature") for asked in rows),
        extras=any(asked.keys() & {"bias", "bans", "counts"} for asked in rows),
        logprobs=True,
        typical=any("typical_p" in asked for asked in rows),
    )


def compare(logits: torch.Tensor, inputs: SamplingInputs) -> SampledTokens:
    """Assert that the kernels and their twin choose the same; return what the kernels chose."""
    report = torch.full((len(logits), 3), -1, dtype=torch.int32, device=logits.device)
    before = logits.clone()
    actual = sampling.choose(logits, inputs, report)
    expected = sampling.choose_rows.reference(logits, inputs, torch.zeros_like(report))
    assert torch.equal(before.nan_to_num(), logits.nan_to_num())
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert torch.equal(actual.report[:, :2], expected.report[:, :2])
    assert actual.report[:, 1].tolist() == actual.token_ids.tolist()
    if inputs.logprobs:
        usable = expected.report[:, 0] == 1
        one, other = (chosen.report[usable, 2].view(torch.float32) for chosen in (actual, expected))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert actual.normalizer is not None
        assert expected.normalizer is not None
        torch.testing.assert_close(actual.normalizer[usable], expected.normalizer[usable], rtol=1e-5, atol=1e-5)
    return actual


def random_logits(rows: int, vocab_size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A view of something wider; every third row with many equal values."""
    logits = 3 * torch.randn(rows, vocab_size + 16, device=device)
    logits[::3] = logits[::3].round()
    return logits.to(dtype)[:, :vocab_size]


def check_greedy(device: str, large: bool) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for rows, vocab_size in [(1, 50), (3, 4096), (2, 9001)] + [(64, 128256)] * large:
            for logprobs in (False, True):
                inputs = SamplingInputs(
                    words=none, counts=None, filtered=0, filtered_at=0, random=False, extras=False, logprobs=logprobs
                )
                compare(random_logits(rows, vocab_size, dtype, device), inputs)


def check_drawn(device: str, large: bool) -> None:
    for rows, vocab_size in [(5, 50), (2, 9001)] + [(64, 128256)] * large:
        asked: list[Row] = [{"temperature": random.choice([0.0, 1e-5, 0.5, 1.0, 3.0])} for _ in range(rows)]
        compare(random_logits(rows, vocab_size, torch.float32, device), choice_of(asked, vocab_size, device))


def check_extras(device: str, large: bool) -> None:
    asked: list[Row] = [
        {"bias": 9},
        {"bans": 3, "temperature": 1.0},
        {"counts": 1, "repetition": 1.3},
        {"counts": 1, "presence": 0.4, "frequency": 0.7, "temperature": 0.8},
        {"counts": 1, "presence": -0.4, "frequency": -0.1, "repetition": 0.8, "bias": 40, "bans": 2},
        {"counts": 1, "frequency": 0.3, "bias": 4, "temperature": 1.0, "top_k": 20, "top_p": 0.8},
        {"counts": 1, "frequency": 0.3, "bias": 4, "temperature": 1.0, "typical_p": 0.7},
        {},
    ]
    for vocab_size in [60, 5000] + [128256] * large:
        compare(random_logits(len(asked), vocab_size, torch.float32, device), choice_of(asked, vocab_size, device))


def check_filters(device: str, large: bool) -> None:
    for rows, vocab_size in [(12, 50), (4, 5000)] + [(64, 128256)] * large:
        for temperature in (0.01, 1.0, 30.0):
            asked: list[Row] = [{"temperature": temperature, **_filters(vocab_size)} for _ in range(rows)]
            compare(random_logits(rows, vocab_size, torch.float32, device), choice_of(asked, vocab_size, device))


def _filters(vocab_size: int) -> Row:
    asked: Row = {}
    if random.random() < 0.6:
        asked["top_k"] = random.choice([1, 2, 20, vocab_size // 2, vocab_size - 1])
    if random.random() < 0.6:
        asked["top_p"] = random.choice([0.0, 0.1, 0.75, 0.9, 0.999])
    if random.random() < 0.4:
        asked["min_p"] = random.choice([0.001, 0.1, 1.0])
    if random.random() < 0.4:
        asked["typical_p"] = random.choice([0.0, 0.2, 0.9, 0.999, 1.0])
    return asked


def check_filters_of_equal_scores(device: str, large: bool) -> None:
    """The smaller ids stay, exactly as many as asked for; also where they are too many to be collected."""
    for vocab_size in [100, 9000] + [128256] * large:
        kept = vocab_size // 3
        logits = torch.zeros(5, vocab_size, device=device)
        logits[3, 5] = 1e-3
        asked: list[Row] = [
            {"temperature": 1.0, "top_k": kept},
            {"temperature": 1.0, "top_p": kept / vocab_size},
            {"temperature": 1.0, "top_k": 2 * kept, "top_p": 0.5},
            {"temperature": 1.0, "top_k": kept, "min_p": 0.5},
            {"temperature": 1.0, "typical_p": kept / vocab_size},
        ]
        chosen = compare(logits, choice_of(asked, vocab_size, device))
        assert int(chosen.token_ids.max()) <= kept


def check_unusable(device: str, large: bool) -> None:
    """NaN and infinities fail their rows alone, and give a token that a next pass can look up."""
    asked: list[Row] = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}]
    for value in (float("nan"), float("inf"), float("-inf")):
        logits = random_logits(6, 5000, torch.float32, device)
        logits[:3, 4500] = value
        if value < 0:
            logits[:3] = value
        report = torch.full((6, 3), -1, dtype=torch.int32, device=device)
        chosen = sampling.choose(logits, choice_of(asked * 2, 5000, device), report)
        assert report[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
        assert bool(((chosen.token_ids >= 0) & (chosen.token_ids < 5000)).all())


def check_rows_alone(device: str, large: bool) -> None:
    """The same bits alone and in a batch."""
    asked: list[Row] = [{"temperature": 1.0}, {}, {"temperature": 0.7, "top_k": 9}, {"counts": 1, "presence": 1.0}]
    logits = random_logits(len(asked), 5000, torch.float32, device)
    together = choice_of(asked, 5000, device)
    expected = compare(logits, together)
    assert together.counts is not None
    for row in range(len(asked)):
        words = together.words[row * len(RowWord) : (row + 1) * len(RowWord)].clone()
        words[RowWord.BIAS : RowWord.END + 1] = 0
        words[RowWord.COUNTS] = words[RowWord.COUNTS].clamp(max=0)
        single = SamplingInputs(
            words=torch.cat((words, words.new_zeros(1))),
            counts=together.counts[row : row + 1],
            filtered=int(words[RowWord.FILTERED]),
            filtered_at=len(RowWord),
            random="temperature" in asked[row],
            extras="counts" in asked[row],
            logprobs=True,
        )
        alone = compare(logits[row : row + 1], single)
        assert torch.equal(alone.report[0], expected.report[row])


def check_counts(device: str, large: bool) -> None:
    """Known tokens and those of a pass in flight. A full count stays as it is, and so does the prompt's bit."""
    counts = torch.zeros((5, 40), dtype=torch.int16, device=device)
    counts[1, 7], counts[2, 7], counts[3, 7] = -0x8000, 0x7FFF, -1
    places = torch.tensor([[0, 3], [40, 7], [80, -1], [120, -2], [160, -3]], device=device)
    expected = counts.clone()
    newest = torch.tensor([7, 7, 39], device=device)
    sampling.count_tokens(counts, places, newest)
    sampling.count_tokens.reference(expected, places, newest)
    assert torch.equal(counts, expected)
    values = [int(counts[0, 3]), int(counts[1, 7]), int(counts[2, 7]), int(counts[3, 7]), int(counts[4, 39])]
    assert values == [1, -0x7FFF, 0x7FFF, -1, 1]


def check_masks(device: str, large: bool) -> None:
    """Rows without a mask, and what lies beside a row's logits, stay as they are."""
    for vocab_size, dtype in (
        (300, torch.bfloat16),
        (4096, torch.float32),
        (4097, torch.float16),
        (9999, torch.bfloat16),
    ):
        wide = torch.randn(5, vocab_size + 7).to(dtype).to(device)
        width = sampling.mask_words(vocab_size)
        words = torch.randint(-(2**63), 2**63 - 1, (4 + 2 * width,))
        words[2:4] = torch.tensor([3, 1])  # rows
        inputs = SamplingInputs(
            words=words.to(device), counts=None, filtered=0, filtered_at=0, random=False, extras=False, logprobs=False,
            masked=2, masked_at=2, masks_at=4,
        )  # fmt: skip
        expected = wide.clone()
        sampling.mask_rows(wide[:, :vocab_size], inputs)
        sampling.mask_rows.reference(expected[:, :vocab_size], inputs)
        assert torch.equal(wide, expected)
        assert wide[[1, 3]].isinf().any()
        assert not wide[[0, 2, 4]].isinf().any()


def check_device_sampler(device: str, large: bool) -> None:
    """The class that calls the kernels, against the host's sampler."""
    for seed in range(40 if large else 8):
        check_mixture(100 + seed, torch.device(device))
    for seed in range(8 if large else 1):
        check_overlap(100 + seed, torch.device(device))


CHECKS: dict[str, Callable[[str, bool], None]] = {
    "greedy": check_greedy,
    "drawn": check_drawn,
    "extras": check_extras,
    "filters": check_filters,
    "filters_of_equal_scores": check_filters_of_equal_scores,
    "unusable": check_unusable,
    "counts": check_counts,
    "rows_alone": check_rows_alone,
    "masks": check_masks,
    "device_sampler": check_device_sampler,
}


def run(name: str, device: str, *, large: bool) -> None:
    """Run one check; its assertions tell."""
    random.seed(0)
    with checking(device):
        CHECKS[name](device, large)


def interpret(name: str) -> None:
    """For `interpreter`."""
    run(name, "cpu", large=False)
