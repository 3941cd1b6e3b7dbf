"""Ranks that share a model generate what one alone does, however the work is cut up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.checkpoint.safetensors import CheckpointError
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import read_model_spec
from engine.spec.model import UnsupportedModelError
from engine.spec.ranks import for_rank
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.catalogue import CASES
from tests.unit.engine.ranks import engine_of_ranks, generated

# Kinds of layers that ranks share in ways of their own. All other cases are `long`.
FIRST = {
    "llama": (2, 4),
    "gpt_oss": (2,),
    "deepseek_v3": (2,),
    "afmoe": (2,),
    "qwen3_next": (2,),
}


def _parameter(case: Case, size: int) -> object:
    is_first = size in FIRST.get(case.name, ()) and not case.is_long
    return pytest.param(case, size, id=f"{case.name} {size}", marks=[] if is_first else [pytest.mark.long])


OURS = [_parameter(case, size) for case in CASES if not case.name.startswith("by ") for size in (2, 4)]


# A family and the form of its keys and values.
KV_KINDS = [
    (name, kind) for name in ("gpt_oss", "deepseek_v3", "llama", "qwen3_next") for kind in ("int8", "fp8", "int4")
]
KV_KINDS.remove(("deepseek_v3", "int4"))  # refused by name: latents have no codes of 4 bits


def _refused(config: EngineConfig, size: int) -> str:
    """The error for a model that so many ranks don't share."""
    try:
        for_rank(read_model_spec(config.model), 0, size)
    except UnsupportedModelError as error:
        return str(error)
    return ""


@pytest.mark.quick("llama 2", "deepseek_v3 2", "qwen3_next 2")
@pytest.mark.parametrize(("case", "size"), OURS)
def test_ranks_generate_what_one_does(case: Case, size: int, tmp_path: Path) -> None:
    config = EngineConfig(
        model=case.build(tmp_path), max_model_len=case.max_model_len, cache=CacheConfig(num_blocks=160)
    )
    if refused := _refused(config, size):
        assert f"--tensor-parallel-size {size}" in refused
        assert size not in FIRST.get(case.name, ())
        return
    ranks = engine_of_ranks(config, size)
    assert generated(ranks, shortest=case.shortest) == generated(Engine(config), shortest=case.shortest)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[] if (name, size) == ("mixtral", 2) else [pytest.mark.long])
        for name in ("mixtral", "qwen3_moe", "deepseek_v3", "qwen2_moe")
        for size in (2, 4)
    ],
)
def test_ranks_cut_experts(name: str, size: int, tmp_path: Path) -> None:
    """Mixtral's are 5 here, which ranks could not share whole."""
    case = next(case for case in CASES if case.name == name)
    config = EngineConfig(
        model=case.build(tmp_path), max_model_len=case.max_model_len, cache=CacheConfig(num_blocks=160)
    )
    ranks = engine_of_ranks(replace(config, enable_expert_parallel=False), size)
    assert generated(ranks) == generated(Engine(config))


def test_experts_that_are_not_cut_are_refused(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "gpt_oss")
    config = EngineConfig(model=case.build(tmp_path), enable_expert_parallel=False, cache=CacheConfig(num_blocks=8))
    with pytest.raises(
        CheckpointError, match=r"experts\.\w+ has all experts of a layer.*take --enable-expert-parallel"
    ):
        engine_of_ranks(config, 2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*each, marks=[] if each == ("llama", "int8") else [pytest.mark.long]) for each in KV_KINDS],
)
def test_ranks_keep_codes_of_their_heads(name: str, kind: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    config = EngineConfig(
        model=case.build(tmp_path),
        max_model_len=case.max_model_len,
        # One size for both widths: a state fills fewer of a wider share's blocks.
        cache=CacheConfig(num_blocks=160, block_size=256 if name == "qwen3_next" else 16, kv_cache_dtype=kind),
    )
    assert generated(engine_of_ranks(config, 2)) == generated(Engine(config))


def test_a_rank_has_its_heads_of_the_pool_and_half_of_the_weights(tiny_model: Callable[[str], Path]) -> None:
    config = EngineConfig(model=tiny_model("llama"), cache=CacheConfig(num_blocks=8))
    ranks, alone = engine_of_ranks(config, 2), Engine(config)

    (part,) = ranks.layout.pages
    assert (part.heads, part.first_head, part.all_heads) == (1, 0, 2)
    assert 2 * ranks.layout.block_bytes == alone.layout.block_bytes
    assert not ranks.layout.compatible_with(alone.layout)
