"""A pool's shape and size, and its parts as tensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from common.pages import KVLayout, PagePart
from engine.cache.pages import allocate_zeros, block_size, layout_of, part_views, pool_dtype, pool_shape
from engine.config import EngineConfig
from engine.model.stage import Stage

KEYS = PagePart(layers=3, planes=2, heads=4, dim=8, dtype="bfloat16")
LATENT = PagePart(layers=2, planes=1, heads=1, dim=24, dtype="float32")
STATE = PagePart(layers=2, planes=1, heads=4, dim=16, dtype="float32", per_token=False)
CONFIG = EngineConfig(model=Path("any"), num_blocks=5, block_size=16)


def pool_of(layout: KVLayout) -> torch.Tensor:
    return allocate_zeros(pool_shape(layout), pool_dtype(layout), "cpu")


def test_one_part_is_a_pool_of_its_own_dtype_and_shape() -> None:
    layout = layout_of([KEYS], CONFIG, 0)

    assert pool_shape(layout) == (5, 3, 2, 16, 4, 8)
    assert pool_dtype(layout) is torch.bfloat16
    pool = pool_of(layout)
    assert part_views(pool, layout)[0] is pool
    assert pool[0].nbytes == layout.block_bytes


def test_a_state_alone_has_one_slot_a_block() -> None:
    layout = layout_of([STATE], CONFIG, 0)

    assert pool_shape(layout) == (5, 2, 1, 1, 4, 16)
    assert pool_of(layout)[0].nbytes == layout.block_bytes == 2 * 4 * 16 * 4


def test_several_parts_share_a_blocks_bytes_without_gaps_or_overlap() -> None:
    layout = layout_of([KEYS, LATENT, STATE], CONFIG, 0)
    pool = pool_of(layout)

    views = part_views(pool, layout)

    assert pool_shape(layout) == (5, layout.block_bytes)
    assert [tuple(view.shape) for view in views] == [(5, 3, 2, 16, 4, 8), (5, 2, 1, 16, 1, 24), (5, 2, 1, 1, 4, 16)]
    assert [view.dtype for view in views] == [torch.bfloat16, torch.float32, torch.float32]
    for view in views:
        view[2].view(torch.uint8).add_(1)
    assert (pool[2] == 1).all()
    assert not pool[[0, 1, 3, 4]].any()


def test_memory_is_counted_in_blocks_of_all_parts() -> None:
    config = replace(CONFIG, num_blocks=None)
    block_bytes = sum(part.block_bytes(16) for part in (KEYS, STATE))

    assert layout_of([KEYS, STATE], config, 10 * block_bytes + 1).num_blocks == 10
    with pytest.raises(ValueError, match="less than one block"):
        layout_of([KEYS, STATE], config, block_bytes - 1)


def test_a_part_that_is_no_whole_number_of_lanes_is_refused() -> None:
    odd = PagePart(layers=1, planes=1, heads=1, dim=3, dtype="bfloat16", per_token=False)

    with pytest.raises(ValueError, match="6 bytes is no multiple of 4"):
        pool_shape(layout_of([odd], CONFIG, 0))


def test_blocks_grow_with_the_state_that_each_keeps() -> None:
    keys = PagePart(layers=10, planes=2, heads=2, dim=256, dtype="bfloat16")  # of Qwen3.5-35B-A3B
    state = PagePart(layers=30, planes=1, heads=32, dim=128 * 128, dtype="float32", per_token=False)

    assert block_size([keys]) == 16
    assert block_size([keys, state]) == 1024
    assert block_size([keys, replace_layers(state, 1)]) == 32
    assert block_size([state]) == 1024


def replace_layers(part: PagePart, layers: int) -> PagePart:
    return msgspec.structs.replace(part, layers=layers)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its memory")
def test_blocks_take_memory_once_they_are_written() -> None:
    before = _resident_mb()
    pool = allocate_zeros((64, 1 << 19), torch.bfloat16, "cpu")  # 64 MB
    assert _resident_mb() - before < 16
    assert not pool[5].any()
    assert pool[::8].add_(1).eq(1).all()
    assert not pool[1].any()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its memory")
def test_what_weights_are_made_of_is_given_back() -> None:
    seen = list[float]()

    def store(tensors: Mapping[str, torch.Tensor]) -> None:
        assert tensors["weight"].eq(2).all()
        seen.append(_resident_mb())

    stage = Stage(store, torch.device("cpu"))
    slot = stage.slot("weight", (64, 1 << 19), torch.bfloat16)
    before = _resident_mb()
    slot.real(slot.plan).fill_(2)
    slot.arrived(slot.plan.numel())
    assert seen[0] - before > 48
    assert _resident_mb() - before < 16


def _resident_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024
