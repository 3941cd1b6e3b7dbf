"""P-EAGLE: an EAGLE-3 head, of one layer or several, that drafts in parallel behind mask tokens (AWS, vllm#32887).

A row behind the sampled token's reads the embedding of the mask token and learned hidden states, and predicts the token behind
it as the others do. Further layers are plain ones. T rows, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from engine.batch.batch import ForwardBatch
from engine.drafts.eagle3 import LAYER, Eagle3Head, Eagle3Spec, read_layers
from engine.drafts.heads import BlockHead, drafted_rows, first_rows, known_alone, layers_in
from engine.families.reading import Fields
from engine.kernels.embedding import InputTokens
from engine.model.decoder import Decoder
from engine.model.layers.attention import GroupedQueryAttention
from engine.model.layers.mlp import GatedMlp
from engine.model.places import Part
from engine.model.stream import Stream
from engine.spec.attention import AttentionSpec
from engine.spec.model import DraftSpec, GatedMlpSpec, ModelSpec, UnsupportedModelError
from engine.weights.parameters import whole

MASK_HIDDEN = "mask_hidden"
MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")  # speculators', its trainer's, vLLM's
_TRAINING = """
down_sample_ratio down_sample_ratio_min max_seq_len para_depths parallel_drafting prediction_loss_weight
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleSpec:
    """A head of EAGLE-3's with a mask token."""

    eagle: Eagle3Spec
    mask: int

    @property
    def in_pool(self) -> DraftSpec:
        return replace(self.eagle.in_pool, attends=self.eagle.layer.num_layers > 1, in_blocks=True)

    def head(self, decoder: Decoder, max_model_len: int) -> BlockHead:
        return PEagleHead(self, decoder, max_model_len)


def read_peagle(fields: Fields, target: ModelSpec, folder: Path, *, trained_for: str) -> PEagleSpec:
    """Read a head of speculators' or SpecForge's layout. Raises UnsupportedModelError for another target's."""
    fields.ignore(*_TRAINING.split())
    eagle = read_layers(fields, target, folder, trained_for=trained_for)
    told = [fields.count(name) for name in MASK_TOKENS if fields.get(name) is not None]
    if not told or told[0] >= eagle.layer.vocab_size:
        raise UnsupportedModelError(f"config.json: mask_token_id must be a token, not {told[0] if told else None}")
    return PEagleSpec(eagle=eagle, mask=told[0])


class Inputs(NamedTuple):
    """The inputs of rows whose keys and values are in the pool."""

    embedded: torch.Tensor  # [T, E]
    hidden: torch.Tensor  # [T, E]

    def at(self, rows: torch.Tensor, sampled: torch.Tensor) -> Inputs:
        return Inputs(self.embedded.index_select(0, rows), self.hidden.index_select(0, rows))


class PEagleHead:
    """The head's weights, uninitialised until loaded, and its blocks. One thread at a time."""

    sights = (True,)

    def __init__(self, spec: PEagleSpec, decoder: Decoder, max_model_len: int) -> None:
        self._decoder, self._mask = decoder, spec.mask
        self._eagle = Eagle3Head(spec.eagle, decoder, max_model_len)
        inputs = len(spec.eagle.aux_layers) * spec.eagle.target_size
        self._mask_hidden = self._eagle.weights.new(whole(MASK_HIDDEN, inputs))
        self._more = list[tuple[GroupedQueryAttention, GatedMlp]]()
        for number, layer in enumerate(spec.eagle.layer.layers[1:], start=1):
            assert isinstance(layer.mixer, AttentionSpec), "read so"
            assert isinstance(layer.mlp, GatedMlpSpec), "read so"
            under = LAYER.replace("0", str(number))
            mixer = GroupedQueryAttention(layer.mixer, self._eagle.around(under, layer.around_mixer))
            self._more.append((mixer, GatedMlp(layer.mlp, self._eagle.around(under, layer.around_mlp))))

    def load(self) -> None:
        """Read the weights. Raises CheckpointError."""
        self._eagle.load()

    def kept_in(self, parts: Sequence[Part]) -> Sequence[Sequence[torch.Tensor]]:
        return layers_in(parts, self._decoder)

    def read(self, tokens: InputTokens, batch: ForwardBatch, kept: Sequence[Sequence[torch.Tensor]]) -> Inputs:
        """Write the keys and values of all rows of the target's pass in all layers; `tokens` are those after each row."""
        inputs = Inputs(self._eagle.ends.embedded(tokens), self._eagle.combined(len(tokens.known)))
        if not self._more:
            self._eagle.project(*inputs, batch, kept[0])
            return inputs
        batch = replace(batch, final=None)
        # A `Stream` adds to its residual in place, and a block's first row reads the hidden states again.
        stream = self._eagle.layer(inputs.embedded, inputs.hidden.clone(), batch, kept[0])
        for number, (mixer, mlp) in enumerate(self._more, start=1):
            mixer(stream, batch, kept[number], is_last=number == len(self._more))
            if not stream.is_empty:
                mlp(stream)
        return inputs

    def guess_blocks(
        self,
        anchors: Inputs,
        rooms: Sequence[int],
        inputs: Callable[[bool], ForwardBatch],
        kept: Sequence[Sequence[torch.Tensor]],
    ) -> torch.Tensor:
        """See `BlockHead`: the first row of a block is the last one that the pass read."""
        batch, device = inputs(True), anchors.hidden.device
        first = first_rows(rooms, device)
        masks = torch.full((sum(rooms),), self._mask, dtype=torch.int64, device=device)
        embedded = self._eagle.ends.embedded(known_alone(masks, batch)).index_copy(0, first, anchors.embedded)
        learned = self._eagle.combining(self._mask_hidden[None]).expand(len(masks), -1)
        stream = self._eagle.layer(embedded, learned.index_copy(0, first, anchors.hidden), batch, kept[0])
        for (mixer, mlp), its in zip(self._more, kept[1:], strict=True):
            mixer(stream, batch, its, is_last=False)
            mlp(stream)
        ids = self._likeliest(stream)
        return ids[drafted_rows(first, rooms)]

    def _likeliest(self, stream: Stream) -> torch.Tensor:
        """The likeliest tokens behind all rows [T] int64."""
        return self._eagle.ends.all_likeliest(self._eagle.norm(stream.whole()))
