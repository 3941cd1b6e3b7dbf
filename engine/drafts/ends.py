"""Embedding and LM head around a draft head's layers: its own, or the target's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from engine.formats.dense import PLAIN_TABLES
from engine.formats.product import Linear, LinearSpec, Table
from engine.kernels.embedding import InputTokens
from engine.model.decoder import Decoder
from engine.model.layers.building import Surroundings
from engine.spec.model import UnsupportedModelError
from engine.weights.parameters import Parameter, Shard, stacked, whole

MOST_LOGITS = 256  # rows of them at once
EMBEDDING, IDS, LM_HEAD = "embed_tokens.weight", "d2t", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsSpec:
    """The ends that a head brings."""

    size: int  # its hidden size
    vocab: int  # the target's
    draft_vocab: int
    has_embedding: bool
    has_head: bool
    has_ids: bool

    @classmethod
    def of(cls, names: Collection[str], *, size: int, target_size: int, vocab: int, draft_vocab: int) -> EndsSpec:
        """Find the ends among a head's tensors. Raises UnsupportedModelError where one is missing."""
        spec = cls(
            size=size,
            vocab=vocab,
            draft_vocab=draft_vocab,
            has_embedding=EMBEDDING in names,
            has_head=LM_HEAD in names,
            has_ids=IDS in names,
        )
        for name, is_there in ((EMBEDDING, spec.has_embedding), (LM_HEAD, spec.has_head)):
            if not is_there and size != target_size:
                raise UnsupportedModelError(
                    f"config.json: hidden_size = {size} without {name}: the model's has {target_size}"
                )
        if not (spec.has_ids and spec.has_head) and draft_vocab != vocab:
            raise UnsupportedModelError(f"config.json: draft_vocab_size = {draft_vocab} without {IDS}")
        return spec


class Ends:
    """The ends with weights, those of the target's decoder included."""

    def __init__(self, spec: EndsSpec, decoder: Decoder, around: Surroundings) -> None:
        self._decoder, weights = decoder, around.weights
        self._lm_head: Linear | None = None
        if spec.has_head:
            logits = {"lm_head": spec.draft_vocab}
            self._lm_head = around.linear(LinearSpec(inputs=spec.size, outputs=logits, bias=False, shard=Shard.NONE))
        self._ids: torch.Tensor | None = None
        if spec.has_ids:
            ids = Parameter(shape=(spec.draft_vocab,), parts=stacked({IDS: spec.draft_vocab}), format=torch.int64)
            self._ids = weights.new(ids).zero_()  # passes that warm up come before the weights
        self._table: Table | None = None
        if spec.has_embedding:
            self._table = PLAIN_TABLES.declare(whole(EMBEDDING, spec.vocab, spec.size), weights)

    def embedded(self, tokens: InputTokens) -> torch.Tensor:
        """The table's rows [T, E]."""
        return self._decoder.embedded(tokens) if self._table is None else self._table.rows(tokens)

    def logits_of(self, normed: torch.Tensor) -> torch.Tensor:
        """The LM head's product [T, V of the drafts] of normed rows."""
        return self._decoder.logits_of(normed) if self._lm_head is None else self._lm_head(normed)

    def all_likeliest(self, normed: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens [T] int64 of many normed rows."""
        return torch.cat([self.likeliest(self.logits_of(some)) for some in normed.split(MOST_LOGITS)])

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens [T] int64, by the target's ids."""
        ids = logits.argmax(-1)
        return ids if self._ids is None else ids + self._ids[ids]  # stored as the distance from its own number
