"""Cards of 8 to 141 GB, without a card: the pool that is left, what loading takes, and doctor's word before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.weights.drawn import DRAWN
from engine.cache.pages import blocks_of_a_sequence, plan_layout
from engine.config import CacheConfig, DraftConfig, EngineConfig
from engine.families import model_spec
from engine.spec.model import DraftSpec
from services.runtime.checks import memory
from services.runtime.checks.finding import Finding
from services.runtime.checks.gpus import Gpu
from services.runtime.checks.weights import Weights

GB = 10**9
# Bytes that CUDA tells of as a card's.
CARDS = {
    "H200": 150_110_000_000,
    "H100 80 GB": 84_970_000_000,
    "RTX 4090, 24 GB": 25_250_000_000,
    "RTX 4060, 8 GB": 8_320_000_000,
}
GPU: dict[str, Any] = {"device": "cuda", "max_batch_tokens": 8192, "max_sequences": 256}  # a worker's by default
CUDA_BYTES = GB // 2  # a context of CUDA, before anything is computed
LLAMA_8B: dict[str, Any] = DRAWN["llama-3.1-70b"] | {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


class Case(NamedTuple):
    """`weights`: GB once loaded. `tokens`: the least that the pool holds, 0 where none fits. `fits`: doctor's word."""

    card: str
    model: dict[str, Any]
    weights: float
    tokens: int
    fits: bool


CASES = [
    Case("H200", LLAMA_8B, 16.1, 900_000, True),
    Case("H200", DRAWN["llama-3.1-70b"], 72.7, 180_000, True),
    Case("H200", DRAWN["llama-3.1-70b"], 141.1, 0, False),
    Case("H200", DRAWN["qwen3-30b-a3b"], 61.1, 750_000, True),
    Case("H100 80 GB", LLAMA_8B, 16.1, 450_000, True),
    Case("H100 80 GB", DRAWN["llama-3.1-70b"], 72.7, 10_000, True),
    Case("H100 80 GB", DRAWN["llama-3.1-70b"], 80.0, 0, False),
    Case("H100 80 GB", DRAWN["qwen3-30b-a3b"], 61.1, 150_000, True),
    Case("RTX 4090, 24 GB", LLAMA_8B, 16.1, 40_000, True),
    Case("RTX 4090, 24 GB", LLAMA_8B, 8.6, 100_000, True),
    Case("RTX 4090, 24 GB", DRAWN["qwen3-30b-a3b"], 17.5, 40_000, True),
    Case("RTX 4090, 24 GB", DRAWN["qwen3-30b-a3b"], 31.2, 0, False),
    Case("RTX 4060, 8 GB", LLAMA_8B, 5.8, 2_000, True),
    Case("RTX 4060, 8 GB", LLAMA_8B, 8.6, 0, False),
]


def named(case: Case) -> str:
    return f"{case.card}, {case.weights} GB of {case.model['model_type']}"


def free_on(monkeypatch: pytest.MonkeyPatch, case: Case) -> int:
    """Let CUDA tell of the card with its weights; the bytes that are free."""
    total = CARDS[case.card]
    free = max(total - int(case.weights * GB) - CUDA_BYTES, 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    return free


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_pool_takes_what_weights_and_a_pass_leave(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, spec = free_on(monkeypatch, case), model_spec(case.model)
    config = EngineConfig(**GPU, model=tmp_path)
    if not case.tokens:
        with pytest.raises(ValueError, match=r"less than one block of \d+ bytes: give .*--quantization"):
            plan_layout(spec, config, "bfloat16")
        return
    layout = plan_layout(spec, config, "bfloat16")
    tokens = layout.num_blocks * layout.block_size
    assert case.tokens <= tokens < 1.5 * case.tokens
    assert layout.num_blocks * layout.block_bytes < free - 0.06 * CARDS[case.card]
    assert blocks_of_a_sequence(layout, case.tokens) <= layout.num_blocks


@pytest.mark.parametrize("case", [case for case in CASES if case.tokens], ids=named)
def test_loading_bounds_the_pool_where_it_takes_more_than_a_pass(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, spec = free_on(monkeypatch, case), model_spec(case.model)
    config = EngineConfig(**GPU, model=tmp_path)
    loading = int(0.9 * free) - int(0.01 * CARDS[case.card])
    layout = plan_layout(spec, config, "bfloat16", while_loading=loading)
    pool = layout.num_blocks * layout.block_bytes
    assert 0 <= free - loading - int(0.01 * CARDS[case.card]) - pool < layout.block_bytes


@pytest.mark.parametrize(("in_blocks", "logits"), [(False, 1), (True, 7)])
def test_the_graphs_of_drafts_are_left_room(
    in_blocks: bool, logits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that reads three layers has graphs with 8 bytes for each logit of 256 sequences."""
    free_on(monkeypatch, Case("RTX 4090, 24 GB", LLAMA_8B, 8.6, 0, True))
    plain = replace(model_spec(LLAMA_8B), draft=DraftSpec(layers=(), aux_layers=(1, 2, 3), in_blocks=in_blocks))

    def pool(num_drafts: int) -> int:
        config = EngineConfig(**GPU, model=tmp_path, draft=DraftConfig(num_drafts=num_drafts))
        layout = plan_layout(plain, config, "bfloat16")
        return layout.num_blocks * layout.block_bytes

    taken, of_logits = pool(0) - pool(7), logits * 256 * 8 * plain.vocab_size
    assert of_logits < taken < of_logits + (128 << 20)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_memory_that_is_asked_for_is_taken_whatever_the_card(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a 24 GB card's pool can be tried on a larger one: 2 GiB are 2 GiB, and one MiB is too little for a block of 70B."""
    free_on(monkeypatch, case)
    spec = model_spec(case.model)
    config = EngineConfig(**GPU, model=tmp_path, cache=CacheConfig(kv_memory_bytes=2 << 30))
    layout = plan_layout(spec, config, "bfloat16")
    assert 0 <= (2 << 30) - layout.num_blocks * layout.block_bytes < layout.block_bytes
    with pytest.raises(ValueError, match="give more --kv-memory-mb"):
        plan_layout(spec, EngineConfig(**GPU, model=tmp_path, cache=CacheConfig(kv_memory_bytes=1 << 18)), "bfloat16")


@pytest.mark.parametrize("case", CASES, ids=named)
def test_doctor_says_before_what_the_engine_finds(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of codes, which stay on a card what they are in the file."""
    parameters = int(case.weights * GB) // 2
    monkeypatch.setattr(memory, "weights_of", lambda model: Weights(1, 2 * parameters, {"BF16": parameters}))
    found: Finding = memory.check_fit(Path("model"), gpus=[Gpu(case.card, CARDS[case.card])])
    assert (found.level == "ok") == case.fits == bool(case.tokens), found.said
    assert case.fits or "--quantization" in found.remedy
