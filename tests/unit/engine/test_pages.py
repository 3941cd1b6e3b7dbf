"""A pool's shape and size, and its parts as tensors."""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.weights.drawn import DRAWN
from common.pages import KVLayout, PagePart
from common.words import Keeps
from engine.cache.pages import (
    allocate_zeros,
    block_size,
    entry_views,
    layout_of,
    part_views,
    plan_layout,
    pool_dtype,
    pool_shape,
)
from engine.config import CacheConfig, EngineConfig
from engine.families import model_spec
from engine.weights.parameters import Parameter, Part, Shard, Weights
from engine.weights.stage import Stage
from tests.needs import needs

KEYS = PagePart(layers=3, planes=2, heads=4, dim=8, dtype="bfloat16")
LATENT = PagePart(layers=2, planes=1, heads=1, dim=24, dtype="float32")
STATE = PagePart(layers=2, planes=1, heads=4, dim=16, dtype="float32", per_token=False)
CONFIG = CacheConfig(num_blocks=5, block_size=16)


def pool_of(layout: KVLayout) -> torch.Tensor:
    return allocate_zeros(pool_shape(layout), pool_dtype(layout), "cpu")


def test_one_part_is_a_pool_of_its_own_dtype_and_shape() -> None:
    layout = layout_of([KEYS], CONFIG, 0)

    assert pool_shape(layout) == (5, 3, 2, 16, 4, 8)
    assert pool_dtype(layout) is torch.bfloat16
    pool = pool_of(layout)
    assert part_views(pool, layout)[0] is pool
    assert pool[0].nbytes == layout.block_bytes


@pytest.mark.parametrize(("tokens", "num"), [([KEYS], 3), ([KEYS, LATENT], 2)])
def test_a_state_has_blocks_of_its_own_in_the_same_pool(tokens: list[PagePart], num: int) -> None:
    large = msgspec.structs.replace(STATE, layers=3, heads=32)  # 2,048 bytes a layer
    inputs = PagePart(layers=3, planes=3, heads=1, dim=20, dtype="bfloat16", per_token=False)  # 120 bytes
    layout = layout_of([*tokens, large, inputs], replace(CONFIG, num_blocks=9, block_size=8), 0)
    [group] = layout.groups
    assert (group.blocks_per_entry, group.parts, layout.parts) == (num, (large, inputs), tuple(tokens))
    assert (group.keeps, group.most_entries) == (Keeps.STATE, 1)
    assert layout.block_bytes == sum(part.block_bytes(8) for part in tokens)
    assert not layout.compatible_with(msgspec.structs.replace(layout, groups=()))

    pool = pool_of(layout)
    views = entry_views(pool, layout)

    shapes = [[tuple(kept.kept.shape) for kept in layers] for layers in views]
    assert shapes == [[(9, 1, 1, 32, 16)] * 3, [(9, 3, 1, 1, 20)] * 3]
    assert {kept.number for layers in views for kept in layers} == set(range(num))
    for layers in views:
        for kept in layers:
            kept.kept[4 + kept.number].view(torch.uint8).add_(1)
    assert pool.flatten(1).view(torch.uint8).max() == 1, "two layers' states overlap"
    assert int(pool.flatten(1).view(torch.uint8).sum()) == 3 * (2048 + 120)
    assert not pool[[block for block in range(9) if block - 4 not in range(num)]].any()


def test_a_block_that_no_layers_state_fits_into_is_refused() -> None:
    large = msgspec.structs.replace(STATE, heads=128)  # 8,192 bytes a layer, a token's keys 384
    with pytest.raises(
        ValueError, match="16 tokens has 6144 bytes, less than a layer's state: give it block_size = 32"
    ):
        layout_of([KEYS, large], CONFIG, 0)
    with pytest.raises(ValueError, match="2 blocks for KV hold no sequence: beside a block of tokens it has 2 more"):
        layout_of([KEYS, large], replace(CONFIG, num_blocks=2, block_size=32), 0)
    with pytest.raises(ValueError, match="less than a layer's state: no size of blocks will do"):
        layout_of([KEYS, msgspec.structs.replace(large, heads=10_000)], CONFIG, 0)


