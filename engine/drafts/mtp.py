"""MTP: a checkpoint's own layer for multi-token prediction (DeepSeek-AI, arXiv 2412.19437, 2.2), as a draft head.

Row i reads the embedding of token i + 1 and the model's normed output at position i, stands at position i, and predicts token
i + 2. A further step reads the token that was predicted and the layer's own normed output. Embedding and LM head are the
model's. T rows, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.batch.batch import ForwardBatch
from engine.checkpoint.safetensors import stored_tensors
from engine.drafts.heads import DraftHead, known_alone, layer_in, surroundings
from engine.formats.product import LinearSpec
from engine.kernels.embedding import InputTokens
from engine.model.decoder import Decoder
from engine.model.layers.building import Rotations
from engine.model.layers.kinds import MIXERS, MLPS
from engine.model.places import Part
from engine.model.stream import Stream
from engine.spec.mla import MLASpec
from engine.spec.model import BranchSpec, DraftSpec, LayerSpec, ModelSpec, UnsupportedModelError
from engine.weights.names import StoredNames
from engine.weights.parameters import Shard
from modelfiles.gguf import is_gguf


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """The tensors' names in a family's checkpoints, below a prefix for each layer."""

    under: str  # prefix of the first layer; {layers}: the model's number of layers
    further: str  # the same of all further layers, which aren't computed
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    layer: str = ""  # prefix of the decoder layer below `under`
    shared: tuple[str, ...] = ()  # copies of the model's own tensors
    hidden_first: bool = False  # the projection reads hidden states, then embeddings
    skips_first: bool = False  # no embedding at position 0


QWEN = MtpNames(
    under="mtp.",
    further="mtp.layers.{number}.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
    layer="layers.0.",
)
DEEPSEEK = MtpNames(
    under="model.layers.{layers}.",
    further="model.layers.{number}.",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    norm="shared_head.norm",
    shared=("embed_tokens.", "shared_head.head."),
    skips_first=True,
)
MIMO = MtpNames(
    under="model.mtp_layers.0.",
    further="model.mtp_layers.{number}.",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    norm="final_layernorm",
    hidden_first=True,
    skips_first=True,
)
# Entries of `architectures`.
FAMILIES = {
    "Qwen3NextForCausalLM": QWEN,
    "Qwen3_5ForCausalLM": QWEN,
    "Qwen3_5ForConditionalGeneration": QWEN,
    "Qwen3_5MoeForCausalLM": QWEN,
    "Qwen3_5MoeForConditionalGeneration": QWEN,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "Glm4MoeForCausalLM": DEEPSEEK,
    "Glm4MoeLiteForCausalLM": DEEPSEEK,
    "MiMoForCausalLM": MIMO,
}
NO_NORMS = BranchSpec()
MOST_LAYERS = 16  # further layers whose tensors are expected


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSpec:
    """The first of a checkpoint's MTP layers."""

    layer: LayerSpec
    names: MtpNames
    under: str

    @property
    def in_pool(self) -> DraftSpec:
        return DraftSpec(layers=(self.layer,), aux_layers=(), reads_output=True, reads_head=True)

    def head(self, decoder: Decoder, max_model_len: int) -> DraftHead:
        return MtpHead(self, decoder, max_model_len)


def read_mtp(folder: Path, named: Sequence[str], model: ModelSpec) -> tuple[ModelSpec, MtpSpec]:
    """Read the layer of the model's own checkpoint; the model then has its tensors. Raises UnsupportedModelError."""
    names = next((FAMILIES[name] for name in named if name in FAMILIES), None)
    if names is None:
        raise UnsupportedModelError(f"mtp: not for {', '.join(named)}; supported: {', '.join(FAMILIES)}")
    if is_gguf(folder):
        raise UnsupportedModelError("mtp: the layer of a GGUF file isn't read; take safetensors")
    under = names.under.format(layers=model.num_layers)
    module = under + names.projection
    stored = {tensor.name for tensor in stored_tensors(folder) if tensor.name.startswith(f"{module}.")}
    if f"{module}.weight" not in stored:
        raise UnsupportedModelError(f"mtp: the checkpoint has no tensor {under}{names.projection}.weight")
    layer = next(layer for layer in reversed(model.layers) if layer.attention is not None)
    mixer = layer.attention
    assert mixer is not None, "found so"
    if mixer.window or (isinstance(mixer, MLASpec) and mixer.sparse is not None):
        raise UnsupportedModelError("mtp: attention with windows or an indexer in the layer is not supported")
    spec = MtpSpec(layer=layer, names=names, under=under)
    quantization = model.quantization
    if stored == {f"{module}.weight"}:  # plain in DeepSeek's FP8 checkpoints, whose config names no such module
        ignored = replace(quantization.ignored, named=quantization.ignored.named | {module})
        quantization = replace(quantization, ignored=ignored)
    return replace(model, stored=_with_layer(model, spec), quantization=quantization), spec


