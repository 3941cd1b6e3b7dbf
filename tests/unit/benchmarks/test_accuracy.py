"""The engine's greedy tokens beside transformers', and how a difference is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.environment import ROOT
from benchmarks.quality.accuracy import _round_at_random, compare, judge
from tests.models import build_tiny_model


@pytest.mark.long
def test_on_the_cpu_every_token_is_the_references() -> None:
    agreement = compare(ROOT / "demo", "demo", device="cpu", seed=1)
    assert agreement.tokens == 8 * 32
    assert agreement.as_reference == agreement.as_float32 == agreement.tokens
    assert agreement.gaps == agreement.explained == ()


@pytest.mark.long
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_every_family_agrees(tmp_path: Path, family: str) -> None:
    agreement = compare(build_tiny_model(tmp_path, family), family, device="cpu", seed=2)
    assert agreement.as_float32 == agreement.tokens


def test_only_what_rounding_can_do_is_explained() -> None:
    exact = torch.tensor([[3.0, 2.9, 0.0], [3.0, 2.9, 0.0], [3.0, 2.9, 0.0], [1.0, 1.0, 0.0]])
    rounded = torch.tensor([[2.9, 2.95, 0.0], [2.9, 2.95, 0.0], [3.0, 2.9, 0.0], [1.0, 1.0, 0.0]])
    ours = torch.tensor([1, 2, 1, 1])  # rounded alike, far off, a near-tie without rounding, a tie
    agreement = judge("made up", ours=ours, exact=exact, rounded=rounded)
    assert agreement.as_reference == 1
    assert agreement.as_float32 == 0
    assert agreement.reference_as_float32 == 2
    torch.testing.assert_close(torch.tensor(agreement.explained), torch.tensor([0.1]))
    torch.testing.assert_close(torch.tensor(agreement.gaps), torch.tensor([3.0, 0.1]))
    assert "WRONG: 2" in str(agreement)
    share, wrong = agreement.results()
    assert (share.value, wrong.value) == (0.0, 2)


def test_other_roundings_explain_more() -> None:
    exact, rounded = torch.tensor([[3.0, 2.0], [3.0, 2.0]]), torch.tensor([[2.9, 2.1], [2.9, 2.1]])
    ours = torch.tensor([1, 1])
    alone = judge("made up", ours=ours, exact=exact, rounded=rounded)
    more = judge("made up", ours=ours, exact=exact, rounded=rounded, errors=[torch.tensor([0.6, 0.4])])
    assert (alone.explained, alone.gaps) == ((), (1.0, 1.0))
    assert (more.explained, more.gaps) == ((1.0,), (1.0,))


def test_results_are_rounded_up_or_down_and_right_on_average() -> None:
    torch.manual_seed(0)
    exact = torch.tensor([1.0 + 2.0**-9, -3.0, 0.1]).repeat(4096, 1)
    found = _round_at_random(torch.nn.Identity(), None, exact)
    assert torch.equal(found, found.bfloat16().float())
    assert found[:, 0].unique().tolist() == [1.0, 1.0 + 2.0**-7]
    assert found[:, 1].unique().tolist() == [-3.0]
    torch.testing.assert_close(found.mean(dim=0), exact[0], rtol=2e-4, atol=0)
