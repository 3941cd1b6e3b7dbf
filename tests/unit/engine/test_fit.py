"""Needs of a model before its weights are read: the bytes that an engine then has."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.pages import GPU_HEADROOM
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.fit import Needs, nearest, needs
from engine.spec.stages import FLAG
from services.runtime.checks.fit import check_needs, said
from services.runtime.checks.weights import weights_of
from tests.unit.house.measures import ROOT

DEMO = EngineConfig(
    model=ROOT / "demo", cache=CacheConfig(kv_memory_bytes=4 << 20), max_sequences=8, max_batch_tokens=32
)
MIB = 1 << 20


def held() -> dict[int, int]:
    """Every storage of this process with floats, as weights are; what oneDNN packed has none, and counts by its elements."""
    found = {}
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    for each in [each for each in tensors if each.dtype.is_floating_point or each.dtype == torch.uint8]:
        if each.is_meta:
            continue
        if each.layout is torch._mkldnn:
            found[id(each)] = each.numel() * each.element_size()
        else:
            found[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
    return found


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_needs_are_the_bytes_that_an_engine_has_then(dtype: str) -> None:
    config = replace(DEMO, dtype=dtype)
    told = needs(config)
    before = held()
    engine = Engine(config)
    gc.collect()
    found = {storage: size for storage, size in held().items() if storage not in before}
    found.pop(engine.kv.untyped_storage()._cdata)
    assert told.weights == pytest.approx(sum(found.values()), rel=0.001)
    block_bytes, block_size = engine.layout.block_bytes, engine.layout.block_size
    assert told.context == -(-engine.max_model_len // block_size) * block_bytes
    assert (told.tokens, told.passes) == (engine.max_model_len, 0)


def test_needs_follow_what_is_asked_for() -> None:
    whole, short = needs(DEMO), needs(replace(DEMO, max_model_len=512))
    assert (short.weights, short.tokens) == (pytest.approx(whole.weights, rel=0.05), 512)
    assert short.context * 4 == whole.context
    codes = needs(replace(DEMO, dtype="bfloat16", cache=CacheConfig(kv_cache_dtype="int8")))
    assert 0.4 < codes.context / needs(replace(DEMO, dtype="bfloat16")).context < 0.7
    half = needs(replace(DEMO, tensor_parallel_size=2))
    assert (half.context * 2, half.weights < 0.6 * whole.weights) == (whole.context, True)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        needs(replace(DEMO, max_model_len=1 << 20))


def on_a_card(config: EngineConfig, total: int) -> tuple[Needs, Any, Any]:
    return needs(config, total=total), nearest(config, total), check_needs(config, total)


def test_needs_of_a_card_follow_the_format() -> None:
    config = replace(DEMO, device="cuda:0", max_model_len=64)
    stored = weights_of(DEMO.model).elements["BF16"]
    whole = needs(config).weights
    assert whole == pytest.approx(2 * stored, rel=0.01)
    table = 2 * 4096 * 256  # the head is the embedding's, and stays plain
    assert needs(replace(config, quantization="fp8")).weights == pytest.approx(
        table + (2 * stored - table) / 2, rel=0.02
    )
    assert needs(replace(config, quantization="int4")).weights == pytest.approx(
        table + (2 * stored - table) / 4, rel=0.07
    )


def test_on_a_card_the_nearest_setting_that_fits_is_named() -> None:
    config = replace(DEMO, device="cuda:0", max_batch_tokens=64)
    whole, _, fits = on_a_card(config, 256 * MIB)
    assert fits.level == "ok"
    assert fits.text.startswith(f"{said(whole, 8)}; this card has 256.0 MiB: room for ")
    assert whole.passes > 0.06 * 256 * MIB
    fixed = whole.weights + whole.passes - int(GPU_HEADROOM * 256 * MIB)

    def card(contexts: float) -> int:
        """A card with room for so many contexts beside all else."""
        return int((fixed + contexts * whole.context) / (1 - GPU_HEADROOM))

    _, other, short = on_a_card(config, card(0.6))
    assert (short.level, other.flags) == ("warn", "--kv-cache-dtype fp8")
    assert "not one whole context fits beside the weights; --kv-cache-dtype fp8 fits: needs" in short.said
    asked = replace(config, cache=CacheConfig(kv_cache_dtype="fp8"), quantization="fp8")
    half = on_a_card(asked, 256 * MIB)[0]
    total = int((half.whole - int(GPU_HEADROOM * 256 * MIB) - 0.4 * half.context) / (1 - GPU_HEADROOM))
    _, shorter, _ = on_a_card(asked, total)
    assert (shorter.flags, shorter.needs.tokens) == ("--max-model-len 1024", 1024)
    _, smaller, none = on_a_card(config, card(0.0) - whole.weights // 8)
    assert none.level == "fail"
    assert smaller.flags.startswith("--quantization ")
    assert f"the weights don't fit; {smaller.flags} fits: needs" in none.said
    assert on_a_card(config, whole.weights * 6 // 10)[1].flags == "--tensor-parallel-size 4"
    assert "nothing smaller" in on_a_card(config, 1 * MIB)[2].said


def test_more_stages_are_named_for_a_model_that_has_some() -> None:
    """Ranks don't share a stage."""
    cache = CacheConfig(kv_cache_dtype="fp8")
    config = replace(DEMO, device="cuda:0", max_batch_tokens=64, quantization="fp8", cache=cache)
    four, eight = (needs(config, stages=count).whole for count in (4, 8))
    for total, flags in ((four * 11 // 10, f"{FLAG} 4"), (eight * 11 // 10, f"{FLAG} 8")):
        found = nearest(config, total, 2)
        assert found is not None
        assert found.flags == flags
    assert nearest(config, eight // 2, 2) is None


def test_a_model_that_cannot_be_built_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert check_needs(replace(DEMO, model=tmp_path), 1 << 40) is None
