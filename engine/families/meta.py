"""Meta: Llama 1 to 4, CWM, Muse Glimmer."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import (
    FULL,
    SLIDING,
    Family,
    Fields,
    attention,
    checked,
    gated_mlp,
    layer_types,
    model,
    rope,
    sliding_window,
    sparse_mlp,
    text_of,
    with_default_rope,
    with_defaults,
)
from engine.formats.product import Order
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.attention import AttentionSpec, OutputGate, QkNorm
from engine.spec.ends import EmbeddingSpec, HeadSpec, NormSpec
from engine.spec.experts import ExpertTensors, SharedExpertSpec
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec, UnsupportedModelError
from engine.spec.scaling import QueryGrowth
from engine.weights.names import StoredNames

CHUNKED = "chunked_attention"
TENSORS = ExpertTensors(
    router=("feed_forward.router",),
    all=(("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),),
    order=Order.COLUMNS,
)
VISION = StoredNames(
    renamed={"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    ignored=("vision_model.", "multi_modal_projector."),
)
EVERY = 4  # layers; the last one of them sees all
OTHERS = ("vision_tower.", "vision_adapter.", "vision_projection.")
MUSE_NAMES = StoredNames(
    renamed={"model.language_model.": "model."}, ignored=(*OTHERS, *(f"model.{name}" for name in OTHERS))
)


def read_llama(fields: Fields) -> ModelSpec:
    """Llama: one kind of layer, with biases if `attention_bias` or `mlp_bias` ask for them."""
    fields = with_defaults(fields, "llama")
    bias = fields.flag("attention_bias")
    layer = LayerSpec(
        mixer=attention(fields, qkv_bias=bias, output_bias=bias), mlp=gated_mlp(fields, bias=fields.flag("mlp_bias"))
    )
    return model(fields, [layer] * fields.number("num_hidden_layers"))


def read_cwm(fields: Fields) -> ModelSpec:
    """CWM: Llama with a window on three layers of four."""
    fields = with_default_rope(fields, "cwm")
    fields = with_defaults(fields, "cwm")
    window, mlp = sliding_window(fields), gated_mlp(fields, bias=fields.flag("mlp_bias"))
    kinds = layer_types(fields, [SLIDING if layer % 4 else FULL for layer in range(fields.number("num_hidden_layers"))])
    layers = [LayerSpec(mixer=attention(fields, window=window if kind == SLIDING else 0), mlp=mlp) for kind in kinds]
    return model(fields, layers)


def read_llama4_vision(fields: Fields) -> ModelSpec:
    """Llama 4's text model in a checkpoint with a vision tower."""
    fields.ignore("vision_config", "image_token_index", "boi_token_index", "eoi_token_index")
    fields.ignore("image_token_id", "boi_token_id", "eoi_token_id")
    return read_llama4(fields.text()).with_names(VISION)


def read_llama4(fields: Fields) -> ModelSpec:
    """Llama 4's text model: most layers attend within chunks, with rotation and normed heads; the others see all, unrotated."""
    fields = with_defaults(fields, "llama4_text")
    fields.ignore("for_llm_compressor")
    num_layers, every = fields.number("num_hidden_layers"), fields.number("no_rope_layer_interval")
    rotated = fields.get("no_rope_layers") or [(layer + 1) % every for layer in range(num_layers)]
    kinds = layer_types(fields, [CHUNKED if there else FULL for there in rotated], known=(CHUNKED, FULL))
    chunk = fields.number("attention_chunk_size") if CHUNKED in kinds else 0
    size = fields.number("intermediate_size")
    rule = RoutingRule(chosen=fields.number("num_experts_per_tok"), score=Score.SIGMOID)
    shared = SharedExpertSpec(size=size, under="feed_forward.shared_expert")
    sparse = sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", tensors=TENSORS, shared=shared)
    sparse = replace(sparse, weighs_inputs=True)
    dense = gated_mlp(fields, size="intermediate_size_mlp", under="feed_forward", down="feed_forward.down_proj")
    step = fields.number("interleave_moe_layer_step")
    with_experts = fields.get("moe_layers") or range(step - 1, num_layers, step)
    return model(
        fields,
        [
            LayerSpec(
                mixer=_attention_of_llama4(fields, has_rope=bool(there), window=-chunk if kind == CHUNKED else 0),
                mlp=sparse if layer in with_experts else dense,
            )
            for layer, (kind, there) in enumerate(zip(kinds, rotated, strict=True))
        ],
    )


