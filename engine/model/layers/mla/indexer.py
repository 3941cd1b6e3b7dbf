"""The lightning indexer of DeepSeek's sparse attention (DSA): it selects the positions that a layer's queries attend to.

T tokens, E hidden size, Q features that queries are made of, H heads of the indexer, D their size, K positions at most.

DeepSeek rotates queries and keys by one Hadamard matrix before quantising them to 8 bits. It is orthogonal, so products are the
same without it, and nothing is quantised here.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import linear

from engine.batch.batch import ForwardBatch
from engine.formats.product import LinearSpec
from engine.kernels.attention import AttentionPlan
from engine.kernels.mla import rotate_queries
from engine.kernels.sparse import sees_more, selected_positions, write_keys
from engine.model.layers.building import Surroundings
from engine.spec.mla import IndexerSpec
from engine.weights.parameters import Shard, whole

NORM_EPS = 1e-6  # whatever the model's is
UNDER = "self_attn.indexer"


class Indexer:
    """The indexer. `table`: the layer's rotary table; `query_rank`: Q; `most`: K. It is replicated on all ranks."""

    def __init__(
        self, spec: IndexerSpec, around: Surroundings, table: torch.Tensor, *, query_rank: int, most: int
    ) -> None:
        hidden = around.model.hidden_size
        self._spec, self._rope, self._most = spec, table, most

        def product(name: str, inputs: int, outputs: int) -> LinearSpec:
            return LinearSpec(inputs=inputs, outputs={f"{UNDER}.{name}": outputs}, bias=False, shard=Shard.NONE)

        self._queries = around.linear(product("wq_b", query_rank, spec.num_heads * spec.dim))
        self._keys = around.linear(product("wk", hidden, spec.dim))
        weight, bias = (
            around.weights.new(whole(f"{UNDER}.k_norm.{kind}", spec.dim), under=around.under)
            for kind in ("weight", "bias")
        )
        self._norm = weight, bias
        # In float32, as in the reference code, whatever the checkpoint's other matrices are.
        weights = replace(whole(f"{UNDER}.weights_proj.weight", spec.num_heads, hidden), format=torch.float32)
        self._weights = around.weights.new(weights, under=around.under)
        self._scale = (spec.num_heads * spec.dim) ** -0.5

    def write(self, x: torch.Tensor, batch: ForwardBatch, keys: torch.Tensor) -> None:
        """Write the keys of x [T, E] into the pool's [num_blocks, 1, block_size, 1, D]."""
        write_keys(
            self._keys(x), batch.positions, self._rope, batch.slots, keys,
            norm=self._norm, eps=NORM_EPS, interleaved=self._spec.interleaved,
        )  # fmt: skip

    def choose(
        self, x: torch.Tensor, asking: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor | None:
        """Return the positions for x [T, E], [T, K], from queries projected from `asking` [T, Q]; None: all that a token sees."""
        longest = len(self._rope)
        if longest <= self._most or not sees_more(plan, self._most):
            return None
        q = self._queries(asking).unflatten(-1, (-1, self._spec.dim))
        queries, size = q.clone(), self._rope.shape[1]
        rotate_queries(
            q[..., :size], positions, self._rope, queries[..., :size], interleaved=self._spec.interleaved
        )  # fmt: skip
        weights = linear(x.float(), self._weights) * self._scale
        return selected_positions(queries, weights, positions, keys, plan, self._most, longest)
