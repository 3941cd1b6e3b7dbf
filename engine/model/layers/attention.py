"""Grouped-query attention (GQA) over the paged KV cache.

T tokens, E hidden size, Hq query heads, Hkv key and value heads, D head size. Queries, keys and values are one matrix and
one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch.nn.functional import layer_norm, pad, softplus

from engine.batch.batch import ForwardBatch
from engine.formats.product import LinearSpec
from engine.kernels.activation import gated_heads
from engine.kernels.attention import AttentionPlan, Scores, needs_qkv, paged_attention
from engine.kernels.codes import Codes, headless, opened
from engine.kernels.rope import Heads, rope_and_write_kv
from engine.model.layers.building import Surroundings
from engine.model.layers.kv_scales import declare_factors
from engine.model.layers.norm import RmsNorm
from engine.model.stream import Lent, Stream
from engine.spec.attention import AttentionSpec
from engine.weights.parameters import Parameter, Shard, Way, stacked

VALUES = "self_attn.v_proj"
SINKS = ("self_attn.sinks", "self_attn.attention_sink_bias")


class GroupedQueryAttention:
    def __init__(self, spec: AttentionSpec, around: Surroundings) -> None:
        hidden, head_dim, num_heads = around.model.hidden_size, spec.heads.head_dim, spec.heads.num_heads
        projections, borrows = spec.projections, spec.sharing.borrows
        self._branch = around.branch
        outputs = {"self_attn.q_proj": spec.q_size * (1 + spec.has_fused_gate)}
        if not borrows:
            outputs |= {"self_attn.k_proj": spec.kv_size, VALUES: spec.heads.num_kv_heads * spec.value_size}
        own = around.own(spec)
        self._gate_rows = own.gate_size
        if spec.gate is not None and spec.gate.module:
            outputs[spec.gate.module] = spec.gate_size
        self._qkv = around.linear(
            LinearSpec(
                inputs=hidden,
                outputs=outputs,
                bias=projections.qkv_bias,
                shard=Shard.HEADS,
                unit=gcd(head_dim, spec.value_size, spec.gate_size // num_heads),
                fused=projections.fused,
                twice={VALUES: "self_attn.k_proj"} if spec.values.are_keys and not borrows else {},
            )
        )
        output = {projections.output: hidden}
        self._output = around.linear(
            LinearSpec(
                inputs=num_heads * spec.value_size,
                outputs=output,
                bias=projections.output_bias,
                shard=Shard.INPUTS,
                unit=spec.value_size,
            )
        )
        self._rotation = _rotation(spec, around)
        self._of_product, self._clip = _of_product(own, around), projections.clip
        self._value_size = spec.value_size
        self._cos_sin = None if spec.rope is None else around.rotations.table(spec.rope, head_dim)
        self._scores = Scores(
            scale=head_dim**-0.5 if spec.scores.scale is None else spec.scores.scale,
            window=spec.window,
            softcap=spec.scores.softcap,
            sinks=_sinks(spec, around) if spec.scores.sinks else None,
        )
        self._heads = own.heads
        self._lends, self._borrows = spec.sharing.lends, borrows
        self._factors = declare_factors(replace(spec, codes=None) if borrows else spec, around)
        self._is_gated, self._dtype = spec.has_fused_gate, around.weights.dtype
        self._has_softplus = spec.gate is not None and spec.gate.activation == "softplus"

    def __call__(self, stream: Stream, batch: ForwardBatch, kept: Sequence[torch.Tensor], *, is_last: bool) -> None:
        """Attend; `kept` is a view of the pool, [num_blocks, 2, block_size, Hkv, D]; with scales, also one of these."""
        lent = stream.lent[self._borrows] if self._borrows else None
        kv, codes = opened(kept, self._factors if lent is None else lent.factors, self._dtype)
        plan = batch.attention[self._heads]
        q, product, gate = self._project(stream, batch, plan, kv, codes)
        qkv = None
        if needs_qkv(plan, kv, codes):
            qkv = product if lent is None else lent.product
        if self._lends:
            stream.lent[self._lends] = Lent(qkv, self._factors)
        if is_last and plan.prefill is not None:
            # Later tokens only need the other rows' keys and values, which are written already.
            rows = batch.sampled_rows
            if batch.final is None or rows is None:
                stream.only(None)
                return
            q, qkv, plan = q.index_select(0, rows), None, batch.final
            product = product.index_select(0, rows) if self._is_gated else product
            gate = None if gate is None else gate.index_select(0, rows)
            stream.only(rows)
        x = paged_attention(q, kv, plan, self._scores, qkv=qkv, codes=codes, once=batch.once)
        if self._is_gated:
            x = gated_heads(x, product)
        x = x[..., : self._value_size]
        if gate is not None:
            x = self._weighed(x, gate)
        self._branch.add(stream, self._output, x.flatten(-2))

    def keep(self, x: torch.Tensor, batch: ForwardBatch, kept: Sequence[torch.Tensor]) -> None:
        """Write the keys and values of rows [T, E] that are normed already; see `__call__`. Not for gates and clipping."""
        kv, codes = opened(kept, self._factors, self._dtype)
        qkv = self._qkv(x)
        qkv = qkv if self._of_product is None else self._of_product(qkv)
        rope_and_write_kv(
            qkv,
            batch.positions,
            self._cos_sin,
            batch.slots,
            kv,
            self._rotation,
            codes=codes,
            is_spare=True,
            once=batch.once,
        )

    def _weighed(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the output x [T, Hq, V] times the activated gates, [T, Hq] or [T, Hq V]."""
        weights = softplus(gate.float()).to(x.dtype) if self._has_softplus else gate.sigmoid()
        return x * weights.view(*x.shape[:2], -1)

    def _project(
        self, stream: Stream, batch: ForwardBatch, plan: AttentionPlan, kv: torch.Tensor, codes: Codes | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Project the stream to rotated queries [T, Hq, D]; keys and values are written to the pool.

        Also returns the product, with the keys and values that the pool holds if attention reads them there, and the gates.
        """
        is_cut = self._of_product is not None or self._is_gated or self._clip or self._gate_rows
        qkv = self._branch.product(stream, self._qkv, parts=plan.prefill is None and not is_cut)
        gate = None
        if self._gate_rows:
            qkv, gate = qkv[:, : -self._gate_rows].contiguous(), qkv[:, -self._gate_rows :]
        if self._clip:
            qkv = qkv.clamp(-self._clip, self._clip)
        if self._of_product is not None:
            qkv = self._of_product(qkv)
        if self._borrows:  # nothing is written
            nothing, codes = headless(kv, codes)
            q = rope_and_write_kv(
                qkv, batch.positions, self._cos_sin, batch.slots, nothing, self._rotation, codes=codes
            )
            return q, qkv, gate
        stays = needs_qkv(plan, kv, codes)
        q = rope_and_write_kv(
            qkv, batch.positions, self._cos_sin, batch.slots, kv, self._rotation,
            codes=codes, in_place=stays, is_spare=not stays, once=batch.once,
        )  # fmt: skip
        return q, qkv, gate


@dataclass(frozen=True, slots=True)
class _OverAll:
    """RMSNorm of all queries together, and of all keys."""

    q: RmsNorm
    k: RmsNorm

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        q_size, kv_size = len(self.q.weight), len(self.k.weight)
        q, k, v = qkv.split((q_size, kv_size, kv_size), dim=-1)
        return torch.cat((self.q(q), self.k(k), v), dim=-1)


@dataclass(frozen=True, slots=True)
class _OverEach:
    """LayerNorm of each head of queries and keys, with its own weights [heads, D] float32: queries', then keys'."""

    weights: torch.Tensor
    eps: float

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        num_heads, head_dim = self.weights.shape
        heads, values = qkv.split((num_heads * head_dim, qkv.shape[-1] - num_heads * head_dim), dim=-1)
        normed = layer_norm(heads.unflatten(-1, (num_heads, head_dim)).float(), (head_dim,), None, None, self.eps)
        return torch.cat(((normed * self.weights).to(qkv.dtype).flatten(-2), values), dim=-1)


@dataclass(frozen=True, slots=True)
class _WiderValues:
    """Scaled values, each head's zero-padded to the size of a key: the pool's planes have one size."""

    values: int  # features of a token
    value_size: int
    more: int  # zeros after them
    scale: float

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        others, values = qkv.split((qkv.shape[-1] - self.values, self.values), dim=-1)
        wider = pad((values * self.scale).unflatten(-1, (-1, self.value_size)), (0, self.more))
        return torch.cat((others, wider.flatten(-2)), dim=-1)


def _rotation(spec: AttentionSpec, around: Surroundings) -> Heads:
    """Return the processing of each head between the projection and the pool."""
    norm, weights = spec.qk_norm, list[torch.Tensor | None]([None, None])
    if norm is not None and norm.over == "head" and norm.has_weight:
        weights[0] = weights[1] = around.norm(norm.q_name, spec.heads.head_dim).weight
        if not spec.sharing.borrows:  # otherwise there are no keys
            weights[1] = around.norm(norm.k_name, spec.heads.head_dim).weight
    growth = spec.scores.query_growth
    return Heads(
        q_norm=weights[0],
        k_norm=weights[1],
        eps=around.model.norms.eps,
        norm_plus_one=around.model.norms.kind == "rms_plus_one",
        norms_without_weight=norm is not None and not norm.has_weight,
        norm_after=norm is not None and norm.after_rope,
        norms_values=spec.values.norm,
        interleaved=spec.rope is not None and spec.rope.interleaved,
        query_growth=None if growth is None else around.rotations.query_growth(growth),
        gated=spec.has_fused_gate,
    )


def _of_product(spec: AttentionSpec, around: Surroundings) -> _OverAll | _OverEach | _WiderValues | None:
    """Return the step on the whole projection."""
    norm, heads = spec.qk_norm, spec.heads
    if spec.value_size != heads.head_dim or spec.values.scale != 1.0:
        assert norm is None or norm.over == "head", "no family has both"
        size = spec.value_size
        return _WiderValues(heads.num_kv_heads * size, size, heads.head_dim - size, spec.values.scale)
    if norm is not None and norm.over == "each":
        rows = _modules(norm.q_name, heads.num_heads) | _modules(norm.k_name, heads.num_kv_heads)
        shape = (sum(rows.values()), heads.head_dim)
        weights = Parameter(shape=shape, parts=stacked(rows), shard=Shard.HEADS, format=torch.float32)
        return _OverEach(around.weights.new(weights, under=around.under), around.model.norms.eps)
    if norm is None or norm.over != "all":
        return None
    return _OverAll(around.norm(norm.q_name, spec.q_size), around.norm(norm.k_name, spec.kv_size))


def _modules(name: str, heads: int) -> dict[str, int]:
    """The tensors with the heads' weights, and their rows."""
    return {f"{name.format(head)}.weight": 1 for head in range(heads)} if "{}" in name else {f"{name}.weight": heads}


def _sinks(spec: AttentionSpec, around: Surroundings) -> torch.Tensor:
    """The sinks [Hq] in float32, the kernels' accumulation dtype."""
    named = [
        Parameter(
            shape=(spec.heads.num_heads,),
            parts=stacked({name: spec.heads.num_heads}),
            shard=Shard.OUTPUTS,
            format=torch.float32,
        )
        for name in SINKS
    ]
    return around.weights.new(named[0], ways=[Way(each) for each in named], under=around.under)