def _attention_of_llama4(fields: Fields, *, has_rope: bool, window: int) -> AttentionSpec:
    bias, rotation = fields.flag("attention_bias"), rope(fields, theta=500_000.0, interleaved=True)
    growth = QueryGrowth(scale=fields.real("attn_scale", 0.1), every=fields.number("floor_scale"), shift=1)
    tuned = bool(fields.get("attn_temperature_tuning")) and not has_rope
    normed = fields.flag("use_qk_norm") and has_rope
    return attention(
        fields,
        rope=rotation if has_rope else None,
        window=window,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QkNorm(has_weight=False, after_rope=True) if normed else None,
        query_growth=growth if tuned else None,
    )


def read_muse(fields: Fields) -> ModelSpec:
    """Muse Glimmer: gated attention whose heads are normed without weights; sliding windows where heads are rotated."""
    fields.ignore("out_hidden_size", "projector_hidden_act", "projector_hidden_size")
    fields = text_of(fields, "muse_glimmer_text")
    fields.only("attention_bias", False)
    num_layers, window, eps = (
        fields.number("num_hidden_layers"),
        sliding_window(fields),
        fields.real("post_norm_eps", 0.0),
    )
    sees_all = [(num_layers - 1 - layer) % EVERY == 0 for layer in range(num_layers)]
    kinds = layer_types(fields, [FULL if there else SLIDING for there in sees_all])
    rotation, mlp = rope(fields), gated_mlp(fields)
    thetas = fields.get("layer_rope_theta") or [0 if there else rotation.theta for there in sees_all]
    if len(thetas) != num_layers or set(thetas) - {0, rotation.theta}:
        raise UnsupportedModelError(
            f"config.json: layer_rope_theta = {thetas!r:.80} must say 0 or rope_theta = {rotation.theta} for each layer"
        )
    scale = fields.real("qk_scale_factor", 1.0) * fields.number("head_dim") ** -0.5
    layers = [
        LayerSpec(
            mixer=attention(
                fields,
                rope=rotation if theta else None,
                window=window if kind == SLIDING else 0,
                qk_norm=QkNorm(has_weight=False),
                scale=scale,
                gate=OutputGate(module="self_attn.gate_proj"),
            ),
            mlp=mlp,
            around_mixer=BranchSpec(before="input_layernorm", after="post_attention_layernorm", after_eps=eps),
            around_mlp=BranchSpec(
                before="pre_feedforward_layernorm", after="post_feedforward_layernorm", after_eps=eps
            ),
        )
        for kind, theta in zip(kinds, thetas, strict=True)
    ]
    return model(
        fields,
        layers,
        stored=MUSE_NAMES,
        norms=NormSpec(kind="rms_plus_one"),
        head=HeadSpec(
            norm_kind="rms",
            multiplier=fields.real("output_multiplier", 1.0),
            softcap=fields.real("final_logit_softcapping", 0.0),
        ),
        embedding=EmbeddingSpec(is_normed=True),
    )


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": read_llama,
    "CwmForCausalLM": read_cwm,
    "Llama4ForCausalLM": read_llama4,
    "Llama4ForConditionalGeneration": read_llama4_vision,
    "MuseGlimmerForCausalLM": read_muse,
    "MuseGlimmerForConditionalGeneration": read_muse,
}
