"""Random numbers by counter: the values are Triton's (`tl.randint`, `tl.rand`), recorded with its interpreter."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.sampling.philox import gumbel_noise, philox, uniforms

STEP = 30011  # between the recorded vocabulary indices


@pytest.mark.parametrize(
    ("seed", "position", "words", "first_uniform"),
    [
        (0, 0, [0x6627E8D5, 3047229269, 810609684, 1456561905], 0.7980929017066956),  # the first: Random123's own
        (42, 7, [3314573452, 348105774, 244021912, 2146460010], 0.45653143525123596),
        (2**63 + 12345 - 2**64, 100_000, [268534575, 3270677628, 2019705252, 1179867461], 0.12504613399505615),
    ],
)
def test_numbers_are_those_of_triton(seed: int, position: int, words: list[int], first_uniform: float) -> None:
    offsets = (position << 32) | torch.arange(4) * STEP
    assert philox(torch.tensor(seed), offsets).tolist() == words
    assert uniforms(torch.tensor(seed), offsets)[0].item() == first_uniform


def test_noise_is_finite_and_standard_gumbel() -> None:
    noise = gumbel_noise(torch.arange(20), torch.arange(20), 5000).double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.std().item() == pytest.approx(1.2825, abs=0.02)


def test_noise_of_a_row_depends_on_its_seed_and_position_alone() -> None:
    together = gumbel_noise(torch.tensor([1, 1, 2]), torch.tensor([0, 1, 0]), 100)
    alone = gumbel_noise(torch.tensor([1]), torch.tensor([1]), 50)
    assert torch.equal(together[1, :50], alone[0])
    assert len({tuple(row) for row in together.tolist()}) == 3


def test_the_largest_sum_of_scores_and_noise_is_drawn_from_the_distribution() -> None:
    draws = 20_000
    scores = torch.tensor([0.5, 0.2, 0.2, 0.1, 0.0]).log()
    tokens = (scores + gumbel_noise(torch.full((draws,), 42), torch.arange(draws), 5)).argmax(dim=-1)
    shares = torch.bincount(tokens, minlength=5) / draws
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.2, 0.2, 0.1, 0.0]), atol=0.015, rtol=0)
