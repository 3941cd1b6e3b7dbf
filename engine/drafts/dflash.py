"""DFlash (arXiv 2602.06036) and DSpark: a block of tokens from one pass over mask tokens, which attend to each other.

Context rows are only projected: the target's hidden states of position i are each layer's keys and values at i. A block is the
sampled token and masks at the positions behind it; its own keys and values are overwritten. DSpark's logits also have a bias by
the token before. T rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.batch.batch import ForwardBatch
from engine.checkpoint.safetensors import stored_tensors
from engine.drafts.aux_layers import check_aux_layers, check_target
from engine.drafts.ends import MOST_LOGITS, Ends, EndsSpec
from engine.drafts.heads import (
    BlockHead,
    Following,
    drafted_rows,
    first_rows,
    known_alone,
    layers_in,
    surroundings,
    weights_of,
)
from engine.families.reading import Fields, attention, gated_mlp, windows_by_layer
from engine.families.reading import model as read_model
from engine.formats.product import Linear, LinearSpec
from engine.kernels.embedding import InputTokens, embed
from engine.model.decoder import Decoder
from engine.model.layers.attention import GroupedQueryAttention
from engine.model.layers.building import Rotations
from engine.model.layers.mlp import GatedMlp
from engine.model.places import Part
from engine.model.stream import Stream
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.model import BranchSpec, DraftSpec, GatedMlpSpec, LayerSpec, ModelSpec, UnsupportedModelError
from engine.weights.loader import load_weights
from engine.weights.names import StoredNames
from engine.weights.parameters import Shard, whole

NAMES = StoredNames(ignored=("t2d", "confidence_head.", "verifier_lm_head.", "verifier_norm."))
BIAS_OF, BIAS = "markov_head.markov_w1.weight", "markov_head.markov_w2"
_TRAINING = """
aux_hidden_state_layer_ids auf confidence_head_with_markov emb_dim enable_confidence_head gru_hidden_dim lambda_base_decay_ratio
lambda_base_start max_anchors max_window_layers num_anchors num_target_layers on_policy_sampling on_policy_warmup_ratio
pure_draft_prefix_len sliding_window target_layer_ids target_model use_sliding_window
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashSpec:
    """A head in a folder, and where its variants differ."""

    folder: Path
    layers: ModelSpec  # its sizes, norms and layers
    ends: EndsSpec
    target_size: int  # the target's hidden size
    aux_layers: tuple[int, ...]
    causal: tuple[bool, ...]  # layers in which a token of the block sees none behind it
    block_size: int
    mask: int  # a token
    from_anchor: bool  # each row predicts the token behind it, else its own
    rank: int  # rank of the bias by the token before; 0: none

    @property
    def in_pool(self) -> DraftSpec:
        masks = not self.from_anchor
        return DraftSpec(
            layers=self.layers.layers,
            aux_layers=self.aux_layers,
            ahead=1 + masks,
            most=self.block_size - masks,
            in_blocks=True,
            reads_head=not self.ends.has_head,
        )

    def head(self, decoder: Decoder, max_model_len: int) -> BlockHead:
        return DFlashHead(self, decoder, max_model_len)


def read_dspark(fields: Fields, target: ModelSpec, folder: Path, *, trained_for: str) -> DFlashSpec:
    """Read a head of DSpark; see `read_dflash`."""
    return read_dflash(fields, target, folder, trained_for=trained_for, from_anchor=True)


def read_dflash(
    fields: Fields, target: ModelSpec, folder: Path, *, trained_for: str, from_anchor: bool = False
) -> DFlashSpec:
    """Read a head of z-lab's, DeepSpec's or speculators' layout. Raises UnsupportedModelError for another target's.

    `from_anchor`: the default of `sample_from_anchor`.
    """
    fields.ignore(*_TRAINING.split())
    for name, value in {"projector_type": "dflash", "shift_label": False, "markov_head_type": "vanilla"}.items():
        fields.only(name, value)
    bias, mlp, windows = fields.flag("attention_bias"), gated_mlp(fields), windows_by_layer(fields)
    layers = [
        LayerSpec(mixer=attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm(), window=window), mlp=mlp)
        for window in windows
    ]
    read = read_model(fields, layers)
    check_target(fields, read, target, trained_for=trained_for)
    names = {stored.name for stored in stored_tensors(folder)}
    told = fields.get("aux_hidden_state_layer_ids") or [layer + 1 for layer in fields["target_layer_ids"]]
    asked = fields.get("sample_from_anchor")
    return DFlashSpec(
        folder=folder,
        layers=read,
        ends=EndsSpec.of(
            names,
            size=read.hidden_size,
            target_size=target.hidden_size,
            vocab=read.vocab_size,
            draft_vocab=fields.count("draft_vocab_size") or read.vocab_size,
        ),
        target_size=target.hidden_size,
        aux_layers=check_aux_layers("target_layer_ids", told, target),
        causal=_causal(fields, windows),
        block_size=_block_size(fields),
        mask=_mask(fields, read.vocab_size),
        from_anchor=from_anchor if asked is None else fields.flag("sample_from_anchor"),
        rank=fields.number("markov_rank") if BIAS_OF in names else 0,
    )


def _block_size(fields: Fields) -> int:
    size = fields.number("block_size")
    if not 2 <= size <= 64:
        raise UnsupportedModelError(f"config.json: block_size = {size} is not supported: 2 to 64 tokens are")
    return size


