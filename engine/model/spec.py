"""What a model is, as plain values from its config.json. Sizes are element counts."""

from __future__ import annotations

from dataclasses import dataclass


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
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlpSpec:
    """An MLP that computes down(silu(gate(x)) * up(x))."""

    size: int
    bias: bool = False


# The next kinds join these unions.
MixerSpec = AttentionSpec
MlpSpec = GatedMlpSpec


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
        return tuple(layer.mixer.window for layer in self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """The heads that all layers share: a pass has one shape of attention.

        Raises UnsupportedModelError when layers differ.
        """
        shapes = {(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) for mixer in self._mixers}
        if len(shapes) > 1:
            raise UnsupportedModelError(f"layers of {len(shapes)} shapes of attention heads are not supported")
        return self.layers[0].mixer

    @property
    def widest_mlp(self) -> int:
        """The largest intermediate size of a layer."""
        return max(layer.mlp.size for layer in self.layers)

    @property
    def _mixers(self) -> list[MixerSpec]:
        return [layer.mixer for layer in self.layers]
