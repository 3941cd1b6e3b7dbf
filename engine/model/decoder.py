"""The forward pass: a loop over layers on a residual stream, whatever their kinds, between an embedding and a head.

V vocabulary, E hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.batch.batch import ForwardBatch
from engine.formats.product import Format, Linear, LinearSpec, Table
from engine.kernels import native
from engine.kernels.embedding import InputTokens
from engine.model.aux_states import AuxStates
from engine.model.layers.building import Rotations, Surroundings, declare_branch, declare_norm
from engine.model.layers.halves.altup import AltUp, Streams
from engine.model.layers.halves.laurel import Laurel
from engine.model.layers.halves.layer_inputs import LayerInput, LayerInputs
from engine.model.layers.halves.placeholders import Placeholders
from engine.model.layers.halves.shortcut import end_shortcut
from engine.model.layers.kinds import MIXERS, MLPS, Mixer, Mlp
from engine.model.places import Content, Part, kept_at
from engine.model.ranks import Joined, summed_over, table_of
from engine.model.stream import Stream
from engine.parallel.group import ALONE, Group
from engine.spec.model import BranchSpec, ModelSpec
from engine.spec.ranks import for_rank
from engine.spec.stages import elsewhere
from engine.weights.parameters import Shard, Weights, whole

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class LayerPass:
    """One layer's view of a pass: `kept` and `is_last` as mixers take them."""

    batch: ForwardBatch
    kept: Sequence[Any]
    is_last: bool


# One step of a layer on the stream: its mixer, its MLP, or what stands beside them.
Half = Callable[[Stream, LayerPass], None]


def mixing(mixer: Mixer) -> Half:
    """The half in which tokens meet."""
    return lambda stream, its: mixer(stream, its.batch, its.kept, is_last=its.is_last)


