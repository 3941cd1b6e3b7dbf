"""Microsoft: Phi-1 to 4, also with experts, vision or sound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.families.reading import (
    W1_W3_W2,
    Family,
    Fields,
    attention,
    checked,
    gated_mlp,
    model,
    rope,
    rope_values,
    sliding_window,
    sparse_mlp,
    with_defaults,
)
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.ends import HeadSpec, NormSpec
from engine.spec.experts import ExpertTensors
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec, PlainMlpSpec, UnsupportedModelError
from engine.spec.scaling import LongRopeScaling, RopeSpec
from engine.weights.names import StoredNames

TENSORS = ExpertTensors(router=("block_sparse_moe.gate", "mlp.router"), each=W1_W3_W2)
MAGNITUDES = ("short_mscale", "long_mscale")
OF_OTHERS = ("embd_layer", "img_processor", "audio_processor", "audio_config", "vision_config")
ADAPTED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def read_phi(fields: Fields) -> ModelSpec:
    """Phi-1 and 2: parallel halves, LayerNorm, part of each head rotated."""
    fields = with_defaults(fields, "phi")
    fields.only("hidden_act", "gelu_new")
    fields.only("qk_layernorm", False)
    mixer = attention(fields, qkv_bias=True, output_bias=True, output="self_attn.dense")
    size = fields.number("intermediate_size")
    mlp = PlainMlpSpec(size=size, bias=True, activation="gelu_tanh", up="mlp.fc1", down="mlp.fc2")
    layer = LayerSpec(mixer=mixer, mlp=mlp, around_mlp=BranchSpec(shares=True))
    head = HeadSpec(norm="model.final_layernorm", bias=True)
    return model(
        fields,
        [layer] * fields.number("num_hidden_layers"),
        eps="layer_norm_eps",
        norms=NormSpec(kind="layer", has_bias=True),
        head=head,
    )


def read_phi3(fields: Fields) -> ModelSpec:
    """Phi-3, Phi-3.5, Phi-4 and their mini models: Llama with fused tensors and LongRoPE."""
    fields = with_defaults(fields, "phi3")
    fields.only("full_attn_mod", 1)
    fields.only("interpolate_factor", 1)
    fields.only("lm_head_bias", False)
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    fields.ignore("original_max_position_embeddings")
    mixer = attention(
        fields,
        rope=rope(fields, legacy_type="longrope"),
        window=sliding_window(fields),
        fused="self_attn.qkv_proj",
    )
    mlp = gated_mlp(fields, fused="mlp.gate_up_proj")
    return model(fields, [LayerSpec(mixer=mixer, mlp=mlp)] * fields.number("num_hidden_layers"))


def read_phimoe(fields: Fields) -> ModelSpec:
    """Phi-3.5-MoE: LayerNorm, LongRoPE, two experts of which each weighs against those near it."""
    fields = with_defaults(fields, "phimoe")
    fields.ignore("input_jitter_noise", "original_max_position_embeddings")
    fields.only("num_experts_per_tok", 2)
    bias, near = fields.flag("attention_bias"), 2 * fields.real("router_jitter_noise", 0.01)
    if near < 0:
        raise UnsupportedModelError(f"config.json: router_jitter_noise = {near / 2} is below 0")
    rule = RoutingRule(chosen=2, score=Score.NEAR_OF_CHOSEN, near=near)
    window = sliding_window(fields)
    layer = LayerSpec(
        mixer=attention(fields, rope=_rope(fields), window=window, qkv_bias=bias, output_bias=bias),
        mlp=sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", tensors=TENSORS),
    )
    layers = [layer] * fields.number("num_hidden_layers")
    return model(
        fields, layers, norms=NormSpec(kind="layer", has_bias=True), head=HeadSpec(bias=fields.flag("lm_head_bias"))
    )


def _rope(fields: Fields) -> RopeSpec:
    """The rope, whose magnitudes are given, not computed."""
    rotation = rope(fields, theta=1_000_000.0, legacy_type="longrope", others=MAGNITUDES)
    if not isinstance(rotation.scaling, LongRopeScaling):
        return rotation
    name, values = rope_values(fields)
    if lacking := [key for key in MAGNITUDES if not values.get(key)]:
        raise UnsupportedModelError(f"config.json: {name} of type 'longrope' lacks {lacking[0]}")
    short, long = (float(values[key]) for key in MAGNITUDES)
    return replace(rotation, scaling=replace(rotation.scaling, attention_factor=short, long_attention_factor=long))


def read_phi3_vision(fields: Fields) -> ModelSpec:
    """Phi-3 and 3.5 Vision: Phi-3's text model in a checkpoint with a vision tower."""
    fields.ignore(*OF_OTHERS)
    return read_phi3(fields).with_names(StoredNames(ignored=("model.vision_embed_tokens.",)))


def read_phi4_multimodal(fields: Fields) -> ModelSpec:
    """Phi-4-multimodal: Phi-4-mini's text model, beside adapters that only images and sound switch on."""
    fields = with_defaults(fields, "phi4_multimodal")
    fields.ignore(*OF_OTHERS, "vision_lora", "speech_lora")
    modules = list(_adapted(fields.number("num_hidden_layers")))
    names = StoredNames(
        renamed={f"{module}.base_layer.": f"{module}." for module in modules},
        ignored=("model.embed_tokens_extend.", *(f"{module}.lora_" for module in modules)),
    )
    return read_phi3(fields).with_names(names)


def _adapted(num_layers: int) -> Iterator[str]:
    for layer in range(num_layers):
        for module in ADAPTED:
            yield f"model.layers.{layer}.{module}"


FAMILIES: dict[str, Family] = {
    "PhiForCausalLM": read_phi,
    "Phi3ForCausalLM": read_phi3,
    "PhimoeForCausalLM": read_phimoe,
    "PhiMoEForCausalLM": read_phimoe,
    "Phi3VForCausalLM": read_phi3_vision,
    "Phi4MMForCausalLM": read_phi4_multimodal,
    "Phi4MultimodalForCausalLM": read_phi4_multimodal,
}
