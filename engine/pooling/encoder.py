"""The forward pass of an encoder over texts of any lengths, one behind the other: nothing is padded, nothing is kept.

T tokens of all texts, E hidden size, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import relu, scaled_dot_product_attention

from engine.formats.product import Format, Linear, LinearSpec, as_product, declare
from engine.kernels.activation import ACTIVATIONS
from engine.model.layers.building import declare_norm
from engine.model.layers.norm import Norm
from engine.model.rope import cos_sin_table
from engine.pooling.adapters import Adapters
from engine.pooling.spec import (
    EncoderAttentionSpec,
    EncoderLayerSpec,
    EncoderSpec,
    FeedForwardSpec,
    TokensSpec,
)
from engine.spec.scaling import RopeSpec
from engine.weights.parameters import Shard, Weights, whole

Act = Callable[[torch.Tensor], torch.Tensor]
ACTS: dict[str, Act] = {**ACTIVATIONS, "relu": relu, "tanh": torch.tanh}
# Queries that are computed together where there is a window.
QUERIES_AT_ONCE = 1024
# Distances that have biases of their own, and the one that all longer ones are taken for.
BUCKETS, FARTHEST = 32, 128


@dataclass(frozen=True, slots=True)
class Texts:
    """The inputs of a pass: those of one length stand side by side, so that attention takes them at once."""

    tokens: torch.Tensor  # [T]
    types: torch.Tensor | None  # [T]; None: all 0
    positions: torch.Tensor  # [T], from 0 in each text
    lengths: tuple[int, ...]
    seen: tuple[int, ...] | None = None  # first tokens of each text that its others see; None: all
    # Number of texts, their length, and how many of their tokens are seen, in order.
    runs: tuple[tuple[int, int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        runs = list[tuple[int, int, int]]()
        for length, seen in zip(self.lengths, self.seen or self.lengths, strict=True):
            count = runs.pop()[0] if runs and runs[-1][1:] == (length, seen) else 0
            runs.append((count + 1, length, seen))
        object.__setattr__(self, "runs", tuple(runs))

    @classmethod
    def of(
        cls,
        inputs: Sequence[Sequence[int]],
        seconds: Sequence[int],
        device: torch.device,
        *,
        seen: Sequence[int] | None = None,
    ) -> Texts:
        """`seconds`: where the second text of each input begins; 0: nowhere."""
        lengths = tuple(map(len, inputs))
        tokens = torch.tensor([token for one in inputs for token in one], dtype=torch.long)
        positions = torch.cat([torch.arange(length) for length in lengths])
        types = None
        if any(seconds):
            begins = [begin or length for begin, length in zip(seconds, lengths, strict=True)]
            types = torch.cat([(torch.arange(n) >= b).long() for b, n in zip(begins, lengths, strict=True)]).to(device)
        return cls(tokens.to(device), types, positions.to(device), lengths, None if seen is None else tuple(seen))


class Encoder:
    """Layers and their weights, uninitialised until loaded. One thread at a time."""

    def __init__(self, spec: EncoderSpec, weights: Weights, *, longest: int) -> None:
        self.spec, self.weights = spec, weights
        self.adapters = None if spec.adapters is None else Adapters(spec.adapters, weights)
        self._tokens = _Tokens(spec.tokens, self)
        self._bias = _DistanceBias(spec.layers[0].attention, weights) if spec.layers[0].attention.distances else None
        self._ropes = dict[tuple[RopeSpec, int], torch.Tensor]()
        self._longest = longest
        self._layers = [_Layer(its, spec.under.format(at), self) for at, its in enumerate(spec.layers)]
        self._final = self.norm(spec.final_norm)

    def __call__(self, texts: Texts, *, adapter: int | None = None) -> torch.Tensor:
        """Return each token's vector [T, E]. `adapter`: its number; None: the model without one."""
        if self.adapters is not None:
            self.adapters.chosen = adapter
        x = self._tokens(texts)
        masks = _Masks(self._bias, x.device)
        for layer in self._layers:
            x = layer(x, texts, masks)
        return x if self._final is None else self._final(x)

    @property
    def tokens_table(self) -> torch.Tensor:
        """Rows of the vocabulary [V, E]."""
        return self._tokens.table

    def norm(self, name: str, size: int = 0) -> Norm | None:
        return declare_norm(self.spec.norms, self.weights, name, size or self.spec.hidden_size) if name else None

    def linear(self, under: str, names: Sequence[str], inputs: int, sizes: Sequence[int], *, bias: bool) -> Linear:
        """Declare a product of several modules, or of a single one with the outputs of all."""
        outputs = dict(zip(names, sizes, strict=True)) if len(names) > 1 else {names[0]: sum(sizes)}
        its = LinearSpec(inputs=inputs, outputs=outputs, bias=bias, shard=Shard.NONE)
        return as_product(declare(its, self._format_of, self.weights, under=under))

    def product(self, under: str, names: Sequence[str], inputs: int, sizes: Sequence[int], *, bias: bool) -> Act:
        """`linear`, and what an adapter adds to it."""
        found = self.linear(under, names, inputs, sizes, bias=bias)
        if self.adapters is None:
            return found
        [name] = names
        return self.adapters.beside(found, under + name, inputs, sum(sizes))

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
        x = self._of_words(texts.tokens)
        if self._multiplier != 1:
            x *= torch.tensor(self._multiplier, dtype=x.dtype)
        if self._types is not None:
            types = texts.types if texts.types is not None and len(self._types) > 1 else None
            x += self._types[0] if types is None else self._types[types]
            numbers = torch.zeros_like(texts.tokens) if types is None else types
            if self._more_types is not None and (more := self._more_types(numbers)) is not None:
                x += more
        if self._positions is not None:
            x += self._positions[texts.positions + self._first]
        return x if self._norm is None else self._norm(x)

    def _of_words(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table[tokens]
        if self._more_words is not None and (more := self._more_words(tokens)) is not None:
            x += more
        return x


@dataclass(frozen=True, slots=True)
class _Part:
    """Some queries of a text, the keys that they meet, and biases or which of them are seen; None: all, or all before."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None  # [H or none, queries, keys]


class _Masks:
    """The biases and masks of a pass, by length and reach: layers share them."""

    def __init__(self, bias: _DistanceBias | None, device: torch.device) -> None:
        self._bias, self._device = bias, device
        self._known = dict[tuple[int, ...], torch.Tensor]()

    def parts(self, length: int, spec: EncoderAttentionSpec) -> Iterator[_Part]:
        """The queries of a text: with a window so many at a time, so that neither work nor memory grows by its square."""
        reach, whole = spec.reach, slice(0, length)
        if self._bias is not None:
            if (length,) not in self._known:
                self._known[length,] = self._bias(length)
            yield _Part(whole, whole, self._known[length,])
        elif not reach or length <= reach + 1:
            yield _Part(whole, whole, None)
        else:
            for begin in range(0, length, QUERIES_AT_ONCE):
                end = min(begin + QUERIES_AT_ONCE, length)
                first, last = max(0, begin - reach), end if spec.is_causal else min(length, end + reach)
                mask = self._near(end - begin, last - first, begin - first, reach, spec.is_causal)
                yield _Part(slice(begin, end), slice(first, last), mask)

    def _near(self, queries: int, keys: int, before: int, reach: int, is_causal: bool) -> torch.Tensor:
        """Return which keys are seen; `before` of them precede the first query."""
        key = (queries, keys, before, reach, is_causal)
        if key not in self._known:
            behind = (
                torch.arange(queries, device=self._device)[:, None] + before - torch.arange(keys, device=self._device)
            )
            self._known[key] = (behind >= 0) & (behind <= reach) if is_causal else behind.abs() <= reach
        return self._known[key]


class _DistanceBias:
    """A bias of each head by distance, in buckets that grow with it."""

    def __init__(self, spec: EncoderAttentionSpec, weights: Weights) -> None:
        self._table = weights.new(whole(f"{spec.distances}.weight", BUCKETS, spec.num_heads))

    def __call__(self, length: int) -> torch.Tensor:
        """Return [H, length, length]."""
        at = torch.arange(length)
        half = BUCKETS // 2
        exact = half // 2
        behind = at[:, None] - at
        far = behind.abs()
        share = torch.log(far.float().clamp(min=1) / exact) / math.log(FARTHEST / exact)
        wide = (exact + (share * (half - exact)).long()).clamp(max=half - 1)
        buckets = torch.where(far < exact, far, wide) + (behind < 0) * half
        return self._table[buckets.to(self._table.device)].permute(2, 0, 1)


class _Attention:
    """Every token of a text meets the others, or those near it."""

    def __init__(self, spec: EncoderAttentionSpec, under: str, model: Encoder) -> None:
        hidden = model.spec.hidden_size
        self._spec = spec
        sizes = (spec.width, spec.kv_width, spec.kv_width)
        self._inputs = model.product(under, spec.inputs, hidden, sizes, bias=spec.has_bias)
        self._output = model.product(under, (spec.output,), spec.width, (hidden,), bias=spec.has_output_bias)
        self._norms = [model.norm(under + name, spec.head_dim) for name in spec.head_norms]
        self._rotations = None if spec.rope is None else model.rotations(spec.rope, spec.head_dim)

    def __call__(self, x: torch.Tensor, texts: Texts, masks: _Masks) -> torch.Tensor:
        spec, dim = self._spec, self._spec.head_dim
        sizes = (spec.width, spec.kv_width, spec.kv_width)
        queries, keys, values = (part.unflatten(1, (-1, dim)) for part in self._inputs(x).split(sizes, dim=1))
        if len(self._norms) == 2:
            queries, keys = (
                its if norm is None else norm(its) for norm, its in zip(self._norms, (queries, keys), strict=True)
            )
        if self._rotations is not None:
            table = self._rotations[texts.positions]
            queries, keys = _rotated(queries, table), _rotated(keys, table)
        found, begin = x.new_empty(len(x), spec.num_heads, dim), 0
        for count, length, seen in texts.runs:
            end = begin + count * length
            own = [part[begin:end].unflatten(0, (count, length)).transpose(1, 2) for part in (queries, keys, values)]
            into = found[begin:end].view(count, length, spec.num_heads, dim)
            for part in masks.parts(length, spec):
                keys_seen = slice(part.keys.start, min(part.keys.stop, seen))
                its = scaled_dot_product_attention(
                    own[0][:, :, part.queries],
                    own[1][:, :, keys_seen],
                    own[2][:, :, keys_seen],
                    attn_mask=part.mask,
                    is_causal=spec.is_causal and part.mask is None,
                    enable_gqa=spec.kv_width < spec.width,
                    scale=spec.scale or None,
                )
                into[:, part.queries].copy_(its.transpose(1, 2))
            begin = end
        return self._output(found.view(len(x), -1))


def _rotated(states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate [T, H, D] by [T, D]: dimensions half a head apart are a pair."""
    cos, sin = table[:, None].chunk(2, dim=-1)
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(states.dtype)


class _FeedForward:
    """Each token by itself."""

    def __init__(self, spec: FeedForwardSpec, under: str, model: Encoder) -> None:
        hidden, size = model.spec.hidden_size, spec.intermediate_size
        self._spec, self._act = spec, ACTS[spec.activation]
        sizes = (size,) * (1 + spec.is_gated)
        self._inputs = model.product(under, spec.inputs, hidden, sizes, bias=spec.has_bias)
        bias = spec.has_bias if spec.has_output_bias is None else spec.has_output_bias
        self._output = model.product(under, (spec.output,), size, (hidden,), bias=bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        states = self._inputs(x)
        if not self._spec.is_gated:
            return self._output(self._act(states))
        gate, up = states.chunk(2, dim=-1)
        if self._spec.is_up_first:
            gate, up = up, gate
        return self._output(self._act(gate) * up)


class _Layer:
    """Attention and an MLP on the residual."""

    def __init__(self, spec: EncoderLayerSpec, under: str, model: Encoder) -> None:
        self._is_prenorm = spec.is_prenorm
        self._attention = _Attention(spec.attention, under, model)
        self._mlp = _FeedForward(spec.mlp, under, model)
        self._norms = [model.norm(under + name if name else "") for name in spec.norms]
        self._after = [model.norm(under + name if name else "") for name in spec.after]

    def __call__(self, x: torch.Tensor, texts: Texts, masks: _Masks) -> torch.Tensor:
        first, second = self._norms
        if self._is_prenorm:
            x = x + _normed(self._attention(_normed(x, first), texts, masks), self._after[0])
            return x + _normed(self._mlp(_normed(x, second)), self._after[1])
        x = x + self._attention(x, texts, masks)
        x = _normed(x, first)
        return _normed(x + self._mlp(x), second)


def _normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    return x if norm is None else norm(x)