def alone(step: Mlp) -> Half:
    """A half that works on each token alone."""
    return lambda stream, its: step(stream)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: halves that work on the stream one after another."""

    halves: tuple[Half, ...]
    places: tuple[tuple[int, int], ...]  # see `ModelSpec.places`
    formats: tuple[Format, ...]
    is_last: bool  # after its mixer only the sampled tokens matter
    aux: int | None = None  # its input's number among the `AuxStates`


class Decoder:
    """Layers and their weights, uninitialised until loaded. One thread at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        most_elements: int | None = None,
        places: Sequence[tuple[tuple[int, int], ...]] | None = None,
        group: Group = ALONE,
    ) -> None:
        """See `Weights` for `most_elements`. `places`: of its layers in another model's pool. `spec`: the whole model's.

        Raises ValueError for a larger model.
        """
        native.prepare(device, dtype)
        self.spec = for_rank(spec, group.rank, group.size)
        self.group, self._meeting = group, torch.zeros(1, dtype=dtype, device=device)
        self.weights = Weights(
            dtype, device, rank=group.rank, size=group.size, stored=spec.stored, most_elements=most_elements
        )
        self.weights.is_elsewhere, self.weights.in_tiles = elsewhere(spec), spec.quantization.in_tiles
        self.aux = AuxStates(spec, self.weights)
        self._embedding = Embedding(spec, self.weights, group) if spec.has_embedding else None
        rotations = Rotations(max_model_len, device)
        self._layers = [
            _layer(index, spec, self.weights, rotations, its, group)
            for index, its in zip(spec.own_layers, places or self.spec.places, strict=True)
        ]
        self._begins, self._ends = list[Callable[[Stream, ForwardBatch], None]](), list[Mlp]()
        nothing = declare_branch(BranchSpec(), spec, self.weights, under="model.")
        around = Surroundings(spec, self.weights, rotations, "model.", nothing, group=group)
        if (inputs := spec.embedding.layer_inputs) is not None:
            self._begins.append(LayerInputs(inputs, around))
        if spec.altup is not None:
            streams = Streams(spec.altup, around)
            self._begins.append(lambda stream, batch: streams.begin(stream))
            self._ends.append(streams.end)
        self._head: Head | None = None
        self._product: Linear | None = None
        if spec.has_head or (spec.own_draft is not None and spec.own_draft.reads_head):
            table = self._embedding.table if self._embedding is not None else None
            if table is None and spec.head.is_tied:
                table = _table(spec, self.weights, group)
            self._product = product = _head_of(spec, self.weights, table, group)
            if spec.has_head:
                reads_output = spec.draft is not None and spec.draft.reads_output
                self._head = Head(spec, self.weights, product, aux=self.aux if reads_output else None)
        self._kept: tuple[Sequence[Part], list[tuple[int | None, list[Content]]]] | None = None

    def forward(
        self, batch: ForwardBatch, parts: Sequence[Part], *, logits: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Compute the batch, write its KV into the pool, return the sampled rows' logits [R, V]; None for R = 0.

        `parts` are the pool's, each [num_blocks, layers, planes, slots, heads, dim], then those of further groups, by
        layer; the logits have the model's dtype. The result is in `logits` if that is given. A stage goes on with the batch's
        rows of the stage before; only the last one has logits, others return the rows [T, E] for the next.
        """
        stream = self._begun(batch)
        for begin in self._begins:
            begin(stream, batch)
        for layer, (block, kept) in zip(self._layers, self._views(parts), strict=True):
            if layer.aux is not None:
                self.aux.keep(layer.aux, stream.total())
            its = LayerPass(batch.at(block), kept, layer.is_last)
            for half in layer.halves:
                half(stream, its)
                if stream.is_empty:
                    self._meet()
                    return None
        for end in self._ends:
            end(stream)
        if self._head is None:
            rows = stream.whole()
            return rows if logits is None else logits.copy_(rows)
        found = self._head(stream, batch, out=logits)
        if self.spec.vocab_size % self.group.size:  # no rank waited for the others' logits
            self._meet()
        return found

    def obstacle(self, rehearse: Callable[[], None]) -> str:
        """No pass of ours has one to being captured."""
        return ""

    def _begun(self, batch: ForwardBatch) -> Stream:
        if self._embedding is not None:
            return self._embedding(batch)
        assert batch.rows is not None, "this stage isn't the first one"
        return Stream(batch.rows)

    def _meet(self) -> None:
        """Wait until every rank has written its KV: blocks move, or are given to others, once the leader's pass is over."""
        if self.group.size > 1:
            self.group.all_reduce(self._meeting)

    def embedded(self, tokens: InputTokens) -> torch.Tensor:
        """The table's rows [T, E], without what the model makes of them."""
        assert self._embedding is not None, "the first stage drafts"
        return self._embedding.table.rows(tokens)

    def logits_of(self, normed: torch.Tensor) -> torch.Tensor:
        """The LM head's product [T, V] of normed rows, without what the model makes of it."""
        assert self._product is not None, "told by its spec"
        return self._product(normed)

    def _views(self, parts: Sequence[Part]) -> list[tuple[int | None, list[Content]]]:
        """Return each layer's views of the pool, and its block of a window's entry; passes after one another have the same."""
        if self._kept is None or self._kept[0] is not parts:
            self._kept = (parts, [kept_at(parts, layer.places) for layer in self._layers])
        return self._kept[1]

    def with_a_layer_of_each_kind(self) -> Decoder:
        """Return a decoder that launches every kernel: one layer of each distinct spec and format, first, last and in between."""
        kinds = dict[object, int]()
        own = [self.spec.layers[index] for index in self.spec.own_layers]
        for index, (spec, layer) in enumerate(zip(own, self._layers, strict=True)):
            kinds.setdefault((spec, layer.formats, index == 0, layer.is_last), index)
        decoder = copy.copy(self)
        decoder._kept = None
        decoder.spec = replace(self.spec, layers=tuple(own[index] for index in kinds.values()), stage=None)
        decoder._layers = [self._layers[index] for index in kinds.values()]
        return decoder


def _layer(
    index: int,
    model: ModelSpec,
    weights: Weights,
    rotations: Rotations,
    places: tuple[tuple[int, int], ...],
    group: Group,
) -> Layer:
    spec, under = model.layers[index], f"model.layers.{index}."
    formats: list[Format] = []

    def around(branch: BranchSpec, *, is_read_again: bool = False) -> Surroundings:
        declared = declare_branch(branch, model, weights, under=under, is_read_again=is_read_again)
        return Surroundings(model, weights, rotations, under, declared, formats, group)

    halves = list[Half]()
    if spec.laurel is not None:
        halves.append(alone(Laurel(spec.laurel, around(BranchSpec(before=spec.laurel.before), is_read_again=True))))
    if spec.mixer is not None:
        its = around(spec.around_mixer, is_read_again=spec.around_mlp.shares)
        halves.append(mixing(MIXERS[type(spec.mixer)](spec.mixer, its)))
    if spec.mlp is not None:
        halves.append(alone(MLPS[type(spec.mlp)](spec.mlp, around(spec.around_mlp))))
    if spec.ends_shortcut:
        halves.append(alone(end_shortcut))
    inputs = model.embedding.layer_inputs
    if inputs is not None and model.altup is not None:
        altup = AltUp(model.altup, inputs, around(BranchSpec()), index=index)
        halves = [alone(altup.predict), *halves, alone(altup.correct)]
    elif inputs is not None and spec.around_input is not None:
        halves.append(alone(LayerInput(inputs, around(spec.around_input), index=index)))
    read = model.draft.aux_layers if model.draft is not None else ()
    aux = read.index(index) if index in read else None
    # A head that reads the output needs all rows of it.
    is_last = index == model.last_mixer and not (model.draft is not None and model.draft.reads_output)
    return Layer(tuple(halves), places, tuple(formats), is_last=is_last, aux=aux)


def _table(spec: ModelSpec, weights: Weights, group: Group) -> Table:
    table = whole("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    return table_of(spec.quantization.table, table, weights, group)


class Embedding:
    """The embedding table."""

    def __init__(self, spec: ModelSpec, weights: Weights, group: Group) -> None:
        self.table = _table(spec, weights, group)
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
        x = self.table.rows(batch.tokens)
        x = x if self._multiplier is None else x * self._multiplier
        x = x if self._norm is None else self._norm(x)
        return Stream(x if self._placeholders is None else self._placeholders.instead(x, batch))


def _head_of(spec: ModelSpec, weights: Weights, table: Table | None, group: Group) -> Linear:
    """The LM head's product. `table`: the embedding's, which a tied head needs."""
    is_shared = group.size > 1 and spec.vocab_size % group.size == 0
    shard, own = Shard.OUTPUTS if is_shared or group.size == 1 else Shard.NONE, spec.head
    if own.is_tied and table is not None:
        weights.unused.add(f"{HEAD}.weight")  # some checkpoints have the table twice
        its_bias = replace(whole(f"{HEAD}.bias", spec.vocab_size), shard=shard)
        return table.head(weights.new(its_bias) if own.bias else None, weights)
    product = LinearSpec(inputs=spec.hidden_size, outputs={HEAD: spec.vocab_size}, bias=own.bias, shard=shard)
    linear = summed_over(spec.format_of(HEAD).linear(product, weights, under=""), product, group)
    return Joined(linear, group.gather) if is_shared else linear


class Head:
    """The final norm and the LM head."""

    def __init__(self, spec: ModelSpec, weights: Weights, product: Linear, *, aux: AuxStates | None) -> None:
        """`aux`: where all rows' normed output goes."""
        own, self._aux, self.product = spec.head, aux, product
        norm = replace(spec.norms, kind=own.norm_kind or spec.norms.kind)
        self._norm = declare_norm(norm, weights, own.norm, spec.hidden_size)
        self._multiplier, self._softcap = own.multiplier, own.softcap

    def __call__(self, stream: Stream, batch: ForwardBatch, *, out: torch.Tensor | None) -> torch.Tensor | None:
        """Return the sampled rows' logits [R, V], None for R = 0."""
        if self._aux is not None:
            normed = stream.normed(self._norm)
            self._aux.keep(0, normed)
            if not batch.num_sampled:
                return None
            rows = normed if batch.sampled_rows is None else normed.index_select(0, batch.sampled_rows)
            logits = self.product(rows, out=out)
        elif batch.num_sampled:
            if batch.sampled_rows is not None and not batch.has_prompts:
                stream.only(batch.sampled_rows)
            logits = self.product(stream.normed(self._norm), out=out)
        else:
            return None
        if self._multiplier != 1.0:
            logits.mul_(self._multiplier)
        if self._softcap:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
