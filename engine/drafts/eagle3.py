"""EAGLE-3 and 3.1 (Li et al., arXiv 2503.01840): one decoder layer over the target's hidden states.

Row i reads the embedding of token i + 1 and hidden states of position i, stands at position i, and predicts token i + 2. A
further step reads the token that was predicted and the layer's own output. T rows, E hidden size, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from engine.batch.batch import ForwardBatch
from engine.checkpoint.safetensors import stored_tensors
from engine.drafts.aux_layers import check_aux_layers, check_target
from engine.drafts.ends import Ends, EndsSpec
from engine.drafts.heads import DraftHead, known_alone, layer_in, surroundings, weights_of
from engine.families.reading import Fields, attention, gated_mlp
from engine.families.reading import model as read_model
from engine.formats.product import LinearSpec
from engine.kernels.attention import Scores, needs_qkv, paged_attention
from engine.kernels.embedding import InputTokens
from engine.kernels.rope import Heads, rope_and_write_kv
from engine.model.decoder import Decoder
from engine.model.layers.building import Rotations
from engine.model.layers.mlp import GatedMlp
from engine.model.layers.norm import RmsNorm
from engine.model.places import Part
from engine.model.stream import Stream
from engine.spec.attention import AttentionSpec
from engine.spec.model import (
    BEFORE_MLP,
    BranchSpec,
    DraftSpec,
    GatedMlpSpec,
    LayerSpec,
    ModelSpec,
)
from engine.weights.loader import load_weights
from engine.weights.names import StoredNames
from engine.weights.parameters import Shard

LAYER = "layers.0."
NAMES = StoredNames(renamed={"midlayer.": LAYER})  # SafeAILab's and SpecForge's -> speculators'


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """A head in a folder, and where its variants differ."""

    folder: Path
    layer: ModelSpec  # its sizes, norms and layers: one, but for P-EAGLE
    ends: EndsSpec
    target_size: int  # the target's hidden size
    aux_layers: tuple[int, ...]
    norm_before_residual: bool  # the layer adds to the normed hidden states
    norm_output: bool  # further steps read normed outputs: 3.1
    norm_before_fc: bool
    fc_norm: bool  # a norm for each of the target's hidden states

    @property
    def in_pool(self) -> DraftSpec:
        return DraftSpec(layers=self.layer.layers, aux_layers=self.aux_layers, reads_head=not self.ends.has_head)

    def head(self, decoder: Decoder, max_model_len: int) -> DraftHead:
        return Eagle3Head(self, decoder, max_model_len)


def read_eagle3(fields: Fields, target: ModelSpec, folder: Path, *, trained_for: str) -> Eagle3Spec:
    """Read a head of SafeAILab's, SpecForge's or speculators' layout. Raises UnsupportedModelError for another target's."""
    fields.only("num_hidden_layers", 1)
    return read_layers(fields, target, folder, trained_for=trained_for)


def read_layers(fields: Fields, target: ModelSpec, folder: Path, *, trained_for: str) -> Eagle3Spec:
    """Read a head with any number of layers; see `read_eagle3`."""
    fields.ignore("target_model", "target_hidden_size", "use_aux_hidden_state")
    bias = fields.flag("attention_bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=fields.flag("mlp_bias")))
    read = read_model(fields, [layer] * fields.number("num_hidden_layers"))
    check_target(fields, read, target, trained_for=trained_for)
    ends = EndsSpec.of(
        {stored.name for stored in stored_tensors(folder)},
        size=read.hidden_size,
        target_size=target.hidden_size,
        vocab=read.vocab_size,
        draft_vocab=fields.count("draft_vocab_size") or read.vocab_size,
    )
    has_defaults = bool(fields.get("speculators_model_type"))
    before_residual = fields.get("norm_before_residual")
    return Eagle3Spec(
        folder=folder,
        layer=read,
        ends=ends,
        target_size=target.hidden_size,
        aux_layers=_aux_layers(fields, target),
        norm_before_residual=has_defaults if before_residual is None else fields.flag("norm_before_residual"),
        norm_output=fields.flag("norm_output"),
        norm_before_fc=fields.flag("norm_before_fc"),
        fc_norm=fields.flag("fc_norm"),
    )


def _aux_layers(fields: Fields, target: ModelSpec) -> tuple[int, ...]:
    """The layers whose input it reads, the first one first."""
    name, number = "eagle_aux_hidden_state_layer_ids", target.num_layers
    told = fields.get(name) or (fields.get("eagle_config") or {}).get(name) or (2, number // 2, number - 3)
    return check_aux_layers(name, told, target)


class Projected(NamedTuple):
    """Rows whose keys and values are in the pool, before their attention."""

    queries: torch.Tensor  # [T, Hq, D]
    residual: torch.Tensor  # [T, E]
    product: torch.Tensor | None = None  # set if attention reads keys and values there

    def at(self, rows: torch.Tensor, sampled: torch.Tensor) -> Projected:
        return Projected(self.queries.index_select(0, rows), self.residual.index_select(0, rows))


class Eagle3Head:
    """The head's weights, uninitialised until loaded, and its steps. One thread at a time."""

    def __init__(self, spec: Eagle3Spec, decoder: Decoder, max_model_len: int) -> None:
        layer, mixer = spec.layer, spec.layer.attentions[0]
        assert isinstance(mixer, AttentionSpec), "read so"
        mlp = layer.layers[0].mlp
        assert isinstance(mlp, GatedMlpSpec), "read so"
        device, size = decoder.weights.device, layer.hidden_size
        self.weights = weights_of(decoder, spec.folder, NAMES)
        self.weights.unused |= {"t2d"}
        rotations = Rotations(max_model_len, device)
        self.around = surroundings(decoder, layer, self.weights, rotations)
        self._spec, self._decoder = spec, decoder
        outside, inside = self.around("", BranchSpec()), self.around(LAYER, BranchSpec())
        self._heads = inside.own(mixer).heads
        inputs = len(spec.aux_layers) * spec.target_size
        self._fc = outside.linear(LinearSpec(inputs=inputs, outputs={"fc": size}, bias=False, shard=Shard.NONE))
        self._before_fc = outside.norm("input_norm", inputs) if spec.norm_before_fc else None
        count = len(spec.aux_layers) if spec.fc_norm else 0
        self._aux_norms = [outside.norm(f"fc_norm.{number}", spec.target_size) for number in range(count)]
        self._embedding_norm, self._hidden_norm = (
            inside.norm(name, size) for name in ("input_layernorm", "hidden_norm")
        )
        projections = {
            "self_attn.q_proj": mixer.q_size,
            "self_attn.k_proj": mixer.kv_size,
            "self_attn.v_proj": mixer.kv_size,
        }
        bias = mixer.projections.qkv_bias
        self._qkv = inside.linear(
            LinearSpec(inputs=2 * size, outputs=projections, bias=bias, shard=Shard.HEADS, unit=mixer.heads.head_dim)
        )
        output = {"self_attn.o_proj": size}
        self._output = inside.linear(
            LinearSpec(inputs=mixer.q_size, outputs=output, bias=bias, shard=Shard.INPUTS, unit=mixer.heads.head_dim)
        )
        self._mlp = GatedMlp(mlp, self.around(LAYER, BEFORE_MLP))
        self.norm: RmsNorm = outside.norm("norm", size)
        self.ends = Ends(spec.ends, decoder, outside)
        assert mixer.rope is not None, "read so"
        self._cos_sin = rotations.table(mixer.rope, mixer.heads.head_dim)
        self._scores = Scores(scale=mixer.heads.head_dim**-0.5)

    def load(self) -> None:
        """Read the weights. Raises CheckpointError."""
        load_weights(self.weights, self._spec.folder)
        self.weights.settle()

    def kept_in(self, parts: Sequence[Part]) -> Sequence[torch.Tensor]:
        return layer_in(parts, self._decoder)

    def read(self, tokens: InputTokens, batch: ForwardBatch, kept: Sequence[torch.Tensor]) -> Projected:
        """Write the keys and values of all rows of the target's pass; `tokens` are those after each row."""
        return self.project(self.ends.embedded(tokens), self.combined(len(tokens.known)), batch, kept)

    def combined(self, rows: int) -> torch.Tensor:
        """The input of the layer from the target's hidden states, in a pass with so many rows [T, E]."""
        return self.combining(self._decoder.aux.of(rows))

    def combining(self, aux: torch.Tensor) -> torch.Tensor:
        """The same of these hidden states."""
        if self._before_fc is not None:
            aux = self._before_fc(aux)
        if self._aux_norms:
            states = aux.split(self._spec.target_size, -1)
            aux = torch.cat([norm(x.contiguous()) for norm, x in zip(self._aux_norms, states, strict=True)], -1)
        return self._fc(aux)

    def read_on(
        self, ids: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch, kept: Sequence[torch.Tensor]
    ) -> Projected:
        """Write the keys and values of guessed tokens [T] int64; `hidden` [T, E] from `guess`."""
        return self.project(self.ends.embedded(known_alone(ids, batch)), hidden, batch, kept)

    def guess(
        self, rows: Projected, batch: ForwardBatch, kept: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens behind the rows [T] int64, and what the next step reads [T, E]."""
        hidden = self._attend(rows, batch, kept).whole()
        normed = self.norm(hidden)
        return self.ends.likeliest(self.ends.logits_of(normed)), normed if self._spec.norm_output else hidden

    def layer(
        self, embedded: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch, kept: Sequence[torch.Tensor]
    ) -> Stream:
        """Compute the layer of all rows."""
        stays = needs_qkv(batch.attention[self._heads], kept[0])
        return self._attend(self.project(embedded, hidden, batch, kept, stays=stays), batch, kept)

    def _attend(self, rows: Projected, batch: ForwardBatch, kept: Sequence[torch.Tensor]) -> Stream:
        """The rest of the layer."""
        plan = batch.attention[self._heads]
        x = paged_attention(rows.queries, kept[0], plan, self._scores, qkv=rows.product, once=batch.once)
        stream = Stream(rows.residual)
        stream.plus(self._output, x.flatten(-2))
        self._mlp(stream)
        return stream

    def project(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        kept: Sequence[torch.Tensor],
        *,
        stays: bool = False,
    ) -> Projected:
        """Write the rows' keys and values. `stays`: attention reads them in the product, see `needs_qkv`."""
        normed = self._hidden_norm(hidden)
        qkv = self._qkv(torch.cat((self._embedding_norm(embedded), normed), -1))
        queries = rope_and_write_kv(
            qkv, batch.positions, self._cos_sin, batch.slots, kept[0], Heads(),
            in_place=stays, is_spare=not stays, once=batch.once,
        )  # fmt: skip
        residual = normed if self._spec.norm_before_residual else hidden
        return Projected(queries, residual, qkv if stays else None)
