"""Multi-head latent attention (MLA): each token caches one compressed vector that all heads share.

The absorbed form projects queries into the latent space; the plan names the prompts that are up-projected instead. An indexer
may select the positions that absorbed queries attend to, for its layer and for the following layers that have none.

T tokens, E hidden size, Hq heads, C size of the latents, R rotated and N other features of a query, V features of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from engine.batch.batch import ForwardBatch
from engine.formats.product import LinearSpec
from engine.kernels.attention import AttentionPlan
from engine.kernels.mla import (
    Latents,
    forms_on,
    mla_attention,
    opened,
    rotate_queries,
    up_projected_attention,
    write_latents,
)
from engine.kernels.norm import rms_norm
from engine.kernels.sparse import sparse_attention
from engine.model.layers.building import Surroundings
from engine.model.layers.kv_scales import declare_factors
from engine.model.layers.mla.indexer import Indexer
from engine.model.stream import Stream
from engine.spec.mla import MLASpec
from engine.weights.parameters import Parameter, Part, Shard, whole

NORM_EPS = 1e-6  # their own epsilon, whatever the model's is
INTO_LATENTS, QUERIES = "self_attn.kv_a_proj_with_mqa", "self_attn.q_a_proj"


class MLAAttention:
    def __init__(self, spec: MLASpec, around: Surroundings) -> None:
        hidden, inner = around.model.hidden_size, spec.sizes.query_rank
        self._spec, self._branch = around.own(spec), around.branch
        self._rope = _rotations(spec, around)
        growth = spec.query_growth
        self._growth = None if growth is None else around.rotations.query_growth(growth)
        self._is_interleaved = spec.rope is not None and spec.rope.interleaved
        queries = {QUERIES: inner} if inner else {}
        self._inward = around.linear(
            LinearSpec(
                inputs=hidden,
                outputs=queries | {INTO_LATENTS: spec.sizes.rank + spec.sizes.rotated},
                bias=spec.bias,
                shard=Shard.NONE,
            )
        )
        self._queries = around.linear(
            LinearSpec(
                inputs=inner or hidden,
                outputs={
                    "self_attn.q_b_proj" if inner else "self_attn.q_proj": spec.sizes.num_heads * spec.sizes.query
                },
                bias=False,
                shard=Shard.HEADS,
                unit=spec.sizes.query,
            )
        )
        self._indexer = _indexer(spec, around, self._rope)
        self._query_norm = _norm("self_attn.q_a_layernorm", inner, around) if inner else None
        self._factors, self._dtype = declare_factors(spec, around), around.weights.dtype
        self._latent_norm = _latent_norm(spec, around)
        # Up-projection of MLA by head, [N + V, C]: keys and values of the compressed KV.
        self._out_of_latents = _head_by_head(spec, around) if spec.by_head else around.matrix(_out_of_latents(spec))
        self._forms = forms_on(around.weights.device, self._spec.shape(around.weights.dtype.itemsize))
        self._keys, self._values = self._out_of_latents.unflatten(0, (-1, spec.sizes.plain + spec.sizes.value)).split(
            (spec.sizes.plain, spec.sizes.value), dim=1
        )
        self._output = around.linear(
            LinearSpec(
                inputs=spec.sizes.num_heads * spec.sizes.value,
                outputs={"self_attn.o_proj": hidden},
                bias=spec.bias,
                shard=Shard.INPUTS,
                unit=spec.sizes.value,
            )
        )

    def __call__(self, stream: Stream, batch: ForwardBatch, kept: Sequence[torch.Tensor], *, is_last: bool) -> None:
        """Attend; `kept` is one view of the pool, [num_blocks, 1, block_size, 1, C + R]; if quantised, see `opened`.

        The last one is the indexer's keys, if there is an indexer.
        """
        keys, own = kept[-1], kept if self._indexer is None else kept[:-1]
        latents = opened(own, self._spec.sizes.rank, self._factors, self._dtype)
        spec, plan, positions = self._spec, batch.attention[self._spec.heads], batch.positions
        if spec.rope is None:
            positions = torch.zeros_like(positions)
        x = self._branch.read(stream)
        inward = self._inward(x)
        write_latents(
            inward[:, spec.sizes.query_rank :], positions, self._rope, batch.slots, latents,
            norm=self._latent_norm, eps=NORM_EPS, interleaved=self._is_interleaved,
        )  # fmt: skip
        if self._indexer is not None:
            self._indexer.write(x, batch, keys)
        asking = x if self._query_norm is None else inward[:, : spec.sizes.query_rank]
        if is_last and batch.has_prompts:
            rows = batch.sampled_rows
            if batch.final is None or rows is None:
                stream.only(None)
                return
            asking, positions, plan = asking.index_select(0, rows), positions.index_select(0, rows), batch.final
            x = x if self._indexer is None else x.index_select(0, rows)
            stream.only(rows)
        if self._query_norm is not None:
            asking = rms_norm(asking.contiguous(), self._query_norm, NORM_EPS)
        if self._indexer is not None:
            stream.selected = self._indexer.choose(x, asking, positions, keys, plan)
        q = self._queries(asking).unflatten(-1, (-1, spec.sizes.query))  # not rotated yet
        if self._growth is not None:
            q = q * self._growth[positions].to(q.dtype)[:, None, None]
        selected = stream.selected if spec.sparse else None
        self._branch.add(stream, self._output, self._attend(q, positions, latents, plan, selected).flatten(1))

    def _attend(
        self,
        q: torch.Tensor,
        positions: torch.Tensor,
        latents: Latents,
        plan: AttentionPlan,
        selected: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return [T, Hq, V] for `q` [T, Hq, N + R]; `selected` [T, K]: positions for absorbed queries, None: all."""
        made = plan.made
        if made is None:
            return self._absorbed(q, positions, latents, plan, selected)
        spec, behind = self._spec, slice(made.first, None)
        queries = q[behind].clone()
        rotate_queries(q[behind], positions[behind], self._rope, queries, interleaved=self._is_interleaved)
        found = up_projected_attention(
            queries, latents, made.prompts, self._out_of_latents, self._forms, scale=spec.scale
        )
        if not made.first:
            return found
        selected = None if selected is None else selected[: made.first]
        return torch.cat((self._absorbed(q[: made.first], positions[: made.first], latents, plan, selected), found))

    def _absorbed(
        self,
        q: torch.Tensor,
        positions: torch.Tensor,
        latents: Latents,
        plan: AttentionPlan,
        selected: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return [T, Hq, V], from absorbed queries [T, Hq, C + R]."""
        spec = self._spec
        absorbed = q.new_empty((*q.shape[:2], spec.sizes.rank + spec.sizes.rotated))
        absorbed[..., : spec.sizes.rank] = torch.matmul(
            q[..., : spec.sizes.plain].transpose(0, 1), self._keys
        ).transpose(0, 1)
        rotate_queries(q, positions, self._rope, absorbed, interleaved=self._is_interleaved)
        if selected is None:
            found = mla_attention(absorbed, latents, plan, rank=spec.sizes.rank, scale=spec.scale)
        else:
            found = sparse_attention(absorbed, latents, plan, selected, rank=spec.sizes.rank, scale=spec.scale)
        return torch.matmul(found.transpose(0, 1), self._values.transpose(1, 2)).transpose(0, 1)


def _rotations(spec: MLASpec, around: Surroundings) -> torch.Tensor:
    """The rotary table; without rope, of position 0, which rotates nothing."""
    if spec.rope is not None:
        return around.rotations.table(spec.rope, spec.sizes.rotated)
    half = torch.ones(1, spec.sizes.rotated // 2, device=around.weights.device)
    return torch.cat((half, torch.zeros_like(half)), dim=1)


def _indexer(spec: MLASpec, around: Surroundings, table: torch.Tensor) -> Indexer | None:
    """Return this layer's indexer; None for dense attention, or if the preceding layer's selection is reused."""
    if spec.sparse is None or spec.sparse.indexer is None:
        return None
    return Indexer(spec.sparse.indexer, around, table, query_rank=spec.sizes.query_rank, most=spec.sparse.most)


def _norm(name: str, size: int, around: Surroundings) -> torch.Tensor:
    return around.weights.new(whole(f"{name}.weight", size), under=around.under)


def _latent_norm(spec: MLASpec, around: Surroundings) -> torch.Tensor:
    """The norm's weight times the latents' multiplier, in float32, so that only the product is rounded."""
    if spec.latent_scale == 1.0:
        return _norm("self_attn.kv_a_layernorm", spec.sizes.rank, around)
    weight = around.in_float32("self_attn.kv_a_layernorm.weight", spec.sizes.rank)
    around.weights.when_loaded.append(partial(_times, weight, spec.latent_scale))
    return weight


def _times(weight: torch.Tensor, scale: float) -> None:
    weight.mul_(scale)


def _out_of_latents(spec: MLASpec) -> LinearSpec:
    size = spec.sizes.plain + spec.sizes.value
    outputs = {"self_attn.kv_b_proj": spec.sizes.num_heads * size}
    return LinearSpec(inputs=spec.sizes.rank, outputs=outputs, bias=False, shard=Shard.HEADS, unit=size)


def _head_by_head(spec: MLASpec, around: Surroundings) -> torch.Tensor:
    """The same matrix, with separate tensors for each head's keys and values."""
    size = spec.sizes.plain + spec.sizes.value
    parts = tuple(
        Part(name=f"self_attn.{name}.{head}.weight", rows=rows, expert=head)
        for head in range(spec.sizes.num_heads)
        for name, rows in (("k_b", slice(0, spec.sizes.plain)), ("v_b", slice(spec.sizes.plain, size)))
    )
    shape = (spec.sizes.num_heads, size, spec.sizes.rank)
    parameter = Parameter(shape=shape, parts=parts, shard=Shard.EXPERTS)
    return around.weights.new(parameter, under=around.under).flatten(0, 1)
