"""What the kernels compute, in float64 and the plainest loops; and random inputs for them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.altup import StreamRouter
from engine.kernels.attention import (
    AttentionBatch,
    AttentionPlan,
    DecodeItems,
    HeadShape,
    PrefillPlan,
    Tiling,
    deal_out,
    first_seen,
    item_queries,
    items_at_once,
    max_items,
    point,
    tiling,
)
from engine.kernels.device import describe


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return weight.double() * wide / (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def sparse_gelu_and_mul(gate_up: torch.Tensor, cutoff: float) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    rest = (gate - gate.mean(-1, keepdim=True) - cutoff * gate.var(-1, keepdim=True, correction=0).sqrt()).clamp(min=0)
    return torch.nn.functional.gelu(rest, approximate="tanh") * up


def routed_streams(x: torch.Tensor, router: StreamRouter) -> torch.Tensor:
    """[T, S]: see `StreamRouter`."""
    return ((rms_norm(x, router.norm, router.eps) / x.shape[1]) @ router.rows.double().T).tanh()


def predicted_streams(
    streams: torch.Tensor, router: StreamRouter, coefficients: torch.Tensor, active: int
) -> torch.Tensor:
    """Stream by stream."""
    shares = routed_streams(streams[active], router) @ coefficients.double().T
    wide, num = streams.double(), len(streams)
    mixed = [sum(shares[:, of * num + other, None] * wide[other] for other in range(num)) for of in range(num)]
    return wide + torch.stack([torch.as_tensor(each) for each in mixed])


def corrected_streams(
    streams: torch.Tensor, activated: torch.Tensor, router: StreamRouter, coefficients: torch.Tensor, active: int
) -> torch.Tensor:
    shares = 1 + routed_streams(activated, router) @ coefficients.double().T
    changed = activated.double() - streams[active].double()
    return torch.stack([each.double() + shares[:, of, None] * changed for of, each in enumerate(streams)])


def streams_case(
    num_streams: int, tokens: int, features: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, StreamRouter, torch.Tensor, torch.Tensor]:
    """Streams, what a layer made of one, and weights: a router whose numbers are not all near 0, and two matrices."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    router = StreamRouter(drawn(features), drawn(num_streams, features) * features**0.5, 1e-6)
    matrices = drawn(num_streams**2, num_streams) / 2, drawn(num_streams, num_streams) / 2
    return (drawn(num_streams, tokens, features), drawn(tokens, features), router, *matrices)


