"""The two ends of a model: token ids -> rows of the embedding, and the last norm with the head. V vocabulary, E hidden size."""

from __future__ import annotations

import torch

from engine.kernels.embedding import embed
from engine.model.layers.linear import Dense
from engine.model.layers.norm import RmsNorm
from engine.model.parameters import Parameter, Shard, Weights, stacked, whole
from engine.model.spec import ModelSpec
from engine.model.stream import Stream
from engine.step.batch import ForwardBatch

HEAD = "lm_head.weight"


class Embedding:
    """The table from token id to hidden state."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.table = weights.new(whole("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size))

    def __call__(self, batch: ForwardBatch) -> Stream:
        return Stream(embed(batch.token_ids, batch.sources, batch.newest, self.table))


class Head:
    """The last norm, and the product with one output a token."""

    def __init__(self, spec: ModelSpec, weights: Weights, embedding: Embedding) -> None:
        self._norm = RmsNorm(weights.new(whole("model.norm.weight", spec.hidden_size)), spec.norm_eps)
        if spec.has_tied_head:
            weights.unused.add(HEAD)  # some checkpoints have the table twice
            self._linear = Dense(embedding.table)
        else:
            shape = (spec.vocab_size, spec.hidden_size)
            parameter = Parameter(shape=shape, parts=stacked({HEAD: spec.vocab_size}), shard=Shard.OUTPUTS)
            self._linear = Dense(weights.new(parameter))

    def __call__(self, stream: Stream, batch: ForwardBatch, *, out: torch.Tensor | None) -> torch.Tensor | None:
        """Return the sampled rows' logits [R, V], None for R = 0."""
        if not batch.num_sampled:
            return None
        if batch.sampled_rows is not None and not batch.has_prompts:
            stream.only(batch.sampled_rows)
        return self._linear(stream.normed(self._norm), out=out)
