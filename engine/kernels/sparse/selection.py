"""The indexer's keys, and its top-k selection of positions for each query.

T tokens, H heads of the indexer, D their size, R the rotated features, which come first; B block size, K positions at most.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import layer_norm

from engine.kernels.attention import AttentionBatch, AttentionPlan
from engine.kernels.device import twin
from engine.kernels.mla import rotate

ELEMENTS_AT_ONCE = 1 << 22  # products of queries and keys, on a CPU


def sees_more(plan: AttentionPlan, most: int) -> bool:
    """True if some query may see more positions than `most`. Unknown for a captured graph, whose passes differ."""
    prompts = plan.prefill
    if plan.num_decode and (plan.decode is None or plan.decode.max_context_len > most):
        return True
    return prompts is not None and (prompts.batch.max_context_len > most or not len(prompts.batch.context_len))


@twin("engine.kernels.sparse.triton_selection")
def write_keys(
    product: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    interleaved: bool,
) -> None:
    """Write the LayerNorm of `product` [T, D], rotated, into the pool's `keys` [num_blocks, 1, B, 1, D].

    `norm`: weight and bias [D]; the rest as for `write_latents`.
    """
    size, block_size = cos_sin.shape[1], keys.shape[2]
    normed = layer_norm(product, product.shape[1:], *norm, eps)
    normed[:, :size] = rotate(normed[:, None, :size], positions, cos_sin, interleaved)[:, 0]
    written = slots >= 0
    at = slots[written].long()
    keys[at // block_size, 0, at % block_size, 0] = normed[written].to(keys.dtype)


@twin("engine.kernels.sparse.triton_selection")
def selected_positions(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    plan: AttentionPlan,
    most: int,
    longest: int,
) -> torch.Tensor:
    """Return [T, K] int32: the positions that each token attends to, in their order, then -1.

    `q` [T, H, D], rotated; `weights` [T, H] float32. A position's score is the sum over heads of the weight times
    max(0, query * key), in float32. A token that sees at most K positions attends to all; else to the K with the highest scores,
    of equal ones to the earliest; what is no number is the lowest. Prompts whose keys and values are made see no more than K;
    no sequence more than `longest`.
    """
    at = torch.arange(most, dtype=torch.int32, device=positions.device)
    selected = torch.where(at <= positions[:, None], at, -1)
    for rows, table, context in sequences_of(plan):
        if context <= most:
            continue
        blocks = table[: -(-context // keys.shape[2])].long()
        known = keys[blocks, 0, :, 0].flatten(0, 1)[:context].float()
        step = max(1, ELEMENTS_AT_ONCE // (q.shape[1] * context))
        for first in range(rows.start, rows.stop, step):
            some = slice(first, min(first + step, rows.stop))
            products = torch.matmul(q[some].float(), known.T).clamp_(min=0)  # [rows, H, context]
            scores = torch.matmul(weights[some, None], products)[:, 0]
            seen = positions[some, None] + 1
            found = _highest(scores, seen, most)
            selected[some] = torch.where(seen > most, found, selected[some])
    return selected


def sequences_of(plan: AttentionPlan) -> Iterator[tuple[slice, torch.Tensor, int]]:
    """Yield rows, block table and context of each sequence whose queries are absorbed. Plain torch only."""
    prompts = None if plan.prefill is None else plan.prefill.batch
    for first, batch in ((0, plan.decode), (plan.num_decode, prompts)):
        if batch is not None:
            yield from _sequences(first, batch)


def _sequences(first: int, batch: AttentionBatch) -> Iterator[tuple[slice, torch.Tensor, int]]:
    starts = batch.query_start.tolist()
    for index, context in enumerate(batch.context_len.tolist()):
        rows = slice(first + starts[index] - starts[0], first + starts[index + 1] - starts[0])
        yield rows, batch.block_table[index], context


def _highest(scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
    """The positions [rows, K] of the top-k `scores` [rows, C] among the first `seen` [rows, 1], more than K of them."""
    hidden = torch.arange(scores.shape[1], device=scores.device) >= seen
    scores = scores.masked_fill(hidden | scores.isnan(), float("-inf"))
    last = scores.topk(most).values[:, -1:]
    higher, equal = scores > last, scores == last
    room = most - higher.sum(dim=1, keepdim=True)
    taken = higher | (equal & (equal.cumsum(dim=1) <= room))
    # Rows that see fewer positions may take hidden ones, too: the caller does not read those rows.
    return taken.nonzero()[:, 1].view(len(scores), most).int()
