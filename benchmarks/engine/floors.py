"""The roofline: times that no program can beat on a device with the given ceilings, from config.json alone.

A pass must read its weights and its KV once and do its arithmetic once; of experts, those that its tokens choose, as if each
choice were as likely; and of states, each sequence's. Where an indexer chooses positions, it reads its keys of all. The larger of
both times is the floor, as if one hid the other perfectly. Activations, logits, norms, what updates a state and kernel launches
are left out, because they cost little. Gates that are 0 by design (Gemma 3n's) count: which they are is known when all are there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self

from engine.spec.attention import AttentionSpec
from engine.spec.experts import SparseMlpSpec
from engine.spec.mla import IndexerSpec, MLASpec
from engine.spec.model import (
    BranchSpec,
    DenseBesideExpertsSpec,
    LayerSpec,
    MixerSpec,
    MlpSpec,
    ModelSpec,
    PlainMlpSpec,
    ShortcutSpec,
    SideBySideSpec,
)
from engine.spec.states import ChannelDeltaSpec, DeltaSpec, MambaSpec, SelectiveSpec, ShortConvolutionSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """A device's measured peak rates."""

    bytes_per_s: float  # a copy's reads and writes
    read_bytes_per_s: float  # a sum's reads, for comparison: no floor uses it
    flops_per_s: float  # a large matrix product in the model's dtype
    upload_bytes_per_s: float  # from pinned host memory

    def times(self, count: int) -> Ceilings:
        """Return the rates of so many such devices together."""
        return Ceilings(**{each.name: count * getattr(self, each.name) for each in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The bytes and operations of one model. A position is one token of context."""

    layer_parameters: int  # everything but the embedding, the head and experts
    head_parameters: int  # V * E; a tied model's table counts here
    stored_parameters: int  # those of the checkpoint
    item_bytes: int
    kv_bytes: int  # one position, all layers
    attention_flops: int  # one query at one position, all layers
    # Positions that a layer attends to, and what such layers have of `kv_bytes` and of `attention_flops`.
    windows: tuple[tuple[float, float, float], ...] = ((math.inf, 1.0, 1.0),)
    state_bytes: int = 0  # of one sequence, read and written by each step
    expert_parameters: int = 0  # one expert of each layer that has them
    num_experts: int = 1
    experts_a_token: int = 0
    index_bytes: int = 0  # one position, all layers: the keys that positions are chosen by, beside `kv_bytes`
    index_flops: int = 0  # one query at one position, all layers: to choose
    most: float = math.inf  # positions that are chosen; who sees no more chooses none
    layer_bytes: float | None = None  # one parameter of the layers' matrices; None: item_bytes
    rate: float = 1.0  # operations of the layers' products in the time of one of a 16-bit product

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        dtype: str,
        *,
        kv_bytes: int | None = None,
        layer_bytes: float | None = None,
        rate: float = 1.0,
    ) -> Self:
        """Count what a model has; `dtype` is the one that the engine computes in. `kv_bytes` None: it is that of KV, too."""
        head = model.vocab_size * model.hidden_size
        layers = model.hidden_size + sum(_layer_parameters(layer, model.hidden_size) for layer in model.layers)
        layers += _beside_parameters(model)
        sparse = [mlp for layer in model.layers if (mlp := _experts(layer.mlp)) is not None]
        indexers = [indexer for mixer in model.attentions if (indexer := _indexer(mixer)) is not None]
        index_bytes = ITEM_BYTES[dtype] * sum(indexer.dim for indexer in indexers)
        sizes = dict.fromkeys((True, False), 0)
        for kept, count in model.kept.items():
            sizes[kept.per_token] += count * kept.planes * kept.heads * kept.dim * ITEM_BYTES[kept.dtype or dtype]
        one_expert = sum(
            _gated(mlp.size, _expert_features(mlp, model.hidden_size), has_gate=mlp.has_gates, bias=mlp.expert_bias)
            for mlp in sparse
        )
        num_experts = sparse[0].num_experts if sparse else 1
        return cls(
            layer_parameters=layers,
            head_parameters=head,
            stored_parameters=layers
            + head * (1 if model.head.is_tied else 2)
            + one_expert * num_experts
            + _rows_beside(model),
            item_bytes=ITEM_BYTES[dtype],
            kv_bytes=(kv_bytes or sizes[True]) - index_bytes,
            attention_flops=sum(_attention_flops(mixer) for mixer in model.attentions),
            windows=_windows(model),
            state_bytes=sizes[False],
            index_bytes=index_bytes,
            index_flops=sum(2 * indexer.num_heads * indexer.dim for indexer in indexers),
            most=max(map(_most, model.attentions)) if indexers else math.inf,
            expert_parameters=one_expert,
            num_experts=num_experts,
            experts_a_token=sparse[0].router.rule.chosen if sparse else 0,
            layer_bytes=layer_bytes,
            rate=rate,
        )

    @property
    def read_parameters(self) -> int:
        """Bytes read by every pass: all but experts, and the embedding, of which it reads a few rows."""
        return self.layer_parameters + self.head_parameters

    @property
    def weight_bytes(self) -> float:
        return self.layer_parameters * (self.layer_bytes or self.item_bytes) + self.head_parameters * self.item_bytes

    @property
    def token_parameters(self) -> int:
        """Those that a token is multiplied with in the layers."""
        return self.layer_parameters + self.experts_a_token * self.expert_parameters

    def read_positions(self, context: int) -> float:
        """Positions whose `kv_bytes` a token behind so many reads, in the mean of all that is kept."""
        return sum(share * min(window, context) for window, share, _ in self.windows)

    def attended(self, context: int) -> float:
        """Positions that a token behind so many attends to, in the mean of all layers' work."""
        return sum(share * min(window, context) for window, _, share in self.windows)

    def attended_by_prompt(self, length: int) -> float:
        """The sum of it over a prompt's tokens."""
        return sum(
            share * (length - within / 2) * within
            for window, _, share in self.windows
            if (within := min(window, length))
        )

    def read_bytes(self, context: int) -> float:
        """Bytes of KV that a token reads after so many positions."""
        indexer_keys = context * self.index_bytes if context > self.most else 0
        return self.read_positions(context) * self.kv_bytes + indexer_keys

    def attention_work(self, context: int) -> float:
        """Its operations."""
        choosing = context * self.index_flops if context > self.most else 0
        return self.attended(context) * self.attention_flops + choosing

    def attention_work_of_prompt(self, length: int) -> float:
        """The sum of it over a prompt's tokens."""
        choosing = self.index_flops * (length**2 - self.most**2) / 2 if length > self.most else 0
        return self.attended_by_prompt(length) * self.attention_flops + choosing

    def expert_bytes(self, tokens: int) -> float:
        """The experts that a pass of so many tokens reads, in the mean."""
        missed = (1 - self.experts_a_token / self.num_experts) ** tokens
        return self.num_experts * (1 - missed) * self.expert_parameters * self.item_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to move and operations to do; both add up."""

    num_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.num_bytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)


def decode_step(cost: ModelCost, *, batch: int, context: int) -> Work:
    """One token for each of `batch` sequences, attending to `context` positions each."""
    products = 2 * (cost.token_parameters / cost.rate + cost.head_parameters)
    return Work(
        cost.weight_bytes + cost.expert_bytes(batch) + batch * (cost.read_bytes(context) + 2 * cost.state_bytes),
        batch * (products + cost.attention_work(context)),
    )


def prefill(cost: ModelCost, prompts: Iterable[int], *, passes: int = 1) -> Work:
    """Whole prompts of the given lengths, nothing cached; logits for each prompt's last token. KV is written once."""
    flops, tokens = 0.0, 0
    for length in prompts:
        tokens += length
        flops += 2 * cost.token_parameters / cost.rate * length + cost.attention_work_of_prompt(length)
        flops += 2 * cost.head_parameters
    experts = passes * cost.expert_bytes(tokens // passes)
    return Work(passes * cost.weight_bytes + experts + tokens * (cost.kv_bytes + cost.index_bytes), flops)


def offline(cost: ModelCost, *, requests: int, prompt: int, output: int) -> Work:
    """`requests` prompts and `output` tokens after each; the first of them comes out of the prefill.

    Weights are counted as read `output` times, as if all requests ran at once; how many can depends on memory.
    """
    work = prefill(cost, [prompt] * requests)
    for step in range(1, output):
        work += decode_step(cost, batch=requests, context=prompt + step)
    return work


def upload(cost: ModelCost, ceilings: Ceilings) -> float:
    """Seconds to bring the checkpoint to the device."""
    return cost.stored_parameters * cost.item_bytes / ceilings.upload_bytes_per_s


def _layer_parameters(layer: LayerSpec, hidden: int) -> int:
    """Parameters of the halves that the layer has, with the norms around them."""
    total = 0
    if layer.mixer is not None:
        total += _mixer_parameters(layer.mixer, hidden) + hidden * _norms(layer.around_mixer)
    if layer.mlp is not None:
        total += _mlp_parameters(layer.mlp, hidden) + hidden * _norms(layer.around_mlp)
    if laurel := layer.laurel:
        total += 2 * hidden * (laurel.rank + 1)
    return total + sum(bool(around and around.scalar) for around in (layer.around_mlp, layer.around_input))


def _beside_parameters(model: ModelSpec) -> int:
    """Parameters beside one stream: products of layers' inputs, and of further streams, which every pass reads."""
    hidden, num_layers, total = model.hidden_size, len(model.layers), 0
    if inputs := model.embedding.layer_inputs:
        total += hidden * num_layers * inputs.size + inputs.size
        total += num_layers * (2 * hidden * inputs.size + hidden)
    if altup := model.altup:
        streams = altup.num_streams
        total += 2 * (streams - 1) * hidden * hidden
        total += num_layers * ((streams + 2) * hidden + (streams + 1) * streams * streams)
    return total


def _rows_beside(model: ModelSpec) -> int:
    """Elements of tables beside the embedding, of which a pass reads a few rows, and of what they are made of while loading."""
    inputs = model.embedding.layer_inputs
    rows = inputs.vocab_size * len(model.layers) * inputs.size if inputs else 0
    return rows + sum((each.stored_rows + 1 + model.hidden_size) * each.size for each in model.embedding.placeholders)


def _windows(model: ModelSpec) -> tuple[tuple[float, float, float], ...]:
    """See `ModelCost.windows`. Layers that attend to others' keys and values have none of the bytes."""
    sizes, work = Counter[float](), Counter[float]()
    for mixer in model.attentions:
        sizes[_most(mixer)] += sum(kept.planes * kept.heads * kept.dim * kept.per_token for kept in mixer.kept)
        work[_most(mixer)] += _attention_flops(mixer)
    return tuple((window, sizes[window] / sizes.total(), work[window] / work.total()) for window in work)


def _norms(around: BranchSpec) -> int:
    return bool(around.before) + bool(around.after)


def _mixer_parameters(mixer: MixerSpec, hidden: int) -> int:
    match mixer:
        case AttentionSpec():
            return _attention_parameters(mixer, hidden)
        case SideBySideSpec():
            both = _mixer_parameters(mixer.mamba, hidden) + _attention_parameters(mixer.attention, hidden)
            return both + hidden * (_norms(mixer.around_mamba) + _norms(mixer.around_attention))
        case MLASpec():
            its = mixer.sizes
            queries, heads = its.num_heads * its.query, its.num_heads * (its.plain + its.value)
            into = (hidden + queries + 1) * its.query_rank if its.query_rank else hidden * queries
            latents = hidden * (its.rank + its.rotated) + its.rank * (1 + heads)
            biases = (its.query_rank + its.rank + its.rotated + hidden) * mixer.bias
            return into + latents + biases + hidden * its.num_heads * its.value + _of_indexer(mixer, hidden)
        case DeltaSpec():
            channels = 2 * mixer.keys_size + mixer.values_size
            into = channels + mixer.values_size + 2 * mixer.num_value_heads
            small = channels * mixer.taps + 2 * mixer.num_value_heads + mixer.value_dim
            return hidden * (into + mixer.values_size) + small
        case ChannelDeltaSpec():
            size, dim, heads = mixer.size, mixer.head_dim, mixer.num_heads
            small = size * (3 * mixer.taps + 1) + heads + dim
            return hidden * (4 * size + heads + 2 * dim) + 2 * dim * size + small
        case MambaSpec():
            heads, size, columns = mixer.heads, mixer.heads.size, mixer.heads.num_columns
            small = heads.channels.count * (heads.taps + mixer.taps_bias)
            small += 3 * heads.num_heads + size * (heads.norm != "none")
            return hidden * (columns + size) + columns * mixer.in_bias + hidden * mixer.out_bias + small
        case SelectiveSpec():
            size, few = mixer.size, mixer.rank + 2 * mixer.state_size
            small = size * (mixer.taps + mixer.taps_bias + mixer.state_size + 2) + few
            biases = 2 * size * mixer.in_bias + hidden * mixer.out_bias
            return 3 * hidden * size + size * (few + mixer.rank) + small + biases
        case ShortConvolutionSpec():
            return (4 * hidden + mixer.taps) * mixer.size + (4 * mixer.size + hidden) * mixer.has_bias
        case _:
            raise NotImplementedError(f"floors: nobody counted the parameters of {type(mixer).__name__}")


def _attention_parameters(mixer: AttentionSpec, hidden: int) -> int:
    heads, borrows, bias = mixer.heads, mixer.sharing.borrows, mixer.projections
    values = 0 if mixer.values.are_keys else mixer.value_size
    kv = 0 if borrows else heads.num_kv_heads * (heads.head_dim + values)
    qkv, output = mixer.q_size * (1 + mixer.has_fused_gate) + kv, heads.num_heads * mixer.value_size
    biases = qkv * bias.qkv_bias + hidden * bias.output_bias + heads.num_heads * mixer.scores.sinks
    norms = (1 if borrows else 2) * heads.head_dim * (mixer.qk_norm is not None)
    return hidden * (qkv + output + mixer.gate_size) + biases + norms


def _attention_flops(mixer: AttentionSpec | MLASpec) -> int:
    """FLOP of one query at one position. Latents cost less opened than absorbed."""
    if isinstance(mixer, AttentionSpec):
        return 4 * mixer.q_size
    return 2 * mixer.sizes.num_heads * (mixer.sizes.query + mixer.sizes.value)


def _indexer(mixer: AttentionSpec | MLASpec) -> IndexerSpec | None:
    sparse = mixer.sparse if isinstance(mixer, MLASpec) else None
    return sparse.indexer if sparse else None


def _of_indexer(mixer: MLASpec, hidden: int) -> int:
    """Parameters of what chooses its positions."""
    if (its := _indexer(mixer)) is None:
        return 0
    return its.num_heads * (mixer.sizes.query_rank * its.dim + hidden) + (hidden + 2) * its.dim


def _most(mixer: AttentionSpec | MLASpec) -> float:
    """Positions that a query attends to at most."""
    sparse = mixer.sparse if isinstance(mixer, MLASpec) else None
    return abs(mixer.window) or (sparse.most if sparse else math.inf)


def _mlp_parameters(mlp: MlpSpec, hidden: int) -> int:
    """All but the experts that not every token passes through."""
    match mlp:
        case SparseMlpSpec():
            shared = 0
            if own := mlp.shared:
                shared = _gated(own.size, hidden, has_gate=own.activation != "relu2", bias=own.bias)
                shared += hidden * own.is_gated
            if latent := mlp.latent:
                shared += 2 * hidden * latent.size + (hidden + latent.size) * latent.bias
            return mlp.num_routed * (hidden + mlp.router.bias + bool(mlp.tensors.correction)) + shared
        case ShortcutSpec():
            return _mlp_parameters(mlp.dense, hidden) + _mlp_parameters(mlp.experts, hidden)
        case DenseBesideExpertsSpec():
            norms = 4 * hidden + mlp.experts.num_experts * bool(mlp.experts.router.weight_scale)
            return _mlp_parameters(mlp.dense, hidden) + _mlp_parameters(mlp.experts, hidden) + norms
        case PlainMlpSpec():
            return _gated(mlp.size, hidden, has_gate=False, bias=mlp.bias)
        case _:
            return _gated(mlp.size, hidden, has_gate=True, bias=mlp.bias)


def _gated(size: int, hidden: int, *, has_gate: bool, bias: bool) -> int:
    """Parameters of an MLP with a gate, or without one."""
    wide = 1 + has_gate
    return (wide + 1) * hidden * size + (wide * size + hidden) * bias


def _expert_features(mlp: SparseMlpSpec, hidden: int) -> int:
    """Features that an expert reads and gives."""
    return hidden if mlp.latent is None else mlp.latent.size


def _experts(mlp: MlpSpec | None) -> SparseMlpSpec | None:
    if isinstance(mlp, DenseBesideExpertsSpec | ShortcutSpec):
        return mlp.experts
    return mlp if isinstance(mlp, SparseMlpSpec) else None
