"""The up-projected form of MLA for prompts: each head's keys and values are computed from the latents first.

T tokens, H heads, C size of the latents, N and R plain and rotated features of a key, V features of a value, S positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from engine.kernels.attention import PrefillPlan
from engine.kernels.codes import decoded
from engine.kernels.device import twin
from engine.kernels.mla.absorbed import Latents
from engine.kernels.mla.forms import Forms


@twin("engine.kernels.mla.triton_up_projected")
def up_projected_attention(
    q: torch.Tensor, kept: Latents, plan: PrefillPlan, out_of_latents: torch.Tensor, forms: Forms, *, scale: float
) -> torch.Tensor:
    """Return [T, H, V] for `q` [T, H, N + R], rotated; `out_of_latents` [H (N + V), C]: of each head keys' rows, then values'.

    `kept` holds the new tokens' latents already; `plan` lists the contexts' blocks. What is made at once fits into `forms.room`
    bytes: pieces of the contexts, or here some heads of one context, but at least one.
    """
    starts, found = plan.batch.query_start.tolist(), []
    for index, context in enumerate(plan.batch.context_len.tolist()):
        rows = slice(starts[index] - starts[0], starts[index + 1] - starts[0])
        latents, rotated = _gathered(kept, plan.batch.block_table[index], context)
        found.append(_attend_one(q[rows], latents, rotated, out_of_latents, forms, scale))
    return found[0] if len(found) == 1 else torch.cat(found)


def _gathered(kept: Latents, table: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents [S, C] and rotated keys [S, R] of a context, contiguous."""
    blocks = table[: -(-context // kept.rotated.shape[2])].long()

    def rows(part: torch.Tensor) -> torch.Tensor:
        return part[:, 0, :, 0].index_select(0, blocks).flatten(0, 1)[:context]

    latents = rows(kept.latents)
    if kept.codes is not None:
        scales = None if kept.codes.scales is None else rows(kept.codes.scales)
        latents = decoded(latents, scales, kept.codes.factors[0], kept.codes.dtype)
    return latents, rows(kept.rotated)


def _attend_one(
    q: torch.Tensor,
    latents: torch.Tensor,
    rotated: torch.Tensor,
    out_of_latents: torch.Tensor,
    forms: Forms,
    scale: float,
) -> torch.Tensor:
    """One sequence, some heads at a time. Torch's fused kernel needs keys and values of one size: the shorter are zero-padded."""
    shape, context = replace(forms.shape, num_heads=1), latents.shape[0]
    size = max(shape.plain + shape.rotated, shape.value)
    at_once = max(1, forms.room // (context * q.element_size() * (shape.made + 2 * size)))
    out = q.new_empty((*q.shape[:2], shape.value))
    is_whole = context == len(q)
    mask = None if is_whole else torch.ones(len(q), context, dtype=torch.bool, device=q.device).tril_(context - len(q))
    for first in range(0, q.shape[1], at_once):
        heads = slice(first, min(first + at_once, q.shape[1]))
        made = linear(latents, out_of_latents[heads.start * shape.made : heads.stop * shape.made])
        parts = made.unflatten(1, (-1, shape.made)).transpose(0, 1).split((shape.plain, shape.value), dim=2)
        keys, values = (q.new_zeros((heads.stop - heads.start, context, size)) for _ in parts)
        keys[..., : shape.plain], values[..., : shape.value] = parts
        keys[..., shape.plain : shape.plain + shape.rotated] = rotated
        queries = torch.nn.functional.pad(q[:, heads], (0, size - q.shape[2])).transpose(0, 1)
        result = scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, is_causal=is_whole, scale=scale
        )
        out[:, heads] = result[0, ..., : shape.value].transpose(0, 1)
    return out