def rotated(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """[T, heads, D]: the complex numbers (first half) + i (second half), rotated."""
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = cos_sin.double()[positions].chunk(2, dim=-1)
    rotated = torch.complex(first, second) * torch.complex(cos, sin)[:, None]
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Query by query and head by head."""
    block_size = kv_layer.shape[2]
    group = q.shape[1] // kv_layer.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    starts = batch.query_start.tolist()
    for sequence, context in enumerate(batch.context_len.tolist()):
        at = torch.arange(context, device=q.device)
        blocks = batch.block_table[sequence].long()[at // block_size]
        keys, values = (kv_layer[blocks, side, at % block_size].double() for side in (0, 1))  # [C, Hkv, D]
        rows = range(starts[sequence], starts[sequence + 1])
        for row in rows:
            own = context - (rows.stop - row)
            seen = slice(max(0, first_seen(own, window)), own + 1)
            for head in range(q.shape[1]):
                scores = keys[seen, head // group] @ q[row, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                weights = scores.softmax(dim=0)[: seen.stop - seen.start]
                out[row, head] = weights @ values[seen, head // group]
    return out


def attention_case(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """q, a layer of a pool and the batch for `lengths` (new tokens, context). What no sequence owns is NaN."""
    num_q_heads, num_kv_heads = heads
    counts = [-(-context // block_size) for _, context in lengths]
    num_blocks = sum(counts) + 3
    pool = torch.full((num_blocks, 2, 2, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    order = torch.randperm(num_blocks).tolist()
    table = torch.full((len(lengths), max(counts) + 1), order.pop(), dtype=torch.int32)
    for sequence, (_, context) in enumerate(lengths):
        for index in range(counts[sequence]):
            table[sequence, index] = block = order.pop()
            used = min(block_size, context - index * block_size)
            pool[block, 1, :, :used] = torch.randn(2, used, num_kv_heads, head_dim).to(dtype)
    queries = [new for new, _ in lengths]
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    # a slice of a wider tensor, as the model's fused projection gives it
    q = torch.randn(sum(queries), num_q_heads + 2 * num_kv_heads, head_dim).to(dtype).to(device)[:, :num_q_heads]
    batch = AttentionBatch(
        query_start=starts.to(device),
        context_len=torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
        block_table=table.to(device),
        max_query_len=max(queries),
        max_context_len=max(context for _, context in lengths),
    )
    return q, pool.to(device)[:, 1], batch


def plan_of(
    q: torch.Tensor,
    batch: AttentionBatch,
    *,
    num_kv_heads: int,
    block_size: int,
    window: int,
    is_plain: bool = True,
    drafted: npt.NDArray[np.bool_] | None = None,
) -> AttentionPlan:
    """The plan of a batch that only decodes, if every sequence has one new token, or of one of prompts.

    `drafted`: the rows behind others of their sequences, see `rows_of`.
    """
    num_sequences, heads = len(batch.context_len), HeadShape(q.shape[1], num_kv_heads, q.shape[2])
    if batch.max_query_len > 1:
        cut = tiling(q.device, q.dtype, heads, is_plain=is_plain and not window)
        return AttentionPlan(0, None, {}, batch.block_table, prefill_plan(batch, cut, block_size))
    contexts = batch.context_len.cpu().long().numpy()
    at_once = items_at_once(describe(q.device), num_kv_heads)
    queries = 1 if drafted is None else item_queries(heads)
    items, parts = deal_out(contexts, window=window, at_once=at_once, queries=queries, drafted=drafted)
    point(items, 0, batch.block_table.stride(0))
    assert len(items) <= max_items(num_sequences, at_once)
    nothing = torch.full((2, 8), -1, dtype=torch.int32)  # as in a graph that is larger than the pass
    padded = torch.cat((torch.from_numpy(items), nothing)).to(batch.block_table.device)
    dealt = DecodeItems(padded, torch.from_numpy(parts).to(batch.block_table.device), queries)
    return AttentionPlan(num_sequences, batch, {window: dealt}, batch.block_table, None)


def rows_of(batch: AttentionBatch) -> tuple[AttentionBatch, npt.NDArray[np.bool_]]:
    """The same with a sequence for each new token, as a pass that verifies drafts has it; and which of them are drafted."""
    new = batch.query_start.diff().long()
    owner = torch.arange(len(new), device=new.device).repeat_interleave(new)
    at = torch.arange(len(owner), device=new.device) - batch.query_start[:-1].long()[owner]
    rows = AttentionBatch(
        query_start=torch.arange(len(owner) + 1, dtype=torch.int32, device=new.device),
        context_len=(batch.context_len[owner] - new[owner] + 1 + at).int(),
        block_table=batch.block_table[owner],
        max_query_len=1,
        max_context_len=batch.max_context_len,
    )
    return rows, (at > 0).cpu().numpy()


def prefill_plan(batch: AttentionBatch, cut: Tiling, block_size: int) -> PrefillPlan:
    """Contexts are gathered from the pool, also where they consist of new tokens alone."""
    device = batch.block_table.device
    lengths, contexts = batch.query_start.cpu().diff().long(), batch.context_len.cpu().long()
    counts = -(-contexts // block_size)
    blocks = [
        (batch.block_table[sequence, index].item(), min(block_size, int(context) - index * block_size))
        for sequence, context in enumerate(contexts)
        for index in range(int(counts[sequence]))
    ]
    starts = (counts.cumsum(0) - counts) * block_size
    rows = cut.rows(batch.max_query_len, behind=True)
    tiles = cut.deal_out(lengths.numpy(), contexts.numpy(), starts.numpy(), rows=rows)
    tiles = np.concatenate((tiles, np.zeros((2, 8), dtype=np.int32)))  # as in a graph that is larger than the pass
    ids = torch.tensor(blocks, dtype=torch.int32, device=device)
    return PrefillPlan(batch, torch.from_numpy(tiles).to(device), rows, cut.at_once, ids)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert that `actual` is `expected` (float64) up to the rounding of its type, and has no NaN.

    One of ten thousand elements may be off by twice that: of millions of sums some are rounded unluckily.
    """
    tolerance = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype or actual.dtype]
    actual, expected = actual.double(), expected.double()
    unlucky = (actual - expected).abs() > tolerance * (1 + expected.abs())
    if 0 < int(unlucky.sum()) <= actual.numel() // 10_000:
        tolerance *= 2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
