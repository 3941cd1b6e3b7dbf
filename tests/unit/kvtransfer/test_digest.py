"""The block digest: defined by its formula, sensitive to every lane, linear over shards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from common.pages import KVLayout, PagePart
from kvtransfer.digest import block_digests, lane_view, multipliers
from kvtransfer.plan import plan_copies
from tests.examples import examples

SHAPE = (6, 2, 2, 4, 2, 8)  # num_blocks, layers, 2, block_size, heads, head_dim
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_pool(dtype: torch.dtype) -> torch.Tensor:
    pool = torch.empty(SHAPE, dtype=dtype)
    bits = torch.randint(0, 256, (pool.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pool.view(torch.uint8).reshape(-1).copy_(bits)
    return pool


def by_definition(lanes: list[int]) -> int:
    """sum_i (x_i + 1) * (splitmix64(i) | 1) mod 2^64 in plain integers."""
    total = 0
    for index, lane in enumerate(lanes):
        z = ((index + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        total += (lane + 1) * ((z ^ (z >> 31)) | 1)
    return total % 2**64


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digest_is_what_its_definition_says(dtype: torch.dtype) -> None:
    pool = random_pool(dtype)

    packed = block_digests(pool, [4, 0, 4])

    digests = [int.from_bytes(packed[start : start + 8], "little") for start in (0, 8, 16)]
    assert digests == [by_definition(lane_view(pool)[block].tolist()) for block in (4, 0, 4)]


@examples(25)
@given(dtype=st.sampled_from(DTYPES), byte=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_any_changed_byte_changes_its_blocks_digest_and_no_other(dtype: torch.dtype, byte: int, flip: int) -> None:
    pool = random_pool(dtype)
    before = block_digests(pool, range(6))
    block, offset = byte % 6, byte % (pool.nbytes // 6)

    pool.view(torch.uint8).reshape(6, -1)[block, offset] ^= flip

    after = block_digests(pool, range(6))
    changed = [index for index in range(6) if before[8 * index : 8 * index + 8] != after[8 * index : 8 * index + 8]]
    assert changed == [block]


def test_zeroes_and_swapped_lanes_are_told_apart() -> None:
    pool = torch.zeros(SHAPE)
    pool[1].flatten()[0], pool[2].flatten()[1] = 1.0, 1.0

    packed = block_digests(pool, [0, 1, 2])

    assert len({packed[start : start + 8] for start in (0, 8, 16)}) == 3


def test_partial_digests_of_head_shards_add_up_to_the_whole() -> None:
    """Lane indices are those of the unsharded model, so a shard needs only its own multipliers."""
    pool = random_pool(torch.bfloat16)
    in_lanes = (*SHAPE[:-1], SHAPE[-1] // 2)  # a lane is two numbers of one head
    lanes = lane_view(pool).reshape(in_lanes).astype(np.uint64)
    factors = multipliers(lanes[0].size).reshape(in_lanes[1:])

    shards = [((lanes[3, ..., head, :] + np.uint64(1)) * factors[..., head, :]).sum() for head in range(2)]

    assert sum(map(int, shards)) % 2**64 == int.from_bytes(block_digests(pool, [3]), "little")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_digests_of_workers_with_different_heads_add_up_to_the_whole_blocks(dtype: str) -> None:
    keys = PagePart(layers=2, planes=2, heads=4, dim=8, dtype=dtype)
    state = PagePart(layers=1, planes=1, heads=4, dim=8, dtype="float32", per_token=False)
    whole = KVLayout.of([keys, state], num_blocks=3, block_size=4)
    pool = torch.randint(0, 256, (3, whole.block_bytes), dtype=torch.uint8)
    halves = [
        KVLayout.of(
            [structs.replace(part, heads=2, first_head=first, all_heads=4) for part in (keys, state)],
            num_blocks=3,
            block_size=4,
        )
        for first in (0, 2)
    ]
    pools = []
    for half in halves:
        lanes = plan_copies(whole, half).lanes()[0]
        kept = np.ascontiguousarray(lane_view(pool)[:, lanes])
        pools.append(torch.from_numpy(kept.view(np.uint8)))

    digests = [words(block_digests(*pair)) for pair in zip(pools, ([0, 1, 2],) * 2, halves, strict=True)]

    assert [(a + b) % 2**64 for a, b in zip(*digests, strict=True)] == words(block_digests(pool, [0, 1, 2]))
    assert words(block_digests(pool, [0, 1, 2], whole)) == words(block_digests(pool, [0, 1, 2]))


def words(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[start : start + 8], "little") for start in range(0, len(packed), 8)]


def test_no_blocks_have_no_digests() -> None:
    assert block_digests(random_pool(torch.float32), []) == b""
