"""Grouped-query attention over paged keys and values.

T tokens, E hidden size, Hq query heads, Hkv key and value heads, D head size. Queries, keys and values are one matrix and
one product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.attention import AttentionPlan, needs_qkv, paged_attention
from engine.kernels.rope import rope_and_write_kv
from engine.model.layers.building import Surroundings
from engine.model.layers.linear import LinearSpec
from engine.model.parameters import Shard
from engine.model.spec import AttentionSpec
from engine.model.stream import Stream
from engine.step.batch import ForwardBatch


class GroupedQueryAttention:
    def __init__(self, spec: AttentionSpec, around: Surroundings) -> None:
        hidden, head_dim = around.model.hidden_size, spec.head_dim
        qkv = {"self_attn.q_proj": spec.q_size, "self_attn.k_proj": spec.kv_size, "self_attn.v_proj": spec.kv_size}
        output = {"self_attn.o_proj": hidden}
        self._norm = around.norm("input_layernorm")
        self._qkv = around.linear(
            LinearSpec(inputs=hidden, outputs=qkv, bias=spec.qkv_bias, shard=Shard.HEADS, unit=head_dim)
        )
        self._output = around.linear(
            LinearSpec(inputs=spec.q_size, outputs=output, bias=spec.output_bias, shard=Shard.INPUTS, unit=head_dim)
        )
        self._q_norm = around.norm("self_attn.q_norm", head_dim).weight if spec.qk_norm else None
        self._k_norm = around.norm("self_attn.k_norm", head_dim).weight if spec.qk_norm else None
        self._cos_sin = around.rotations.table(spec.rope, head_dim)
        self._eps = around.model.norm_eps
        self._scale = head_dim**-0.5
        self._window = spec.window
        self._heads = spec.heads

    def __call__(self, stream: Stream, batch: ForwardBatch, kept: Sequence[torch.Tensor], *, is_last: bool) -> None:
        """Attend; `kept` is one view of the pool, [num_blocks, 2, block_size, Hkv, D]."""
        (kv,) = kept
        plan = batch.attention[self._heads]
        q, qkv = self._project(stream.normed(self._norm), batch, plan, kv)
        if is_last and plan.prefill is not None:
            # Later tokens need only the other rows' keys and values, which are written.
            rows = batch.sampled_rows
            if batch.final is None or rows is None:
                stream.only(None)
                return
            q, qkv, plan = q.index_select(0, rows), None, batch.final
            stream.only(rows)
        x = paged_attention(q, kv, plan, scale=self._scale, window=self._window, qkv=qkv)
        stream.plus(self._output, x.flatten(-2))

    def _project(
        self, x: torch.Tensor, batch: ForwardBatch, plan: AttentionPlan, kv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Turn x [T, E] into rotated queries [T, Hq, D]; keys and values go into the pool.

        Also returns the product [T, (Hq + 2 Hkv) D] if attention reads keys and values there.
        """
        qkv = self._qkv.parts(x) if plan.prefill is None else self._qkv(x)
        stays = needs_qkv(plan, kv)
        q = rope_and_write_kv(
            qkv,
            batch.positions,
            self._cos_sin,
            batch.slots,
            kv,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            eps=self._eps,
            in_place=stays,
        )
        return q, qkv if stays else None
