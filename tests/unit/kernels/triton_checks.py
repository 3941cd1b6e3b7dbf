"""Checks of the Triton kernels against float64 references.

`test_triton.py` runs them in Triton's interpreter; `tests/gpu/test_kernels.py` calls them on a GPU. Every output tensor is full
of NaN (or of -1) before its kernel runs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

from common.pages import KVLayout, PagePart
from engine.kernels import activation, attention, embedding, linear, norm, rope
from engine.kernels.device import use_triton
from kvtransfer import digest
from kvtransfer.cuda import triton_blocks
from kvtransfer.cuda.mover import BlockMover, Move
from tests.unit.kernels import references
from tests.unit.kernels.references import close


def _dtypes(device: str) -> tuple[torch.dtype, ...]:
    """Arithmetic in bfloat16 is checked on GPUs only: Triton 3.6's interpreter reads some float64 results as float32."""
    return (torch.float32, torch.float16) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def checking(device: str) -> Iterator[None]:
    """Within, the kernels themselves are checked: with known seeds, and in poisoned memory."""
    assert use_triton(torch.zeros(1, device=device)), "this would check the twin"
    torch.manual_seed(0)
    with poisoned():
        yield


@dataclass(frozen=True, slots=True)
class Suite:
    """A module's checks by name, each of a device and whether its cases are large."""

    checks: Mapping[str, Callable[[str, bool], None]]

    def run(self, name: str, device: str, *, large: bool) -> None:
        """Run one check; its assertions tell."""
        with checking(device):
            self.checks[name](device, large)

    def interpret(self, name: str) -> None:
        """For `interpreter`."""
        self.run(name, "cpu", large=False)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within, new tensors without a value hold NaN, or -1 if they are integers, however they are made."""

    def poison(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = allocate(*args, **kwargs)
            return out.fill_(float("nan") if out.is_floating_point() else -1)

        return wrapped

    with ExitStack() as stack:
        for name in ("empty", "empty_like", "empty_strided", "Tensor.new_empty"):
            owner = torch.Tensor if name.startswith("Tensor") else torch
            attribute = name.rpartition(".")[2]
            stack.enter_context(mock.patch.object(owner, attribute, poison(getattr(owner, attribute))))
        yield


def check_norm(device: str, large: bool) -> None:
    for dtype in _dtypes(device):
        for rows, features in [(3, 64), (2, 100), (5, 1)] + [(300, 4096), (7, 16384), (1, 5120)] * large:
            x, residual = torch.randn(2, rows, features, device=device).to(dtype).unbind(0)
            weight = torch.randn(features, device=device).to(dtype)
            close(norm.rms_norm(x, weight, 1e-5), references.rms_norm(x, weight, 1e-5))
            normed, total = norm.add_rms_norm(x, residual, weight, 1e-5)
            close(total, x.double() + residual.double())
            close(normed, references.rms_norm(total, weight, 1e-5))
            parts = torch.randn(3, rows, features, device=device)
            normed, total = norm.add_rms_norm(parts, residual, weight, 1e-5)
            close(total, parts.double().sum(dim=0) + residual.double())
            close(normed, references.rms_norm(total, weight, 1e-5))
    wide = torch.randn(4, 2, 48, device=device)
    close(norm.rms_norm(wide[:, 0], wide[0, 1], 1e-6), references.rms_norm(wide[:, 0], wide[0, 1], 1e-6))
    close(norm.rms_norm(wide, wide[0, 1], 1e-6), references.rms_norm(wide, wide[0, 1], 1e-6))


def check_activation(device: str, large: bool) -> None:
    for dtype in _dtypes(device):
        for shape in [(3, 64), (2, 2 * 1030), (2, 3, 10)] + [(500, 28672)] * large:
            gate_up = (3 * torch.randn(shape, device=device)).to(dtype)
            close(activation.act_and_mul(gate_up), references.silu_and_mul(gate_up))
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=device)
    close(activation.act_and_mul(extreme), torch.tensor([[0.0, 200.0]], device=device))


def check_rope(device: str, large: bool) -> None:
    shapes = [(5, 4, 2, 64, 16), (3, 9, 3, 80, 4), (2, 1, 1, 16, 8)] + [(700, 32, 8, 128, 16)] * large
    for dtype in _dtypes(device):
        for tokens, q_heads, kv_heads, head_dim, block_size in shapes:
            for with_norm, parts in ((False, 1), (True, 1), (True, 3)):
                _check_rope(device, dtype, tokens, q_heads, kv_heads, head_dim, block_size, with_norm, parts)


def _check_rope(
    device: str,
    dtype: torch.dtype,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    with_norm: bool,
    parts: int,
) -> None:
    fused = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    q, k, v = fused.split([q_heads, kv_heads, kv_heads], dim=1)
    before = fused.clone()
    positions = torch.randint(0, 50, (tokens,), device=device, dtype=torch.int32)
    angles = torch.rand(50, head_dim // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    num_blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(num_blocks * block_size, device=device)[:tokens].int()
    slots[tokens // 2] = -1  # not to be written
    pool = torch.full((num_blocks, 3, 2, block_size, kv_heads, head_dim), 7.0, device=device).to(dtype)
    q_norm, k_norm = torch.randn(2, head_dim, device=device).to(dtype).unbind(0) if with_norm else (None, None)
    how, qkv = rope.Heads(q_norm=q_norm, k_norm=k_norm), fused.flatten(1)
    if parts > 1:
        shares = torch.randn(parts, *qkv.shape, device=device)
        shares[0] = qkv.float() - shares[1:].sum(dim=0)
        qkv = shares
    out = rope.rope_and_write_kv(qkv, positions, cos_sin, slots, pool[:, 1], how)
    assert torch.equal(fused, before)
    if q_norm is not None and k_norm is not None:
        q, k = norm.rms_norm.reference(q, q_norm, 1e-6), norm.rms_norm.reference(k, k_norm, 1e-6)
    close(out, references.rotated(q, positions, cos_sin))
    slots_given, wanted, slots = slots, slots >= 0, slots[slots >= 0].long()
    written = pool[slots // block_size, 1, :, slots % block_size]
    close(written[:, 0], references.rotated(k, positions, cos_sin)[wanted])
    close(written[:, 1], v[wanted].double())
    if parts == 1:
        rope.rope_and_write_kv(qkv, positions, cos_sin, slots_given, pool[:, 1], how, in_place=True)
        assert torch.equal(fused[wanted, q_heads : q_heads + kv_heads], written[:, 0])
        assert torch.equal(fused[:, :q_heads], before[:, :q_heads])
        assert torch.equal(fused[:, -kv_heads:], before[:, -kv_heads:])
    pool[slots // block_size, 1, :, slots % block_size] = 7.0
    assert bool((pool == 7.0).all()), "something was written elsewhere"


def check_chunks(device: str, large: bool) -> None:
    for dtype in _dtypes(device):
        _check_attention([(9, 9), (70, 85), (1, 30), (3, 140)], (4, 2), 64, 16, dtype, device)
    for head_dim in (16, 24, 80, 128, 256):
        for dtype in (torch.float32, torch.float16):
            _check_attention([(5, 20), (2, 2)], (2, 1), head_dim, 8, dtype, device)
    for heads in [(6, 2), (7, 1), (3, 3), (40, 1)]:
        _check_attention([(13, 33), (2, 3)], heads, 16, 4, torch.float32, device)
    for window in (1, 5, 64, 70):
        for dtype in (torch.float32, torch.float16):
            _check_attention([(20, 150), (80, 80), (2, 3)], (2, 1), 16, 16, dtype, device, window)
    if large:
        for dtype in (torch.float16, torch.bfloat16):
            for head_dim in (64, 96, 128, 256):
                for window in (0, 100):
                    _check_attention([(60, 700), (90, 90)], (8, 2), head_dim, 16, dtype, device, window)
                    _check_attention([(200, 3000), (1, 1), (90, 2500)], (8, 2), head_dim, 16, dtype, device, window)
                    _check_attention([(700, 700), (130, 2501), (1, 5)], (8, 2), head_dim, 16, dtype, device, window)


def check_chunks_from_projection(device: str, large: bool) -> None:
    """Prompts without a cached prefix: keys and values are read from the projection, and another request's NaN stays there."""
    lengths = [(9, 9), (70, 70), (33, 33)] + [(700, 700), (2500, 2500)] * large
    for dtype in (torch.float16, torch.bfloat16) if device != "cpu" else (torch.float16,):
        q, kv_layer, batch = references.attention_case(
            lengths, heads=(4, 2), head_dim=64, block_size=16, dtype=dtype, device=device
        )
        q, starts, contexts = q.contiguous(), batch.query_start.tolist(), batch.context_len.tolist()
        qkv = torch.full((len(q), 8 * 64), float("nan"), dtype=dtype, device=device)
        for sequence, (start, context) in enumerate(zip(starts, contexts, strict=False)):
            blocks = kv_layer[batch.block_table[sequence, : -(-context // 16)].long()]
            for side in (0, 1):
                rows = blocks[:, side].flatten(0, 1)[:context].flatten(1)
                qkv[start : start + context, (4 + 2 * side) * 64 : (6 + 2 * side) * 64] = rows
        expected = references.attention(q, kv_layer, batch, 0.1, 0)
        qkv[starts[1] : starts[2]] = float("nan")
        query_len = batch.query_start.cpu().diff().long().numpy()
        cut = attention.tiling(q.device, dtype, attention.HeadShape(4, 2, 64), is_plain=True)
        rows = cut.rows(batch.max_query_len, behind=False)
        tiles = cut.deal_out(query_len, query_len, np.array(starts[:-1]), rows=rows)
        prompts = attention.PrefillPlan(batch, torch.from_numpy(tiles).to(device), rows, cut.at_once, None)
        plan = attention.AttentionPlan(0, None, {}, batch.block_table, prompts)
        assert attention.needs_qkv(plan, q)
        out = attention.paged_attention(q, kv_layer, plan, attention.Scores(scale=0.1), qkv=qkv)
        others = [row for row in range(len(q)) if not starts[1] <= row < starts[2]]
        close(out[others], expected[others])


def check_decode(device: str, large: bool) -> None:
    for dtype in _dtypes(device):
        _check_attention([(1, 1), (1, 70), (1, 530)], (4, 2), 64, 16, dtype, device)
    for head_dim in (16, 24, 80, 256):
        _check_attention([(1, 20), (1, 3)], (2, 1), head_dim, 8, torch.float32, device)
    for heads in [(6, 2), (7, 1), (3, 3), (20, 1)]:
        _check_attention([(1, 33)], heads, 16, 4, torch.float32, device)
    for window in (1, 5, 64, 600):
        _check_attention([(1, 1100), (1, 512), (1, 513), (1, 4)], (2, 1), 16, 16, torch.float32, device, window)
    if large:
        for dtype in _dtypes(device):
            for head_dim in (64, 128, 256):
                for window in (0, 1000):
                    lengths = [(1, 1 + 97 * index) for index in range(40)]
                    _check_attention(lengths, (8, 2), head_dim, 16, dtype, device, window)


def check_verify(device: str, large: bool) -> None:
    """Rows of one sequence that share its items: some see nothing of the last one, and long drafts take several."""
    for heads, window in [((4, 1), 0), ((6, 2), 0), ((2, 2), 0), ((16, 1), 0), ((4, 1), 64)]:
        lengths = [(4, 4), (1, 90), (3, 66), (11, 259), (2, 640)]
        _check_attention(lengths, heads, 16, 16, torch.float32, device, window, verify=True)
    if large:
        for dtype, head_dim in itertools.product(_dtypes(device), (64, 128, 256)):
            for heads in ((8, 2), (32, 8), (28, 4), (16, 2), (5, 5)):
                lengths = [(1 + index % 6, 6 + 97 * index) for index in range(40)]
                _check_attention(lengths, heads, head_dim, 16, dtype, device, verify=True)


def check_linear(device: str, large: bool) -> None:
    shapes = [(1, 100, 256), (3, 64, 512), (17, 70, 256), (40, 33, 256)]
    shapes += [(rows, n, k) for rows in (1, 8, 33, 64, 100, 300) for n, k in ((6144, 4096), (4096, 14336))] * large
    for dtype in _dtypes(device):
        for rows, num_outputs, num_inputs in shapes:
            x = torch.randn(rows, num_inputs, device=device).to(dtype)
            weight = (torch.randn(2 * num_outputs, num_inputs, device=device) / num_inputs**0.5).to(dtype)
            for bias in (None, torch.randn(2 * num_outputs, device=device).to(dtype)):
                expected = torch.nn.functional.linear(
                    x.double(), weight.double(), None if bias is None else bias.double()
                )
                check_forms(linear, x, weight, bias, expected)


def check_forms(
    of: ModuleType, x: torch.Tensor, weight: object, bias: torch.Tensor | None, expected: torch.Tensor
) -> None:
    """A product by itself, into a given tensor, in parts, and gated: functions of the module `of`."""
    close(of.linear(x, weight, bias), expected)
    into = x.new_empty(expected.shape)
    assert of.linear(x, weight, bias, out=into) is into
    close(into, expected)
    parts = of.linear_parts(x, weight, bias)
    close(parts.sum(dim=0).to(x.dtype) if parts.dim() == 3 else parts, expected)
    close(of.gated_linear(x, weight, bias), references.silu_and_mul(expected), x.dtype)


def check_embedding(device: str, large: bool) -> None:
    table = torch.randn(50, 72, device=device)
    token_ids = torch.tensor([3, 0, 49, 7], dtype=torch.int32, device=device)
    sources = torch.tensor([-1, 1, -1, 0], dtype=torch.int32, device=device)
    newest = torch.tensor([11, 48], device=device)
    found = embedding.embed(table, embedding.InputTokens(token_ids, sources, newest))  # with -O, too
    assert torch.equal(found, table[[3, 48, 49, 11]])


def _check_attention(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    window: int = 0,
    *,
    verify: bool = False,
) -> None:
    q, kv_layer, batch = references.attention_case(
        lengths, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device=device
    )
    scale = head_dim**-0.5
    rows, drafted = references.rows_of(batch) if verify else (batch, None)
    plan = references.plan_of(q, rows, num_kv_heads=heads[1], block_size=block_size, window=window, drafted=drafted)
    out = attention.paged_attention(q.contiguous(), kv_layer, plan, attention.Scores(scale=scale, window=window))
    close(out, references.attention(q, kv_layer, batch, scale, window))


def check_blocks(device: str, large: bool) -> None:
    if device == "cpu":
        triton_blocks.PROGRAMS = 24  # the interpreter runs one after another
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for shape in [(6, 3, 10), (4, 2, 30_000)] + [(300, 32, 2, 16, 8, 128)] * large:
            pool = torch.randint(-(2**31), 2**31 - 1, shape, device=device, dtype=torch.int32)  # NaN included
            pool = pool if dtype.itemsize == 4 else torch.cat((pool, pool.flip(0)), dim=-1)
            host = pool.view(dtype)
            host = host[..., : shape[-1] // 2 * 2] if dtype.itemsize == 4 else host
            _check_moves(host.contiguous())


def check_shards_of_blocks(device: str, large: bool) -> None:
    """Digests of a worker that keeps some of the heads count lanes as the whole model's block does."""
    heads = 8 if large else 2
    parts = [PagePart(layers=3, planes=2, heads=heads, dim=16, dtype="bfloat16", first_head=heads, all_heads=4 * heads)]
    layout = KVLayout.of(parts, num_blocks=6, block_size=16)
    pool = torch.randint(-(2**31), 2**31 - 1, (6, layout.block_bytes // 4), device=device, dtype=torch.int32)
    if pool.is_cuda:
        torch.cuda.synchronize()

    assert BlockMover(pool, layout).digests([4, 0, 4]) == digest.block_digests(pool.cpu(), [4, 0, 4], layout)
    assert BlockMover(pool).digests([4]) != digest.block_digests(pool.cpu(), [4], layout)


def _check_moves(pool: torch.Tensor) -> None:
    mover, count = BlockMover(pool), len(pool) - 2
    ids, others = (torch.randperm(len(pool))[:count] for _ in range(2))
    expected = digest.block_digests(pool.cpu(), ids.tolist())
    bits = pool.view(torch.int32)
    peer = torch.zeros_like(pool)
    if pool.is_cuda:
        torch.cuda.synchronize()  # the mover has a stream of its own
    push = mover.move_to(peer.data_ptr())
    found = _run(push, ids, others)
    assert found == expected
    moved = torch.zeros_like(bits)
    moved[others] = bits[ids]
    assert torch.equal(peer.view(torch.int32), moved)
    assert _run(push, others[:1], ids[:1]) == digest.block_digests(pool.cpu(), others[:1].tolist())
    moved[ids[0]] = bits[others[0]]
    assert torch.equal(peer.view(torch.int32), moved)
    assert _run(push, ids, others) == expected  # the last move's digests alone
    assert mover.digests(ids.tolist()) == expected
    staging = torch.zeros(pool[0].numel() * count, dtype=pool.dtype, device=pool.device)
    if pool.is_cuda:
        torch.cuda.synchronize()
    found = _run(mover.gather(staging.data_ptr()), ids, None)
    assert found == expected
    assert torch.equal(staging.view(torch.int32).view(count, -1), bits[ids].flatten(1))
    _run(mover.scatter(staging.data_ptr()), None, others)
    assert torch.equal(bits[others].flatten(1), staging.view(torch.int32).view(count, -1))


def _run(move: Move, source: torch.Tensor | None, target: torch.Tensor | None) -> bytes:
    move.start(*(None if blocks is None else blocks.tolist() for blocks in (source, target)))
    give_up_at = time.monotonic() + 60
    while not move.flight.is_done():  # the bytes must be there as soon as it says so
        assert time.monotonic() < give_up_at
    return move.flight.digests()


CHECKS: dict[str, Callable[[str, bool], None]] = {
    "norm": check_norm,
    "activation": check_activation,
    "rope": check_rope,
    "chunks": check_chunks,
    "chunks_from_projection": check_chunks_from_projection,
    "decode": check_decode,
    "verify": check_verify,
    "linear": check_linear,
    "embedding": check_embedding,
    "blocks": check_blocks,
    "shards_of_blocks": check_shards_of_blocks,
}

SUITE = Suite(CHECKS)
run, interpret = SUITE.run, SUITE.interpret