def _mask(fields: Fields, vocab_size: int) -> int:
    mask = fields.count("mask_token_id")
    if mask >= vocab_size:
        raise UnsupportedModelError(f"config.json: mask_token_id = {mask} is no token of {vocab_size}")
    return mask


def _causal(fields: Fields, windows: list[int]) -> tuple[bool, ...]:
    """The layers without sight of later tokens: those with a window, or as `is_causal` or `causal` says of all."""
    told = [fields.flag(name) for name in ("is_causal", "causal") if fields.get(name) is not None]
    causal = tuple(told[0] if told else bool(window) for window in windows)
    if fields.flag("sliding_window_non_causal") or any(
        window and not of for window, of in zip(windows, causal, strict=True)
    ):
        raise UnsupportedModelError("config.json: a window whose tokens see later ones is not supported")
    return causal


class DFlashHead:
    """The head's weights, uninitialised until loaded, and its blocks. One thread at a time."""

    def __init__(self, spec: DFlashSpec, decoder: Decoder, max_model_len: int) -> None:
        model = spec.layers
        size, device = model.hidden_size, decoder.weights.device
        self.weights = weights = weights_of(decoder, spec.folder, NAMES)
        around = surroundings(decoder, model, weights, Rotations(max_model_len, device))
        self._spec, self._decoder = spec, decoder
        outside = around("", BranchSpec())
        inputs = len(spec.aux_layers) * spec.target_size
        self._fc = outside.linear(LinearSpec(inputs=inputs, outputs={"fc": size}, bias=False, shard=Shard.NONE))
        self._hidden_norm, self._norm = outside.norm("hidden_norm", size), outside.norm("norm", size)
        self._layers = list[tuple[GroupedQueryAttention, GatedMlp]]()
        for number, layer in enumerate(model.layers):
            assert isinstance(layer.mixer, AttentionSpec), "read so"
            assert isinstance(layer.mlp, GatedMlpSpec), "read so"
            under = f"layers.{number}."
            mixer = GroupedQueryAttention(layer.mixer, around(under, layer.around_mixer))
            self._layers.append((mixer, GatedMlp(layer.mlp, around(under, layer.around_mlp))))
        self._ends = Ends(spec.ends, decoder, outside)
        self._bias: Linear | None = None
        if spec.rank:
            self._bias_of = weights.new(whole(BIAS_OF, spec.ends.vocab, spec.rank))
            outputs = {BIAS: spec.ends.draft_vocab}
            self._bias = outside.linear(LinearSpec(inputs=spec.rank, outputs=outputs, bias=False, shard=Shard.NONE))

    def load(self) -> None:
        """Read the weights. Raises CheckpointError."""
        load_weights(self.weights, self._spec.folder)
        self.weights.settle()

    def kept_in(self, parts: Sequence[Part]) -> Sequence[Sequence[torch.Tensor]]:
        return layers_in(parts, self._decoder)

    def read(self, tokens: InputTokens, batch: ForwardBatch, kept: Sequence[Sequence[torch.Tensor]]) -> Following:
        """Write the keys and values of all rows of the target's pass: each layer's of the same hidden states."""
        hidden = self._hidden_norm(self._fc(self._decoder.aux.of(len(tokens.known))))
        for (mixer, _), its in zip(self._layers, kept, strict=True):
            mixer.keep(hidden, batch, its)
        return Following(tokens.ids())

    @property
    def sights(self) -> Sequence[bool]:
        return tuple(dict.fromkeys(self._spec.causal))

    def guess_blocks(
        self,
        anchors: torch.Tensor,
        rooms: Sequence[int],
        inputs: Callable[[bool], ForwardBatch],
        kept: Sequence[Sequence[torch.Tensor]],
    ) -> torch.Tensor:
        """See `BlockHead`."""
        shift, device = int(not self._spec.from_anchor), anchors.device
        first = first_rows(rooms, device, more=shift)
        ids = torch.full((sum(rooms) + shift * len(rooms),), self._spec.mask, dtype=torch.int64, device=device)
        ids[first] = anchors
        return self._drafted(anchors, self._block(ids, inputs, kept), drafted_rows(first + shift, rooms))

    def _block(
        self, ids: torch.Tensor, inputs: Callable[[bool], ForwardBatch], kept: Sequence[Sequence[torch.Tensor]]
    ) -> torch.Tensor:
        """The normed output [T, E] of all blocks' rows."""
        is_causal, batch = self._spec.causal[0], inputs(self._spec.causal[0])
        stream = Stream(self._ends.embedded(known_alone(ids, batch)))
        for (mixer, mlp), its, of_layer in zip(self._layers, kept, self._spec.causal, strict=True):
            if of_layer != is_causal:
                is_causal, batch = of_layer, inputs(of_layer)
            mixer(stream, batch, its, is_last=False)
            mlp(stream)
        return stream.normed(self._norm)

    def _drafted(self, anchors: torch.Tensor, normed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens [S, K] of these rows of the output."""
        at_once = max(1, MOST_LOGITS // len(rows))
        found, before = list[torch.Tensor](), anchors
        for some in rows.split(at_once, dim=1):
            logits = self._ends.logits_of(normed.index_select(0, some.T.flatten())).unflatten(0, some.T.shape)
            for each in logits:
                if self._bias is not None:
                    # `embed` is a kernel: while kernels are only compiled, `before` has no tokens yet.
                    each = each + self._bias(embed(self._bias_of, InputTokens.known_alone(before, before)))
                before = self._ends.likeliest(each)
                found.append(before)
        return torch.stack(found, dim=1)
