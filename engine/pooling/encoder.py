"""The forward pass of an encoder over texts of any lengths, one behind the other: nothing is padded, nothing is kept.

T computed tokens of all texts, S all of them, E hidden size, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.formats.forms import Added, over_ranks, summed
from engine.formats.product import Format, LinearSpec, as_product, declare
from engine.kernels.device import use_triton
from engine.kernels.native import floats
from engine.kernels.rope import Heads, rope_and_write_kv
from engine.kernels.texts.attention import attend_texts
from engine.kernels.texts.layer_norm import norm_of_rows, norm_of_sum
from engine.model.layers.building import declare_norm
from engine.model.layers.norm import LayerNorm, Norm, RmsNorm
from engine.model.rope import cos_sin_table
from engine.pooling.adapters import Adapters
from engine.pooling.experts import Experts
from engine.pooling.masks import DistanceBias, Masks
from engine.pooling.products import Adapted, Product
from engine.pooling.spec import (
    EncoderAttentionSpec,
    EncoderLayerSpec,
    EncoderSpec,
    ExpertsSpec,
    FeedForwardSpec,
    TokensSpec,
)
from engine.pooling.texts import Sight, Texts
from engine.spec.scaling import RopeSpec
from engine.weights.parameters import Shard, Weights, whole


class Encoder:
    """Layers and their weights, uninitialised until loaded. One thread at a time."""

    def __init__(self, spec: EncoderSpec, weights: Weights, *, longest: int) -> None:
        self.spec, self.weights = spec, weights
        self.adapters = None if spec.adapters is None else Adapters(spec.adapters, weights)
        self._tokens = _Tokens(spec.tokens, self)
        self._bias = DistanceBias(spec.layers[0].attention, weights) if spec.layers[0].attention.distances else None
        self._ropes = dict[tuple[RopeSpec, int], torch.Tensor]()
        self._longest = longest
        self.made, self.met = floats.Room(), floats.Room()  # by each half's first product, and by attention
        self._layers = [_Layer(its, at, self) for at, its in enumerate(spec.layers)]
        self._final = self.norm(spec.final_norm)

    def __call__(self, texts: Texts, *, adapter: int | None = None) -> torch.Tensor:
        """Return each token's vector [S, E]. `adapter`: its number; None: the model without one."""
        if self.adapters is not None:
            self.adapters.chosen = adapter
        x, added = self._tokens(texts), None
        masks = Masks(self._bias, texts)
        for layer in self._layers:
            x, added = layer(x, added, texts, masks)
        found = _norm_alone(self._final, x, added)
        return found if texts.sharing is None else texts.sharing.states(found)

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Those of its layers, where attention is a kernel over all lengths; else none is asked for."""
        if not use_triton(self.tokens_table):
            return ()
        return tuple(dict.fromkeys(_sight(layer.attention) for layer in self.spec.layers))

    @property
    def tokens_table(self) -> torch.Tensor:
        """Rows of the vocabulary [V, E]."""
        return self._tokens.table

    def norm(self, name: str, size: int = 0) -> Norm | None:
        return declare_norm(self.spec.norms, self.weights, name, size or self.spec.hidden_size) if name else None

    def linear(
        self, under: str, names: Sequence[str], inputs: int, sizes: Sequence[int], *,
        bias: bool, activation: str = "", is_gated: bool = False, is_up_first: bool = False,
    ) -> Product:  # fmt: skip
        """Declare a product of several modules, or of a single one with the outputs of all; see `Product`."""
        outputs = dict(zip(names, sizes, strict=True)) if len(names) > 1 else {names[0]: sum(sizes)}
        its = LinearSpec(inputs=inputs, outputs=outputs, bias=bias, shard=Shard.NONE)
        linear = as_product(declare(its, self._format_of, self.weights, under=under))
        return Product(linear, self.weights, activation=activation, is_gated=is_gated, is_up_first=is_up_first)

    def product(
        self, under: str, names: Sequence[str], inputs: int, sizes: Sequence[int], *,
        bias: bool, activation: str = "", is_gated: bool = False, is_up_first: bool = False,
    ) -> Product | Adapted:  # fmt: skip
        """`linear`, and what an adapter adds to it."""
        if self.adapters is None:
            return self.linear(
                under, names, inputs, sizes,
                bias=bias, activation=activation, is_gated=is_gated, is_up_first=is_up_first,
            )  # fmt: skip
        [name] = names
        plain = self.linear(under, names, inputs, sizes, bias=bias)
        both = self.adapters.beside(plain, under + name, inputs, sum(sizes))
        return Adapted(both, activation, is_gated=is_gated, is_up_first=is_up_first)

    def _format_of(self, module: str) -> Format:
        return self.spec.quantization.format_of(self.spec.stored.theirs(module))

    def rotations(self, rope: RopeSpec, head_dim: int) -> torch.Tensor:
        """Return [positions, rotated dimensions] float32, see `cos_sin_table`."""
        if (rope, head_dim) not in self._ropes:
            table = cos_sin_table(rope, head_dim=head_dim, num_positions=self._longest)
            self._ropes[rope, head_dim] = table.to(self.weights.device)
        return self._ropes[rope, head_dim]


class _Tokens:
    """The sum of a token's rows."""

    def __init__(self, spec: TokensSpec, model: Encoder) -> None:
        new, hidden = model.weights.new, model.spec.hidden_size
        self._first, self._multiplier = spec.first_position, spec.multiplier
        self.table = new(whole(f"{spec.words}.weight", spec.vocab_size, hidden))
        self._positions = new(whole(f"{spec.positions}.weight", spec.num_positions, hidden)) if spec.positions else None
        self._types = new(whole(f"{spec.types}.weight", spec.num_types, hidden)) if spec.types else None
        self._norm = model.norm(spec.norm)
        adapters = model.adapters
        self._more_words = None if adapters is None else adapters.rows(spec.words, spec.vocab_size, hidden)
        has_types = adapters is not None and bool(spec.types)
        self._more_types = adapters.rows(spec.types, spec.num_types, hidden) if adapters and has_types else None

    def __call__(self, texts: Texts) -> torch.Tensor:
        norm = self._norm
        if isinstance(norm, LayerNorm) and self._more_words is None and use_triton(self.table):
            return norm_of_rows(norm.weight, norm.bias, norm.eps, self._rows(texts), self._multiplier)
        if self._more_words is None and floats.takes(self.table):
            return _normed(norm, floats.sums_of_rows(self._rows(texts), self._multiplier), in_place=True)[0]
        x = self._of_words(texts.tokens)
        if self._multiplier != 1:
            x *= torch.tensor(self._multiplier, dtype=x.dtype)
        if self._types is not None:
            types = texts.types
            x += self._types[0] if types is None else self._types[types]
            numbers = torch.zeros_like(texts.tokens) if types is None else types
            if self._more_types is not None and (more := self._more_types(numbers)) is not None:
                x += more
        if self._positions is not None:
            x += self._positions[texts.positions + self._first]
        return _normed(self._norm, x)[0]

    def _rows(self, texts: Texts) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each table, and which of its rows is a token's."""
        found = [(self.table, texts.tokens)]
        if self._positions is not None:
            found.append((self._positions[self._first :], texts.positions))
        if self._types is not None:
            found.append((self._types, texts.type_numbers))
        return found

    def _of_words(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table[tokens]
        if self._more_words is not None and (more := self._more_words(tokens)) is not None:
            x += more
        return x


class _Attention:
    """Every token of a text meets the others, or those near it."""

    def __init__(self, spec: EncoderAttentionSpec, layer: int, model: Encoder) -> None:
        hidden, under, self._layer = model.spec.hidden_size, model.spec.under.format(layer), layer
        self._made, self._met_in = model.made, model.met
        self._spec, self._scale = spec, spec.scale or spec.head_dim**-0.5
        sizes = (spec.width, spec.kv_width, spec.kv_width)
        self._inputs = model.product(under, spec.inputs, hidden, sizes, bias=spec.has_bias)
        self._output = model.product(under, (spec.output,), spec.width, (hidden,), bias=spec.has_output_bias)
        self._norms = [model.norm(under + name, spec.head_dim) for name in spec.head_norms]
        self._rotations = None if spec.rope is None else model.rotations(spec.rope, spec.head_dim)
        self._rotation = _in_one_kernel(self._norms)
        self._sight = _sight(spec)

    def __call__(self, x: torch.Tensor, texts: Texts, masks: Masks) -> torch.Tensor:
        return self._output(self._met(self._inputs(x, self._made), texts, masks))

    def onto(self, residual: torch.Tensor, x: torch.Tensor, texts: Texts, masks: Masks) -> Added:
        """Add to `residual` in place, or return what is to be added; see `Product.onto`."""
        return self._output.onto(residual, self._met(self._inputs(x, self._made), texts, masks))

    def _met(self, product: torch.Tensor, texts: Texts, masks: Masks) -> torch.Tensor:
        """Return [T, Hq D]."""
        spec, sharing, (queries, *kv) = self._spec, texts.sharing, self._heads(product, texts)
        keys, values = kv if sharing is None else sharing.heads(self._layer, *kv)
        if use_triton(product):
            found = self._met_at_once(queries, keys, values, texts, masks)
        elif not masks.are_biases and texts.seen is None and spec.head_dim <= floats.MOST_DIM and floats.takes(product):
            before, after = spec.reach or -1, 0 if spec.is_causal else spec.reach or -1
            found = floats.attend(
                queries, keys, values, masks.pieces, scale=self._scale, before=before, after=after, room=self._met_in
            )
        elif sharing is None or sharing.sources is None:
            found = self._met_by_length((queries, keys, values), texts, masks)
        else:
            found = self._met_by_length((sharing.spread(queries), keys, values), texts, masks)[sharing.own]
        return found.flatten(1)

    def _met_at_once(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, texts: Texts, masks: Masks
    ) -> torch.Tensor:
        """Return [T, Hq, D], in one launch: by torch's library where that knows the form, else by a kernel for any lengths."""
        spec = self._spec
        if queries.is_cuda and queries.dtype.itemsize == 2 and not masks.are_biases and texts.are_alike(spec.reach):
            [(count, length, _)] = texts.runs
            own, its_keys, its_values = (
                one.unflatten(0, (count, length)).transpose(1, 2) for one in (queries, keys, values)
            )
            found = scaled_dot_product_attention(
                own,
                its_keys,
                its_values,
                is_causal=spec.is_causal,
                enable_gqa=spec.kv_width < spec.width,
                scale=self._scale,
            )
            return found.transpose(1, 2).flatten(0, 1)
        return attend_texts(
            queries, keys, values, texts.seen_by(self._sight), scale=self._scale, distances=masks.distances
        )

    def _heads(self, product: torch.Tensor, texts: Texts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D], normed and rotated."""
        spec, dim = self._spec, self._spec.head_dim
        if self._rotations is not None and self._rotation is not None and use_triton(product):
            kept = product.new_empty(len(product), 2, 1, spec.kv_width // dim, dim)  # a pool of blocks of one token
            queries = rope_and_write_kv(
                product, texts.positions, self._rotations, texts.places, kept, self._rotation, is_spare=True
            )
            return queries, kept[:, 0, 0], kept[:, 1, 0]
        sizes = (spec.width, spec.kv_width, spec.kv_width)
        queries, keys, values = (part.unflatten(1, (-1, dim)) for part in product.split(sizes, dim=1))
        if len(self._norms) == 2:
            queries, keys = (
                its if norm is None else norm(its) for norm, its in zip(self._norms, (queries, keys), strict=True)
            )
        if self._rotations is not None:
            table = self._rotations[texts.positions]
            queries, keys = _rotated(queries, table), _rotated(keys, table)
        return queries, keys, values

    def _met_by_length(self, heads: Sequence[torch.Tensor], texts: Texts, masks: Masks) -> torch.Tensor:
        """Return [S, Hq, D], by torch: texts of one length at once."""
        spec = self._spec
        found, begin = torch.empty_like(heads[0], memory_format=torch.contiguous_format), 0
        for count, length, seen in texts.runs:
            end = begin + count * length
            own = [part[begin:end].unflatten(0, (count, length)).transpose(1, 2) for part in heads]
            into = found[begin:end].unflatten(0, (count, length))
            for part in masks.parts(length, spec):
                keys_seen = slice(part.keys.start, min(part.keys.stop, seen))
                its = scaled_dot_product_attention(
                    own[0][:, :, part.queries],
                    own[1][:, :, keys_seen],
                    own[2][:, :, keys_seen],
                    attn_mask=part.mask,
                    is_causal=spec.is_causal and part.mask is None,
                    enable_gqa=spec.kv_width < spec.width,
                    scale=self._scale,
                )
                into[:, part.queries].copy_(its.transpose(1, 2))
            begin = end
        return found


def _sight(spec: EncoderAttentionSpec) -> Sight:
    return Sight(spec.reach, spec.is_causal)


def _in_one_kernel(norms: Sequence[Norm | None]) -> Heads | None:
    """The norms and the rotation as `rope_and_write_kv` does them; None: it has no such norms."""
    if not norms:
        return Heads()
    queries, keys = norms
    if not isinstance(queries, RmsNorm) or not isinstance(keys, RmsNorm):
        return None
    return Heads(q_norm=queries.weight, k_norm=keys.weight, eps=queries.eps, norm_plus_one=queries.plus_one)


def _rotated(states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate [T, H, D] by [T, D]: dimensions half a head apart are a pair."""
    cos, sin = table[:, None].chunk(2, dim=-1)
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(states.dtype)


class _FeedForward:
    """Each token by itself."""

    def __init__(self, spec: FeedForwardSpec, under: str, model: Encoder) -> None:
        hidden, size, self._made = model.spec.hidden_size, spec.intermediate_size, model.made
        sizes = (size,) * (1 + spec.is_gated)
        self._inputs = model.product(
            under, spec.inputs, hidden, sizes,
            bias=spec.has_bias, activation=spec.activation, is_gated=spec.is_gated, is_up_first=spec.is_up_first,
        )  # fmt: skip
        bias = spec.has_bias if spec.has_output_bias is None else spec.has_output_bias
        self._output = model.product(under, (spec.output,), size, (hidden,), bias=bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._output(self._inputs(x, self._made))

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        """Add to `residual` in place, or return what is to be added; see `Product.onto`."""
        return self._output.onto(residual, self._inputs(x, self._made))


def _experts_or_not(spec: FeedForwardSpec | ExpertsSpec, under: str, model: Encoder) -> _FeedForward | Experts:
    if isinstance(spec, FeedForwardSpec):
        return _FeedForward(spec, under, model)
    hidden = model.spec.hidden_size
    router = model.linear(under, (spec.router,), hidden, (spec.count,), bias=False)
    return Experts(spec, under, hidden, router, model.weights)


class _Layer:
    """Attention and an MLP on the residual."""

    def __init__(self, spec: EncoderLayerSpec, number: int, model: Encoder) -> None:
        under, self._is_prenorm = model.spec.under.format(number), spec.is_prenorm
        self._attention = _Attention(spec.attention, number, model)
        self._mlp: _FeedForward | Experts = _experts_or_not(spec.mlp, under, model)
        self._norms = [model.norm(under + name if name else "") for name in spec.norms]
        self._after = [model.norm(under + name if name else "") for name in spec.after]

    def __call__(self, x: torch.Tensor, added: Added, texts: Texts, masks: Masks) -> tuple[torch.Tensor, Added]:
        """Return the residual [T, E], and what is still to be added to it."""
        first, second = self._norms
        if not self._is_prenorm:
            x = _norm_alone(first, x, self._attention.onto(x, x, texts, masks))
            return _norm_alone(second, x, self._mlp.onto(x, x)), None
        attention_norm, mlp_norm = self._after
        normed, x = _normed(first, x, added)
        if attention_norm is None:
            added = self._attention.onto(x, normed, texts, masks)
        else:
            added = attention_norm(self._attention(normed, texts, masks))
        normed, x = _normed(second, x, added)
        return x, self._mlp.onto(x, normed) if mlp_norm is None else mlp_norm(self._mlp(normed))


def _normed(
    norm: Norm | None, x: torch.Tensor, added: Added = None, *, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x + added, and that sum; `in_place`: nobody reads it."""
    if isinstance(norm, RmsNorm):
        return norm.of_sum(added, x)
    if isinstance(norm, LayerNorm) and use_triton(x):
        its = over_ranks(added, x.dtype)
        found, total = norm_of_sum(x, its, norm.weight, norm.bias, norm.eps, keeps_sum=True)
        assert total is not None
        return found, total
    total = summed(added, x)
    if norm is None:
        return total, total
    if floats.takes(total):
        return floats.layer_norm(total, norm.weight, norm.bias, norm.eps, in_place=in_place), total
    return norm(total), total


def _norm_alone(norm: Norm | None, x: torch.Tensor, added: Added = None) -> torch.Tensor:
    """Return the norm of x + added, where nobody needs the sum."""
    if isinstance(norm, LayerNorm) and use_triton(x):
        its = over_ranks(added, x.dtype)
        return norm_of_sum(x, its, norm.weight, norm.bias, norm.eps, keeps_sum=False)[0]
    return _normed(norm, x, added, in_place=True)[0]
