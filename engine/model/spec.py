"""What a model is, as plain values from its config.json. Sizes are element counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from engine.kernels.attention import HeadShape
from engine.model.experts import SparseMlpSpec


class UnsupportedModelError(ValueError):
    """The checkpoint's config.json asks for something that the engine doesn't compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Rope scaling of Llama 3.1: long wavelengths are slowed down by `factor`, short ones kept, smoothly in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding, rotate-half layout over the whole head."""

    theta: float
    linear_factor: float = 1.0  # positions are divided by it
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a layer keeps in each block of the pool: an array [planes, slots, heads, dim], see `common.pages`."""

    planes: int
    heads: int
    dim: int
    dtype: str | None = None  # None: the one that the model computes in
    per_token: bool = True  # False: one state a block, after its last computed token


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention whose query heads share key and value heads in groups."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int = 0  # positions attended to, the own one included; 0: all
    qk_norm: bool = False  # RMSNorm over each head of queries and keys, before rope
    qkv_bias: bool = False
    output_bias: bool = False

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Keys and values."""
        return (Kept(planes=2, heads=self.num_kv_heads, dim=self.head_dim),)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """The gated delta rule behind a short convolution, with an output gate. It keeps a state instead of keys and values."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # numbers of a head
    value_dim: int
    taps: int  # tokens that the convolution reads, the own one included
    grouped: bool = False  # the checkpoint keeps each key head's rows together

    @property
    def keys_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The state, and the convolution's last inputs."""
        state = Kept(
            planes=1,
            heads=self.num_value_heads,
            dim=self.key_dim * self.value_dim,
            dtype="float32",
            per_token=False,
        )
        channels = 2 * self.keys_size + self.values_size
        return (state, Kept(planes=self.taps - 1, heads=1, dim=channels, per_token=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlpSpec:
    """An MLP that computes down(silu(gate(x)) * up(x))."""

    size: int
    bias: bool = False


# The next kinds join these unions.
MixerSpec = AttentionSpec | DeltaSpec
MlpSpec = GatedMlpSpec | SparseMlpSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: a norm and a mixer of tokens, then a norm and an MLP on each alone."""

    mixer: MixerSpec
    mlp: MlpSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only model."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    norm_eps: float
    has_tied_head: bool  # the head uses the embedding's table
    dtype: str  # the checkpoint's: "float32", "bfloat16", "float16"
    layers: tuple[LayerSpec, ...]
    quantization: str | None = None  # quantization_config.quant_method

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each layer with attention."""
        return tuple(mixer.window for mixer in self.attentions)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Of the layers that have attention."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def has_state(self) -> bool:
        """Whether a block keeps more than its own tokens' content."""
        return any(not kept.per_token for kept in self.kept)

    @property
    def windows_by_heads(self) -> dict[HeadShape, tuple[int, ...]]:
        """The distinct windows of the layers with each shape of attention heads, in the layers' order."""
        found: dict[HeadShape, set[int]] = {}
        for mixer in self.attentions:
            found.setdefault(mixer.heads, set()).add(mixer.window)
        return {heads: tuple(sorted(windows)) for heads, windows in found.items()}

    @property
    def kept(self) -> dict[Kept, int]:
        """How many layers keep each kind of content; what is kept of each token comes first. Each is a part of every block."""
        found = Counter(kept for layer in self.layers for kept in layer.mixer.kept)
        return dict(sorted(found.items(), key=lambda item: not item[0].per_token))

    @property
    def places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each layer, where its content is: the number of the part and the layer's number in it."""
        parts, used = list(self.kept), Counter[Kept]()
        places = []
        for layer in self.layers:
            places.append(tuple((parts.index(kept), used[kept]) for kept in layer.mixer.kept))
            used.update(layer.mixer.kept)
        return tuple(places)

    @property
    def widest_mlp(self) -> int:
        """The largest intermediate size of a layer, and what its experts give for a token."""
        return max(_width(layer.mlp, self.hidden_size) for layer in self.layers)


def _width(mlp: MlpSpec, hidden_size: int) -> int:
    return mlp.size if isinstance(mlp, GatedMlpSpec) else mlp.rule.chosen * (mlp.size + hidden_size)
