"""The two ends of a model: token ids -> rows of the embedding, and the last norm with the head. V vocabulary, E hidden size."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.batch.batch import ForwardBatch
from engine.formats.product import Linear, LinearSpec
from engine.model.layers.beside.placeholders import Placeholders
from engine.model.layers.building import declare_norm
from engine.model.stream import Stream
from engine.spec.model import ModelSpec
from engine.weights.parameters import Shard, Weights, whole

HEAD = "lm_head"


class Embedding:
    """The table from token id to hidden state."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        table = whole("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.table = spec.quantization.table.declare(table, weights)
        self._placeholders: Placeholders | None = None
        if spec.placeholders:
            self._placeholders = Placeholders(spec.placeholders, spec.hidden_size, weights)
        self._norm = declare_norm(spec, weights, spec.embedding_norm, spec.hidden_size) if spec.embedding_norm else None
        if spec.norms_embedding:
            self._norm = declare_norm(replace(spec, norm="rms", norm_weight=False), weights, "", spec.hidden_size)
        self._multiplier: torch.Tensor | None = None
        if spec.embedding_multiplier != 1.0:  # rounded, as in the checkpoint's own code
            self._multiplier = torch.tensor(spec.embedding_multiplier, dtype=weights.dtype, device=weights.device)

    def __call__(self, batch: ForwardBatch) -> Stream:
        x = self.table.rows(batch.token_ids, batch.sources, batch.newest)
        x = x if self._multiplier is None else x * self._multiplier
        x = x if self._norm is None else self._norm(x)
        return Stream(x if self._placeholders is None else self._placeholders.instead(x, batch))


class Head:
    """The last norm, and the product with one output a token."""

    def __init__(self, spec: ModelSpec, weights: Weights, embedding: Embedding) -> None:
        kind = spec.end_norm or spec.norm
        self._norm = declare_norm(replace(spec, norm=kind), weights, spec.final_norm, spec.hidden_size)
        self._multiplier, self._softcap = spec.logits_multiplier, spec.logits_softcap
        if spec.has_tied_head:
            weights.unused.add(f"{HEAD}.weight")  # some checkpoints have the table twice
            bias = weights.new(whole(f"{HEAD}.bias", spec.vocab_size)) if spec.head_bias else None
            self._linear: Linear = embedding.table.head(bias, weights)
        else:
            outputs = {HEAD: spec.vocab_size}
            product = LinearSpec(inputs=spec.hidden_size, outputs=outputs, bias=spec.head_bias, shard=Shard.OUTPUTS)
            self._linear = spec.format_of(HEAD).linear(product, weights, under="")

    def __call__(self, stream: Stream, batch: ForwardBatch, *, out: torch.Tensor | None) -> torch.Tensor | None:
        """Return the sampled rows' logits [R, V], None for R = 0."""
        if not batch.num_sampled:
            return None
        if batch.sampled_rows is not None and not batch.has_prompts:
            stream.only(batch.sampled_rows)
        logits = self._linear(stream.normed(self._norm), out=out)
        if self._multiplier != 1.0:
            logits.mul_(self._multiplier)
        if self._softcap:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
