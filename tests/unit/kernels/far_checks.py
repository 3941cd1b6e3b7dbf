"""Checks that kernels reach beyond 2^31 elements and 2^33 bytes of a tensor: there they compute what they compute near its start.

`test_far.py` runs them in Triton's interpreter, where memory that nobody touches costs nothing; `tests/gpu/test_kernels.py` on a
GPU. Sums of two offsets of 32 bits wrap around in both.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels import attention, delta, mamba, rope
from engine.kernels.codes import Codes
from engine.kernels.delta import Channels, Columns, Span, StateBatch, convolve
from engine.kernels.embedding import InputTokens, embed
from engine.kernels.experts import Experts, triton_few, triton_few_groups, triton_many, triton_many_codes
from engine.kernels.experts.mixture import Product
from engine.kernels.mamba import MambaHeads
from engine.kernels.mla import Latents, mla_attention, write_latents
from engine.kernels.quantised.fp8 import Fp8Matrix
from engine.kernels.quantised.groups import Groups
from engine.kernels.sparse import selected_positions, sparse_attention, write_keys
from engine.model.layers.delta import delta_heads
from engine.sampling.device import DeviceSampler
from engine.spec.states import DeltaSpec
from engine.step.staging import NewestTokens
from kvtransfer.cuda.mover import BlockMover
from kvtransfer.digest import block_digests
from tests.unit.engine.generate import new_sequence
from tests.unit.kernels import (
    codes_checks,
    fp8_checks,
    group_checks,
    mla_checks,
    references,
    selective_checks,
    sparse_checks,
)
from tests.unit.kernels.state_passes import passes
from tests.unit.kernels.triton_checks import checking

DECODING, PROMPTS = [(1, 1), (1, 70)], [(5, 40), (3, 3)]  # new tokens, positions
# 2^31 elements of 4 bytes, and a multiple of 2^32 of fewer: an offset that wraps around points elsewhere.
FAR_BYTES = 1 << 33
_PREFAULTS_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on


def untouched(num_bytes: int, device: str) -> torch.Tensor:
    """Bytes that hold anything."""
    if device != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=_PREFAULTS_NOTHING), dtype=torch.uint8)


def rows_before(near: torch.Tensor) -> int:
    """So many rows are `FAR_BYTES`."""
    return -(-FAR_BYTES // (near.stride(0) * near.element_size()))


def far(near: torch.Tensor, before: int) -> torch.Tensor:
    """The same rows, as far apart, behind `before` others."""
    count = (before + len(near)) * near.stride(0)
    memory = untouched(count * near.element_size(), str(near.device)).view(near.dtype)
    found = memory.as_strided((before + len(near), *near.shape[1:]), near.stride())
    found[before:].copy_(near)
    return found


def same(found: torch.Tensor, near: torch.Tensor, what: object) -> None:
    bits = [each.contiguous().view(torch.uint8) for each in (found, near)]
    assert torch.equal(*bits), f"{what}: far from the start it computes something else"


def check_attention(device: str) -> None:
    """Decoding and prompts over a pool of numbers and of codes."""
    for lengths, kind in ((DECODING, None), (DECODING, "int8"), (PROMPTS, None), (PROMPTS, "int8")):
        q, pages, batch = references.attention_case(
            lengths, heads=(4, 2), head_dim=64, block_size=16, dtype=torch.float16, device=device
        )
        q, codes = q.contiguous(), None
        if kind is not None:
            pages, codes = codes_checks.pool_of(pages.nan_to_num(), kind)
        before, found = rows_before(pages), []
        for pool, meaning, first in ((pages, codes, 0), (far(pages, before), far_codes(codes, before), before)):
            moved = replace(batch, block_table=batch.block_table + first)
            plan = references.plan_of(q, moved, num_kv_heads=2, block_size=16, window=0)
            found.append(attention.paged_attention(q, pool, plan, attention.Scores(scale=0.1), codes=meaning))
        same(found[1], found[0], (lengths, kind))


def far_codes(codes: Codes | None, before: int) -> Codes | None:
    if codes is None or codes.scales is None:
        return codes
    return replace(codes, scales=far(codes.scales, before))


def check_writing(device: str) -> None:
    """Keys and values, by both kernels."""
    positions, cos_sin = torch.arange(5, dtype=torch.int32, device=device), torch.rand(9, 64, device=device)
    plain, other = rope.Heads(), rope.Heads(interleaved=True)
    for how, kind in ((plain, None), (plain, "int8"), (other, None), (other, "int8"), (other, "fp8")):
        pages, codes = torch.zeros(4, 2, 16, 2, 64, device=device).half(), None
        if kind is not None:
            pages, codes = codes_checks.pool_of(pages, kind)
        before, pools = rows_before(pages), []
        qkv = torch.randn(5, 8 * 64, device=device).half()
        for pool, meaning, first in ((pages, codes, 0), (far(pages, before), far_codes(codes, before), before)):
            slots = torch.tensor([first * 16 + slot for slot in (3, 4, 17, 40, 63)], dtype=torch.int32, device=device)
            rope.rope_and_write_kv(qkv, positions, cos_sin, slots, pool, how, codes=meaning)
            scales = None if meaning is None else meaning.scales
            pools.append([each[first:] for each in (pool, scales) if each is not None])
        for one, other in zip(*pools, strict=True):
            same(other, one, (how.interleaved, kind))


def check_latents(device: str) -> None:
    for lengths, kind in ((DECODING, None), (DECODING, "int8"), (PROMPTS, None), (PROMPTS, "int8")):
        q, both, batch = references.attention_case(
            lengths, heads=(4, 1), head_dim=48, block_size=16, dtype=torch.float16, device=device
        )
        q, kept = q.contiguous(), mla_checks.kept_of(both[:, :1].nan_to_num(), 32, kind)
        before, found = rows_before(kept.latents), []
        positions, cos_sin = torch.arange(3, dtype=torch.int32, device=device), torch.rand(9, 16, device=device)
        product, norm = torch.randn(3, 48, device=device).half(), torch.ones(32, device=device).half()
        for pool, first in ((kept, 0), (_far_latents(kept, before), before)):
            moved = replace(batch, block_table=batch.block_table + first)
            plan = references.plan_of(q, moved, num_kv_heads=1, block_size=16, window=0)
            found.append(mla_attention(q, pool, plan, rank=32, scale=0.1))
            slots = torch.tensor([first * 16 + slot for slot in (3, 17, 40)], dtype=torch.int32, device=device)
            write_latents(product, positions, cos_sin, slots, pool, norm=norm, eps=1e-6, interleaved=False)
            found.append(mla_attention(q, pool, plan, rank=32, scale=0.1))
        same(found[2], found[0], (lengths, kind))
        same(found[3], found[1], (lengths, kind, "written"))


def check_sparse(device: str) -> None:
    """An indexer's keys, its choice, and attention to that."""
    for lengths in (DECODING, PROMPTS):
        q, both, batch = references.attention_case(
            lengths, heads=(4, 1), head_dim=48, block_size=16, dtype=torch.float16, device=device
        )
        q, both = q.contiguous(), both[:, :1].nan_to_num()
        before, found = rows_before(both), []
        positions, cos_sin = sparse_checks.positions_of(batch), torch.rand(80, 16, device=device)
        weights, product = torch.rand(len(q), 4, device=device), torch.randn(3, 48, device=device).half()
        norm, places = (torch.ones(48, device=device).half(),) * 2, torch.arange(3, dtype=torch.int32, device=device)
        for pool, first in ((both, 0), (far(both, before), before)):
            moved = replace(batch, block_table=batch.block_table + first)
            plan = references.plan_of(q, moved, num_kv_heads=1, block_size=16, window=0)
            lists = selected_positions(q, weights, positions, pool, plan, 8, 80)
            kept = Latents(pool[..., :32], pool[..., 32:])
            found.append((lists, sparse_attention(q, kept, plan, lists, rank=32, scale=0.1)))
            slots = torch.tensor([first * 16 + slot for slot in (3, 17, 40)], dtype=torch.int32, device=device)
            write_keys(product, places, cos_sin, slots, pool, norm=norm, eps=1e-6, interleaved=False)
        for near, away in zip(*found, strict=True):
            same(away, near, lengths)
        same(pool[before:], both, (lengths, "written"))


