"""IBM: Granite 3 and 4, Bamba.

Granite multiplies embeddings, scores, residuals and logits.
"""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import (
    FULL,
    LINEAR,
    SLIDING,
    Family,
    Fields,
    attention,
    checked,
    gated_mlp,
    kinds_of_layers,
    layer_types,
    mamba,
    mamba_head_dim,
    model,
    rope,
    sliding_window,
    sparse_mlp,
    with_defaults,
)
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.attention import AttentionSpec
from engine.spec.ends import EmbeddingSpec, HeadSpec
from engine.spec.experts import ExpertTensors, SharedExpertSpec
from engine.spec.model import BranchSpec, LayerSpec, MixerSpec, MlpSpec, ModelSpec, UnsupportedModelError

TENSORS = ExpertTensors(
    router=("block_sparse_moe.router.layer", "block_sparse_moe.router"),
    all=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
)
ROTATED = 0.5  # share of a head, whatever config.json says


def read_granite(fields: Fields) -> ModelSpec:
    """Granite 3: four multipliers."""
    fields = with_defaults(fields, "granite")
    mlp = gated_mlp(fields, bias=fields.flag("mlp_bias"))
    return _model(
        fields, [multiplied_layer(fields, _attention(fields, has_rope=True), mlp)] * fields.number("num_hidden_layers")
    )


def _attention(fields: Fields, *, has_rope: bool) -> AttentionSpec:
    bias, rotation = fields.flag("attention_bias"), rope(fields)
    scale = fields.real("attention_multiplier", 1.0)
    return attention(fields, rope=rotation if has_rope else None, qkv_bias=bias, output_bias=bias, scale=scale)


def multiplied_layer(fields: Fields, mixer: MixerSpec, mlp: MlpSpec) -> LayerSpec:
    multiplier = fields.real("residual_multiplier", 1.0)
    return LayerSpec(
        mixer=mixer,
        mlp=mlp,
        around_mixer=BranchSpec(before="input_layernorm", multiplier=multiplier),
        around_mlp=BranchSpec(before="post_attention_layernorm", multiplier=multiplier),
    )


def _model(fields: Fields, layers: list[LayerSpec]) -> ModelSpec:
    return model(
        fields,
        layers,
        embedding=EmbeddingSpec(multiplier=fields.real("embedding_multiplier", 1.0)),
        head=HeadSpec(multiplier=1 / fields.real("logits_scaling", 1.0)),
    )


def read_granite_swa(fields: Fields) -> ModelSpec:
    """Granite with windows: sinks, and a rotation of each layer, or none."""
    fields = with_defaults(fields, "granite_swa")
    mlp = gated_mlp(fields, bias=fields.flag("mlp_bias"))
    return _model(fields, [multiplied_layer(fields, mixer, mlp) for mixer in _mixers_with_windows(fields)])


def _mixers_with_windows(fields: Fields) -> list[AttentionSpec]:
    """Each layer's attention; a base of 0 means no rope."""
    num_layers, rotation = fields.number("num_hidden_layers"), rope(fields)
    kinds = layer_types(fields, [SLIDING if layer % 4 else FULL for layer in range(num_layers)])
    bases = fields.get("layer_rope_theta") or [rotation.theta] * num_layers
    if len(bases) != num_layers:
        raise UnsupportedModelError(f"config.json: layer_rope_theta names {len(bases)} layers of {num_layers}")
    if wrong := [base for base in bases if isinstance(base, str) or base < 0]:
        raise UnsupportedModelError(f"config.json: layer_rope_theta has {wrong[0]!r:.40}: 0 or more")
    bias, scale = fields.flag("attention_bias"), fields.real("attention_multiplier", 1.0)
    window = sliding_window(fields)
    return [
        attention(
            fields,
            rope=replace(rotation, theta=float(base)) if base else None,
            window=window if kind == SLIDING else 0,
            qkv_bias=bias,
            output_bias=bias,
            scale=scale,
            sinks=True,
        )
        for kind, base in zip(kinds, bases, strict=True)
    ]


def read_granite_moe(fields: Fields) -> ModelSpec:
    """Granite 3 with experts: Granite's multipliers; with a shared expert in `GraniteMoeShared`."""
    fields = with_defaults(fields, "granitemoe")
    mixer = _attention(fields, has_rope=True)
    return _with_experts(fields, [mixer] * fields.number("num_hidden_layers"))


def read_granite_moe_swa(fields: Fields) -> ModelSpec:
    """Granite with experts and windows: sinks, and a rotation of each layer, or none."""
    fields = with_defaults(fields, "granitemoe_swa")
    return _with_experts(fields, _mixers_with_windows(fields))