def test_a_pool_without_room_for_one_entry_is_refused() -> None:
    windowed = msgspec.structs.replace(KEYS, layers=2 * KEYS.layers, window=20)
    assert layout_of([KEYS, windowed], replace(CONFIG, num_blocks=3), 0).groups[0].blocks_per_entry == 2
    with pytest.raises(ValueError, match="2 blocks for KV hold no sequence: beside a block of tokens it has 2 more"):
        layout_of([KEYS, windowed], replace(CONFIG, num_blocks=2), 0)


def test_several_parts_share_a_blocks_bytes_without_gaps_or_overlap() -> None:
    layout = layout_of([KEYS, LATENT], CONFIG, 0)
    pool = pool_of(layout)

    views = part_views(pool, layout)

    assert pool_shape(layout) == (5, layout.block_bytes)
    assert [tuple(view.shape) for view in views] == [(5, 3, 2, 16, 4, 8), (5, 2, 1, 16, 1, 24)]
    assert [view.dtype for view in views] == [torch.bfloat16, torch.float32]
    for view in views:
        view[2].view(torch.uint8).add_(1)
    assert (pool[2] == 1).all()
    assert not pool[[0, 1, 3, 4]].any()


def test_memory_is_counted_in_blocks_of_all_parts() -> None:
    config = replace(CONFIG, num_blocks=None)
    block_bytes = sum(part.block_bytes(16) for part in (KEYS, LATENT))

    assert layout_of([KEYS, LATENT], config, 10 * block_bytes + 1).num_blocks == 10
    with pytest.raises(ValueError, match="less than one block"):
        layout_of([KEYS, LATENT], config, block_bytes - 1)


def test_a_part_that_is_no_whole_number_of_lanes_is_refused() -> None:
    odd = PagePart(layers=1, planes=1, heads=1, dim=3, dtype="float8_e5m2")

    with pytest.raises(ValueError, match="30 bytes is no multiple of 4"):
        pool_shape(layout_of([odd], replace(CONFIG, block_size=10), 0))