def _with_layer(model: ModelSpec, spec: MtpSpec) -> StoredNames:
    """The checkpoint's names with the layer's, but without its copies of the model's tensors and further layers."""
    names, computed = spec.names, [spec.under, *model.stored.theirs(spec.under)]
    first = model.num_layers if "{layers}" in names.under else 0
    further = [names.further.format(number=first + number) for number in range(1, MOST_LAYERS)]
    copies = [under + name for under in computed for name in names.shared]
    ignored = [name for name in model.stored.ignored if not any(under.startswith(name) for under in computed)]
    return replace(model.stored, ignored=(*ignored, *copies, *further))


@dataclass(frozen=True, slots=True)
class Computed:
    """Rows behind the layer: of a pass with prompts the sampled ones, else all."""

    hidden: torch.Tensor  # [R, E]
    has_sampled_alone: bool

    def at(self, rows: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        return self.hidden.index_select(0, sampled if self.has_sampled_alone else rows)


class MtpHead:
    """The layer between two norms and a product, declared among the model's weights."""

    def __init__(self, spec: MtpSpec, decoder: Decoder, max_model_len: int) -> None:
        model, weights, names, size = decoder.spec, decoder.weights, spec.names, decoder.spec.hidden_size
        around = surroundings(decoder, model, weights, Rotations(max_model_len, weights.device))
        self._decoder, self._names = decoder, names
        ends, inside, layer = around(spec.under, NO_NORMS), spec.under + names.layer, spec.layer
        self._embedding_norm, self._hidden_norm, self._norm = (
            ends.norm(name, size) for name in (names.embedding_norm, names.hidden_norm, names.norm)
        )
        inputs = LinearSpec(inputs=2 * size, outputs={names.projection: size}, bias=False, shard=Shard.NONE)
        self._inputs = ends.linear(inputs)
        assert layer.mixer is not None, "read so"
        assert layer.mlp is not None, "read so"
        self._mixer = MIXERS[type(layer.mixer)](layer.mixer, around(inside, layer.around_mixer))
        self._mlp = MLPS[type(layer.mlp)](layer.mlp, around(inside, layer.around_mlp))

    def load(self) -> None:
        """No-op: its weights are among the model's."""

    def kept_in(self, parts: Sequence[Part]) -> Sequence[Any]:
        return layer_in(parts, self._decoder)

    def read(self, tokens: InputTokens, batch: ForwardBatch, kept: Sequence[Any]) -> Computed:
        """Compute the layer; see `DraftHead`."""
        hidden = self._decoder.aux.of(len(tokens.known))
        return Computed(self._layer(tokens, hidden, batch, kept), batch.has_prompts)

    def read_on(
        self, ids: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch, kept: Sequence[Any]
    ) -> torch.Tensor:
        return self._layer(known_alone(ids, batch), hidden, batch, kept)

    def guess(self, rows: torch.Tensor, batch: ForwardBatch, kept: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self._norm(rows)
        return self._decoder.logits_of(normed).argmax(-1), normed

    def _layer(
        self, tokens: InputTokens, hidden: torch.Tensor, batch: ForwardBatch, kept: Sequence[Any]
    ) -> torch.Tensor:
        """Return the layer's output: of a pass with prompts the sampled rows [R, E], else all [T, E]."""
        embedded = self._decoder.embedded(tokens)
        if self._names.skips_first:
            embedded = embedded * (batch.positions != 0)[:, None]
        parts = [self._embedding_norm(embedded), self._hidden_norm(hidden)]
        stream = Stream(self._inputs(torch.cat(parts[::-1] if self._names.hidden_first else parts, -1)))
        self._mixer(stream, batch, kept, is_last=True)
        if stream.is_empty:
            return hidden[:0]
        self._mlp(stream)
        return stream.whole()