def _with_experts(fields: Fields, mixers: list[AttentionSpec]) -> ModelSpec:
    size, shared = fields.count("shared_intermediate_size"), None
    if size:
        shared = SharedExpertSpec(size=size, under="shared_mlp", gate_up="input_linear", down="output_linear")
    rule = RoutingRule(chosen=fields.number("num_experts_per_tok"), score=Score.SOFTMAX_OF_CHOSEN)
    mlp = sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", tensors=TENSORS, shared=shared)
    return _model(fields, [multiplied_layer(fields, mixer, mlp) for mixer in mixers])


def read_granite4(fields: Fields) -> ModelSpec:
    """Granite 4: Mamba-2 in most layers or in none, experts beside a shared one or that one alone; Granite's multipliers."""
    fields = with_defaults(fields, "granitemoehybrid")
    kinds = kinds_of_layers(fields, [LINEAR] * fields.number("num_hidden_layers"))
    fields.only("position_embedding_type", "rope", "nope")
    fields.only("normalization_function", "rmsnorm")
    fields.ignore("layers_block_type")
    has_rope = fields.get("position_embedding_type") == "rope"
    mixers: dict[str, MixerSpec] = {FULL: _attention(fields, has_rope=has_rope)}
    if LINEAR in kinds:
        mixers[LINEAR] = mamba(fields, head_dim=mamba_head_dim(fields))
    else:
        fields.ignore("time_step_limit", *(name for name in fields if name.startswith("mamba_")))
    mlp = _mlp(fields)
    return _model(fields, [multiplied_layer(fields, mixers[kind], mlp) for kind in kinds])


def _mlp(fields: Fields) -> MlpSpec:
    if not fields.count("num_local_experts"):
        fields.ignore("intermediate_size", "num_experts_per_tok")
        return gated_mlp(
            fields, size="shared_intermediate_size", fused="shared_mlp.input_linear", down="shared_mlp.output_linear"
        )
    size = fields.number("shared_intermediate_size")
    shared = SharedExpertSpec(size=size, under="shared_mlp", gate_up="input_linear", down="output_linear")
    rule = RoutingRule(chosen=fields.number("num_experts_per_tok"), score=Score.SOFTMAX_OF_CHOSEN)
    return sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", tensors=TENSORS, shared=shared)


def read_bamba(fields: Fields) -> ModelSpec:
    """Bamba: Mamba-2 in most layers, attention with half of each head rotated in some."""
    fields = with_defaults(fields, "bamba").with_values(partial_rotary_factor=ROTATED)
    bias = fields.flag("attention_bias")
    full = attention(fields, qkv_bias=bias, output_bias=bias)
    if full.rope is None or full.rope.share != ROTATED:
        raise UnsupportedModelError(f"config.json: partial_rotary_factor is not supported; supported: {ROTATED}")
    fields.only("attn_rotary_emb", full.rope.rotary_dim(full.heads.head_dim))
    mixers: dict[str, MixerSpec] = {FULL: full, LINEAR: mamba(fields, head_dim=mamba_head_dim(fields))}
    mlp = gated_mlp(fields, bias=fields.flag("mlp_bias"), under="feed_forward", down="feed_forward.down_proj")
    after = BranchSpec(before="pre_ff_layernorm")
    layers = [LayerSpec(mixer=mixers[kind], mlp=mlp, around_mlp=after) for kind in _kinds(fields)]
    fields.ignore("z_loss_coefficient", "num_logits_to_keep")  # neither affects an answer
    return model(fields, layers, head=HeadSpec(norm="model.final_layernorm"))


def _kinds(fields: Fields) -> list[str]:
    found = fields.get("attn_layer_indices") or []
    fields.ignore("layer_types", "layers_block_type")
    num_layers = fields.number("num_hidden_layers")
    if not found or sorted(set(found) & set(range(num_layers))) != sorted(found):
        raise UnsupportedModelError(f"config.json: attn_layer_indices = {found!r:.40} names no layers of {num_layers}")
    return [FULL if index in found else LINEAR for index in range(num_layers)]


FAMILIES: dict[str, Family] = {
    "GraniteForCausalLM": read_granite,
    "GraniteSWAForCausalLM": read_granite_swa,
    "GraniteMoeForCausalLM": read_granite_moe,
    "GraniteMoeSharedForCausalLM": read_granite_moe,
    "GraniteMoeSWAForCausalLM": read_granite_moe_swa,
    "BambaForCausalLM": read_bamba,
    "GraniteMoeHybridForCausalLM": read_granite4,
}