def test_blocks_are_as_large_as_a_state_needs_without_much_waste() -> None:
    keys = PagePart(layers=10, planes=2, heads=2, dim=256, dtype="bfloat16")  # of Qwen3.5-35B-A3B
    state = PagePart(layers=30, planes=1, heads=32, dim=128 * 128, dtype="float32", per_token=False)

    assert block_size([[keys]]) == 16
    assert block_size([[keys, state]]) == 128  # of 2.5 MiB, with 2 MiB of a state
    assert block_size([[keys, msgspec.structs.replace(state, heads=16)]]) == 64
    keys, state = (msgspec.structs.replace(part, layers=part.layers * 6 // 5) for part in (keys, state))
    assert block_size([[keys, state]]) == 256  # of 6 MiB: three layers' states and nothing else


def test_blocks_have_the_size_that_suits_all_stages() -> None:
    """One has a layer's keys beside three states, one two layers' beside two, which alone would have half as many tokens."""
    keys = PagePart(layers=3, planes=2, heads=2, dim=256, dtype="bfloat16", all_layers=3)
    state = PagePart(layers=5, planes=1, heads=16, dim=64 * 128, dtype="float32", per_token=False, all_layers=5)
    first, second = (
        [msgspec.structs.replace(keys, layers=own), msgspec.structs.replace(state, layers=states)]
        for own, states in ((1, 3), (2, 2))
    )

    assert (block_size([first]), block_size([second])) == (256, 128)
    layouts = [layout_of(own, replace(CONFIG, block_size=None), 0, stages=[first, second]) for own in (first, second)]
    assert [layout.block_size for layout in layouts] == [256, 256]
    assert [layout.groups[0].blocks_per_entry for layout in layouts] == [3, 3]
    with pytest.raises(ValueError, match="less than a layer's state: give it block_size = 256 or more"):
        layout_of(second, replace(CONFIG, block_size=128), 0, stages=[first, second])


@pytest.mark.parametrize("convolutions", [10, 18])  # of LFM2-1.2B and LFM2-8B-A1B
def test_a_state_that_is_smaller_than_a_block_of_tokens_is_one_block(convolutions: int) -> None:
    keys = PagePart(layers=6, planes=2, heads=8, dim=64, dtype="bfloat16")
    inputs = PagePart(layers=convolutions, planes=2, heads=1, dim=2048, dtype="bfloat16", per_token=False)

    layout = layout_of([keys, inputs], CacheConfig(), 1 << 30)

    assert (layout.block_size, layout.block_bytes, layout.groups[0].blocks_per_entry) == (16, 196_608, 1)
    assert inputs.block_bytes(1) == convolutions * 8192


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its memory")
def test_blocks_take_memory_once_they_are_written() -> None:
    pool = allocate_zeros((64, 1 << 19), torch.bfloat16, "cpu")  # 64 MB
    assert _resident_mb(pool.data_ptr(), pool.nbytes) < 16
    assert not pool[5].any()
    assert pool[::8].add_(1).eq(1).all()
    assert not pool[1].any()
    assert _resident_mb(pool.fill_(1).data_ptr(), pool.nbytes) > 48


def test_a_pool_that_no_address_is_left_for_is_refused() -> None:
    with pytest.raises(MemoryError, match="lower --kv-memory-mb"):
        allocate_zeros((1 << 50,), torch.bfloat16, "cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its memory")
def test_what_weights_are_made_of_is_given_back() -> None:
    seen = list[int]()

    def store(tensors: Mapping[str, torch.Tensor]) -> None:
        weight = tensors["weight"]
        assert weight.eq(2).all()
        seen.extend((weight.data_ptr(), weight.nbytes))
        assert _resident_mb(*seen) > 48

    stage = Stage(store, torch.device("cpu"))
    slot = stage.slot("weight", (64, 1 << 19), torch.bfloat16)
    slot.real(slot.plan).fill_(2)
    slot.arrived(slot.plan.numel())
    assert _resident_mb(*seen) < 16


def test_a_gpu_keeps_room_for_what_loading_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is more than passes need: their room is free until all is loaded."""
    gb = 10**9
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * gb, 24 * gb))
    config = EngineConfig(model=tmp_path, device="cuda")
    model = model_spec(DRAWN["qwen3-30b-a3b"])
    layouts = [plan_layout(model, config, "bfloat16", while_loading=size) for size in (0, gb, 4 * gb)]
    pools = [layout.num_blocks * layout.block_bytes for layout in layouts]
    assert pools[0] == pools[1] < 8.6 * gb
    assert 10 * gb - pools[2] == pytest.approx((4 + 0.24) * gb, abs=layouts[0].block_bytes)


def test_what_loading_takes_is_known_before() -> None:
    weights = Weights(torch.bfloat16, torch.device("cpu"))
    for number, rows in enumerate((64, 128, 256)):
        parameter = Parameter(shape=(rows, 32), parts=(Part(name=f"{number}", rows=slice(0, rows)),), shard=Shard.NONE)
        weights.staged({"weight": parameter}, lambda tensors: None, temporary=100 * number)
    assert weights.bytes_while_loading == 3 * 2 * 32 * (256 + 128) + 200
    weights.new(replace(parameter, parts=(Part(name="kept", rows=slice(0, 256)),)))
    assert weights.bytes_while_loading == 3 * 2 * 32 * (256 + 128) + 200
    assert Weights(torch.bfloat16, torch.device("cpu")).bytes_while_loading == 0


def test_a_gpu_stores_one_stage_at_a_time() -> None:
    needs("triton")
    from tests.unit.kernels.card import made_up

    storing, seen = threading.Lock(), list[bool]()
    with made_up(lambda *launch: None):
        for device in ("cuda", "cpu"):
            stage = Stage(lambda tensors: seen.append(storing.locked()), torch.device(device), storing)
            slot = stage.slot("weight", (4, 8), torch.bfloat16)
            slot.real(slot.plan).fill_(2)
            slot.arrived(32)
    assert seen == [True, False]
    assert not storing.locked()


def _resident_mb(address: int, size: int) -> float:
    """Of these bytes alone: what else the process has comes and goes."""
    page = mmap.PAGESIZE
    first = -(-address // page) * page
    pages = (ctypes.c_ubyte * ((address + size - first) // page))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(len(pages) * page), pages):
        assert ctypes.get_errno() == errno.ENOMEM  # nothing is mapped there
        return 0.0
    return sum(each & 1 for each in pages) * page / 2**20