def _far_latents(kept: Latents, before: int) -> Latents:
    """Both parts are views of one pool, each with its own memory here."""
    return replace(
        kept,
        latents=far(kept.latents, before),
        rotated=far(kept.rotated, before),
        codes=far_codes(kept.codes, before),
    )


def check_states(device: str) -> None:
    """The delta rule, Mamba's scans and the convolution in front of them, with prompts beside decoding."""
    rule = delta_heads(DeltaSpec(num_key_heads=2, num_value_heads=2, key_dim=16, value_dim=16, taps=4))
    scan = MambaHeads(num_heads=2, head_dim=16, groups=1, state_size=16, taps=4)
    channels = Channels(spans=(Span(columns=Columns(first=3, step=40), groups=1, width=40),), taps=3)
    *_, of = passes(16, device)
    x, mixed = torch.randn(of.num_rows, 200, device=device), torch.randn(of.num_rows, 96, device=device)
    weight, rates = torch.randn(40, 3, device=device), torch.randn(3, 2, device=device)

    def convolution(kept: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        return convolve(x, weight, None, kept, batch, channels)

    def delta_rule(states: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        return delta.delta_rule(mixed, x, *rates[:2], states, batch, rule)

    def mamba_scan(states: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        return mamba.scan(mixed[:, :64], x, *rates, states, batch, scan)

    given = selective_checks.Given.drawn(
        selective_checks.Sizes(channels=32, state_size=16, rank=1, block_size=16), of.num_rows, torch.float32, device
    )

    def selective_scan(states: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        return mamba.selective_scan(*given.all, states, batch)

    own = [row for each in of.sequences for row in range(each.row, each.row + each.count)]
    of_heads, of_channels = (1, 1, 2, 256), (1, 1, 32, 16)
    kinds = (
        (delta_rule, of_heads),
        (mamba_scan, of_heads),
        (selective_scan, of_channels),
        (convolution, (2, 1, 1, 40)),
    )
    for act, shape in kinds:
        near = torch.randn(40, *shape, device=device)
        before = rows_before(near)
        there = far(near, before)
        found = [act(near, of.batch)[own], act(there, _moved(of.batch, before))[own]]
        same(found[1], found[0], act.__name__)
        same(there[before:], near, (act.__name__, "states"))


def _moved(batch: StateBatch, before: int) -> StateBatch:
    """Every place is so many blocks further."""
    moves, tiles = batch.moves.clone(), batch.tiles.clone()
    tiles[:, [2, 3, 5]] = torch.where(tiles[:, [2, 3, 5]] >= 0, tiles[:, [2, 3, 5]] + before, tiles[:, [2, 3, 5]])
    return StateBatch(torch.where(moves >= 0, moves + before, moves), tiles, batch.runs)


def check_experts(device: str) -> None:
    """Each kernel, with pairs alone and in tiles: what it reads of an expert, and its biases."""
    hidden, size = 128, 64
    plain = [torch.randn(3, *shape, device=device).half() for shape in ((2 * size, hidden), (hidden, size))]
    for name, kernel, tile, matrices in (
        ("plain, alone", triton_few, 0, plain),
        ("plain, few", triton_few, 16, plain),
        ("plain, many", triton_many, 64, plain),
        *((f"fp8 {block}, {tile}", kernel, tile, _in_fp8(block, hidden, size, device))
          for block, kernel, tile in ((None, triton_few, 0), ((64, 64), triton_few, 16), ((64, 64), triton_many_codes, 128))),
        *((f"{kind}, {tile}", kernel, tile, _in_groups(kind, hidden, size, device))
          for kind, kernel, tile in (("awq", triton_few_groups, 0), ("q4_k", triton_many_codes, 128))),
    ):  # fmt: skip
        _check_experts(name, kernel, tile, matrices, hidden, size, device)


def _check_experts(
    name: str, kernel: ModuleType, tile: int, matrices: Any, hidden: int, size: int, device: str
) -> None:
    biases = [torch.randn(3, width, device=device).half() for width in (2 * size, hidden)]
    x = torch.randn(4, hidden, device=device).half()
    inner = torch.randn(4, size, device=device).half()
    for gated in (True, False):
        near, bias = matrices[not gated], biases[not gated]
        first = _elements(near)
        before, found = rows_before(first), []
        for at, (each, its) in ((0, (near, bias)), (before, (_far_matrices(near, before), far(bias, before)))):
            experts = Experts(gate_up=each, down=each, gate_up_bias=its, down_bias=its)
            weights = torch.linspace(0.5, 1.0, 4, device=device)[:, None]
            out = torch.zeros((4, size) if gated else (1, 4, hidden), dtype=torch.float16, device=device)
            ids = torch.tensor([at + expert for expert in (2, 0, 2, 1)], dtype=torch.int32, device=device)
            order, tiles = ids, ids
            if tile:
                order = torch.tensor([1, 3, 0, 2], dtype=torch.int32, device=device)
                cuts = [(at, 0, 1, 0), (at + 1, 1, 1, 0), (at + 2, 2, 2, 0), (-1, 4, 0, 0)]
                tiles = torch.tensor(cuts, dtype=torch.int32, device=device)
            rows = x if gated else inner
            kernel.write(
                Product(
                    x=rows, experts=experts, weights=weights, out=out,
                    order=order, tiles=tiles, tile=tile, first=gated,
                )
            )  # fmt: skip
            found.append(out)
        assert bool(found[0].any()), name
        same(found[1], found[0], (name, gated))


def _in_fp8(block: tuple[int, int] | None, hidden: int, size: int, device: str) -> list[Fp8Matrix]:
    found = []
    for rows, inputs in ((2 * size, hidden), (hidden, size)):
        each = [fp8_checks.matrix(rows, inputs, block, device) for _ in range(3)]
        weight = torch.stack([one.weight.view(torch.uint8) for one in each]).view(each[0].weight.dtype)
        found.append(Fp8Matrix(weight, torch.stack([one.scale for one in each]), block))
    return found


def _in_groups(kind: str, hidden: int, size: int, device: str) -> list[Groups]:
    found = []
    for rows, inputs in ((2 * size, hidden), (hidden, size)):
        each = [group_checks.matrix(group_checks.KINDS[kind], rows, inputs, device)[0] for _ in range(3)]
        names = [name for name in ("codes", "scales", "zeros", "minimums") if getattr(each[0], name) is not None]
        found.append(replace(each[0], **{name: torch.stack([getattr(one, name) for one in each]) for name in names}))
    return found


def _elements(matrices: torch.Tensor | Fp8Matrix | Groups) -> torch.Tensor:
    if isinstance(matrices, torch.Tensor):
        return matrices
    return matrices.weight if isinstance(matrices, Fp8Matrix) else matrices.codes


def _far_matrices(matrices: Any, before: int) -> Any:
    if isinstance(matrices, torch.Tensor):
        return far(matrices, before)
    names = ("weight", "scale") if isinstance(matrices, Fp8Matrix) else ("codes", "scales", "zeros", "minimums")
    parts = {name: getattr(matrices, name) for name in names if getattr(matrices, name) is not None}
    return replace(matrices, **{name: far(part, before) for name, part in parts.items()})


def check_tokens(device: str) -> None:
    """A table of embeddings, and logits of rows far from each other, chosen from in every way."""
    table = torch.randn(3, 512, device=device).half()
    before, none = rows_before(table), torch.full((3,), -1, dtype=torch.int32, device=device)
    ids, newest = torch.arange(3, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    near, distant = InputTokens(ids, none, newest), InputTokens(ids + before, none, newest)
    same(embed(far(table, before), distant), embed(table, near), "embedding")

    ways: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 40})
    ways += ({"temperature": 1.0, "typical_p": 0.9}, {"repetition_penalty": 1.3, "logprobs": 2})
    logits = (3 * torch.randn(len(ways), 600, device=device)).half()
    apart = untouched(len(ways) * FAR_BYTES // 4, device).view(torch.float16).view(len(ways), -1)[:, :600]
    apart.copy_(logits)
    found = []
    for rows in (logits, apart):
        sampler = DeviceSampler(600, len(ways), logits.device)
        sequences = [new_sequence("a", [5, 9], **{"seed": 3, **way}) for way in ways]
        draw = sampler.launch(rows, [each.schedule(2) for each in sequences], NewestTokens.none(logits.device))
        found.append(draw.wait())
    assert found[0] == found[1], "sampling"
    assert None not in found[0]


def check_moves(device: str) -> None:
    near = torch.randint(-(2**31), 2**31 - 1, (3, 4096), dtype=torch.int32, device=device)
    before = rows_before(near)
    there = far(near, before)
    if there.is_cuda:
        torch.cuda.synchronize()
    assert BlockMover(there).digests([before + 2, before]) == block_digests(near.cpu(), [2, 0])


def check_broken(device: str) -> None:
    """What `test_far.py` must see: an embedding whose offset has 32 bits."""
    table = torch.arange(3 * 512, dtype=torch.int32, device=device).view(3, 512)
    before = rows_before(table)
    found = []
    for rows, at in ((table, 1), (far(table, before), before + 1)):
        found.append(torch.empty(512, dtype=torch.int32, device=device))
        _row_by_32_bits[(1,)](rows, torch.tensor([at], dtype=torch.int32, device=device), found[-1], width=512)
    same(found[1], found[0], "broken")


@triton.jit
def _row_by_32_bits(table, ids, out, width: tl.constexpr):
    at = tl.arange(0, width)
    tl.store(out + at, tl.load(table + tl.load(ids) * width + at))


CHECKS: dict[str, Callable[[str], None]] = {
    "attention": check_attention,
    "writing": check_writing,
    "latents": check_latents,
    "sparse": check_sparse,
    "states": check_states,
    "experts": check_experts,
    "tokens": check_tokens,
    "moves": check_moves,
}


def run(name: str, device: str, *, large: bool = False) -> None:
    """Run one check; its assertions tell. On a GPU it takes 20 GB."""
    with checking(device):
        (CHECKS | {"broken": check_broken})[name](device)


def interpret(name: str) -> None:
    """For `interpreter`."""
    run(name, "cpu")
