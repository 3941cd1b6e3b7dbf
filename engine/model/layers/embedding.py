"""Both ends of a model: token ids -> embeddings, and the final norm with the LM head. V vocabulary, E hidden size."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.batch.batch import ForwardBatch
from engine.formats.product import Linear, LinearSpec
from engine.model.layers.building import declare_norm
from engine.model.layers.halves.placeholders import Placeholders
from engine.model.stream import Stream
from engine.spec.model import ModelSpec
from engine.weights.parameters import Shard, Weights, whole

HEAD = "lm_head"


class Embedding:
    """The embedding table."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        table = whole("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.table = spec.quantization.table.declare(table, weights)
        self._placeholders: Placeholders | None = None
        own = spec.embedding
        if own.placeholders:
            self._placeholders = Placeholders(own.placeholders, spec.hidden_size, weights)
        self._norm = declare_norm(spec.norms, weights, own.norm, spec.hidden_size) if own.norm else None
        if own.is_normed:
            plain = replace(spec.norms, kind="rms", has_weight=False)
            self._norm = declare_norm(plain, weights, "", spec.hidden_size)
        self._multiplier: torch.Tensor | None = None
        if own.multiplier != 1.0:  # rounded, as in the checkpoint's own code
            self._multiplier = torch.tensor(own.multiplier, dtype=weights.dtype, device=weights.device)

    def __call__(self, batch: ForwardBatch) -> Stream:
        x = self.table.rows(batch.token_ids, batch.sources, batch.newest)
        x = x if self._multiplier is None else x * self._multiplier
        x = x if self._norm is None else self._norm(x)
        return Stream(x if self._placeholders is None else self._placeholders.instead(x, batch))


class Head:
    """The final norm and the LM head."""

    def __init__(self, spec: ModelSpec, weights: Weights, embedding: Embedding) -> None:
        own = spec.head
        norm = replace(spec.norms, kind=own.norm_kind or spec.norms.kind)
        self._norm = declare_norm(norm, weights, own.norm, spec.hidden_size)
        self._multiplier, self._softcap = own.multiplier, own.softcap
        if own.is_tied:
            weights.unused.add(f"{HEAD}.weight")  # some checkpoints have the table twice
            bias = weights.new(whole(f"{HEAD}.bias", spec.vocab_size)) if own.bias else None
            self._linear: Linear = embedding.table.head(bias, weights)
        else:
            outputs = {HEAD: spec.vocab_size}
            product = LinearSpec(inputs=spec.hidden_size, outputs=outputs, bias=own.bias, shard=Shard.OUTPUTS)
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
