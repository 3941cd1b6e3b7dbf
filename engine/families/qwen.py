"""Qwen (Alibaba): 1.5 with experts, 2, 2.5, 3, 3-Next, 3.5 and 3.6, and the text models of VL and Omni.

The three positions that images have are one in text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.families.reading import (
    FULL,
    GATE_UP_DOWN,
    LINEAR,
    OF_IMAGES,
    VISUAL,
    Family,
    Fields,
    attention,
    checked,
    delta,
    gated_mlp,
    layer_types,
    model,
    rope,
    softmax_rule,
    sparse_layers,
    sparse_mlp,
    text_of,
    windows_by_layer,
    with_defaults,
)
from engine.formats.product import Order
from engine.kernels.experts.rule import RoutingRule
from engine.spec.attention import AttentionSpec, OutputGate, QkNorm
from engine.spec.ends import NormSpec
from engine.spec.experts import ExpertTensors, SharedExpertSpec, SparseMlpSpec
from engine.spec.model import LayerSpec, MlpSpec, ModelSpec, UnsupportedModelError
from engine.spec.states import DeltaSpec, Stored
from engine.weights.names import StoredNames

QWEN_3_5_NAMES = StoredNames(renamed={"model.language_model.": "model."}, ignored=("model.visual.", "mtp."))
# Qwen published transposed experts; transformers 5 saves them by rows.
EITHER_WAY = ExpertTensors(each=GATE_UP_DOWN, order=Order.ROWS_OR_COLUMNS)
_TOWERS = ("audio_tower.", "visual.")
OF_THINKERS = StoredNames(
    renamed={"thinker.": ""},
    ignored=(*_TOWERS, *(f"thinker.{tower}" for tower in _TOWERS), "talker.", "token2wav.", "code2wav."),
)


def read_qwen2(fields: Fields) -> ModelSpec:
    """Qwen2 and Qwen2.5: biases on queries, keys and values; a window on some layers."""
    fields = _within_chunks(with_defaults(fields, "qwen2"))
    mlp = gated_mlp(fields)
    fields.only("use_mrope", False)
    return model(
        fields,
        [
            LayerSpec(mixer=attention(fields, qkv_bias=True, window=window), mlp=mlp)
            for window in windows_by_layer(fields)
        ],
    )


def _within_chunks(fields: Fields) -> Fields:
    """The limit of models of 1M tokens, whose chunked attention is not supported: they are served up to their trained length."""
    chunks = fields.get("dual_chunk_attention_config")
    if not isinstance(chunks, Mapping):
        return fields
    own = Fields(chunks)
    trained = min(own.number("original_max_position_embeddings"), own.number("chunk_size"))
    longest = min(fields.number("max_position_embeddings"), trained)
    return fields.with_values(max_position_embeddings=longest, dual_chunk_attention_config=None)


def read_qwen3(fields: Fields) -> ModelSpec:
    """Qwen3: queries and keys are normalised head by head; a window on some layers."""
    fields = with_defaults(fields, "qwen3")
    bias, mlp = fields.flag("attention_bias"), gated_mlp(fields)
    fields.only("use_mrope", False)
    return model(
        fields,
        [
            LayerSpec(
                mixer=attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm(), window=window), mlp=mlp
            )
            for window in windows_by_layer(fields)
        ],
    )


def read_qwen2_moe(fields: Fields) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention; beside the chosen experts a gated one that all tokens share."""
    bias, dense = bool(fields.get("qkv_bias", True)), gated_mlp(fields)
    size = fields.number("shared_expert_intermediate_size")
    shared = SharedExpertSpec(size=size, under="mlp.shared_expert", is_gated=True)
    sparse = sparse_mlp(fields, softmax_rule(fields), shared=shared)
    return model(
        fields,
        [
            LayerSpec(mixer=attention(fields, qkv_bias=bias, window=window), mlp=sparse if has_experts else dense)
            for window, has_experts in zip(windows_by_layer(fields), sparse_layers(fields), strict=True)
        ],
    )


def read_qwen3_moe(fields: Fields) -> ModelSpec:
    """Qwen3-MoE: Qwen3's attention; experts in the layers that `decoder_sparse_step` and `mlp_only_layers` leave."""
    fields.only("use_qk_norm", True)
    bias, dense, sparse = fields.flag("attention_bias"), gated_mlp(fields), sparse_mlp(fields, softmax_rule(fields))
    return model(
        fields,
        [
            LayerSpec(
                mixer=attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm(), window=window),
                mlp=sparse if has_experts else dense,
            )
            for window, has_experts in zip(windows_by_layer(fields), sparse_layers(fields), strict=True)
        ],
    )


def _hybrid(fields: Fields, mlps: Iterable[MlpSpec], *, stored: Stored) -> ModelSpec:
    """Read a model of layers with the gated delta rule and, every few, attention with an output gate."""
    period = fields.number("full_attention_interval")
    period_kinds = [
        FULL if (index + 1) % period == 0 else LINEAR for index in range(fields.number("num_hidden_layers"))
    ]
    kinds = layer_types(fields, period_kinds, known=(FULL, LINEAR))
    if FULL not in kinds:
        raise UnsupportedModelError(f"config.json: layer_types without {FULL} is not supported")
    mixers: dict[str, AttentionSpec | DeltaSpec] = {
        FULL: _gated_attention(fields),
        LINEAR: delta(fields, stored=stored),
    }
    layers = [LayerSpec(mixer=mixers[kind], mlp=mlp) for kind, mlp in zip(kinds, mlps, strict=True)]
    return model(fields, layers, norms=NormSpec(kind="rms_plus_one"))


def _experts(fields: Fields) -> SparseMlpSpec:
    """Experts, and a gated shared one."""
    size = fields.number("shared_expert_intermediate_size")
    shared = SharedExpertSpec(size=size, under="mlp.shared_expert", is_gated=True)
    return sparse_mlp(fields, softmax_rule(fields), shared=shared)


def _gated_attention(fields: Fields) -> AttentionSpec:
    bias = fields.flag("attention_bias")
    # M-RoPE fields of vision models: a text token's three positions are equal.
    rotation = rope(fields, others=("mrope_section", "mrope_interleaved"))
    return attention(fields, rope=rotation, qk_norm=QkNorm(), qkv_bias=bias, output_bias=bias, gate=OutputGate())


def read_qwen3_next(fields: Fields) -> ModelSpec:
    """Qwen3-Next: three layers of four keep a state; experts with one that is shared, in the layers that two fields leave."""
    fields = with_defaults(fields, "qwen3_next")
    dense, sparse = gated_mlp(fields), _experts(fields)
    spec = _hybrid(fields, [sparse if chosen else dense for chosen in sparse_layers(fields)], stored="by_group")
    return spec.with_names(StoredNames(ignored=("mtp.",)))


def read_qwen3_5(fields: Fields) -> ModelSpec:
    """Qwen3.5 and 3.6: three layers of four keep a state; dense, or with experts and one that is shared."""
    fields = with_defaults(_text_of_3_5(fields), "qwen3_5_text")
    return _model_of_3_5(fields, gated_mlp(fields))


def read_qwen3_5_moe(fields: Fields) -> ModelSpec:
    """Qwen3.5 and 3.6: three layers of four keep a state; dense, or with experts and one that is shared."""
    fields = with_defaults(_text_of_3_5(fields), "qwen3_5_moe_text")
    fields.only("mlp_only_layers", [])
    fields = fields.with_values(norm_topk_prob=True)
    return _model_of_3_5(fields, _experts(fields))


def _model_of_3_5(fields: Fields, mlp: MlpSpec) -> ModelSpec:
    fields.only("attn_output_gate", True)
    fields.only("output_gate_type", "swish")
    fields.only("mamba_ssm_dtype", "float32")
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    return _hybrid(fields, [mlp] * fields.number("num_hidden_layers"), stored="by_kind").with_names(QWEN_3_5_NAMES)


def _text_of_3_5(fields: Fields) -> Fields:
    vision = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    fields.ignore("vision_config", "language_model_only", *vision)
    return fields.text()


def read_qwen2_vl(fields: Fields) -> ModelSpec:
    """Qwen2-VL and Qwen2.5-VL: Qwen2's text model in a checkpoint with a vision tower."""
    return _text_of_qwen2_vl(text_of(fields, "qwen2_vl_text")).with_names(VISUAL)


def read_qwen2_omni(fields: Fields) -> ModelSpec:
    """Qwen2.5-Omni: the thinker's text part, Qwen2."""
    return _text_of_qwen2_vl(_thinker(fields, "qwen2_5_omni_text")).with_names(OF_THINKERS)


def _text_of_qwen2_vl(fields: Fields) -> ModelSpec:
    rotation, mlp = rope(fields, theta=1_000_000.0, others=OF_IMAGES), gated_mlp(fields)
    layers = [
        LayerSpec(mixer=attention(fields, rope=rotation, qkv_bias=True, window=window), mlp=mlp)
        for window in windows_by_layer(fields)
    ]
    return model(fields, layers)


def read_qwen3_vl(fields: Fields) -> ModelSpec:
    """Qwen3-VL: Qwen3's text model in a checkpoint with a vision tower."""
    fields = text_of(fields, "qwen3_vl_text")
    layer = LayerSpec(mixer=_attention_of_qwen3_vl(fields), mlp=gated_mlp(fields))
    return model(fields, [layer] * fields.number("num_hidden_layers"), stored=VISUAL)


def read_qwen3_vl_moe(fields: Fields) -> ModelSpec:
    """Qwen3-VL with experts: Qwen3-MoE's text model in a checkpoint with a vision tower."""
    return _text_of_qwen3_vl_moe(text_of(fields, "qwen3_vl_moe_text")).with_names(VISUAL)


def read_qwen3_omni(fields: Fields) -> ModelSpec:
    """Qwen3-Omni: the thinker's text part, Qwen3 with experts."""
    return _text_of_qwen3_vl_moe(_thinker(fields, "qwen3_omni_moe_text")).with_names(OF_THINKERS)


def _text_of_qwen3_vl_moe(fields: Fields) -> ModelSpec:
    fields.only("norm_topk_prob", True)
    rule = checked(fields, RoutingRule(chosen=fields.number("num_experts_per_tok"), renormalised=True))
    dense, sparse = gated_mlp(fields), sparse_mlp(fields, rule, tensors=EITHER_WAY)
    mixer = _attention_of_qwen3_vl(fields)
    layers = [LayerSpec(mixer=mixer, mlp=sparse if there else dense) for there in sparse_layers(fields)]
    return model(fields, layers)


def _attention_of_qwen3_vl(fields: Fields) -> AttentionSpec:
    bias, rotation = fields.flag("attention_bias"), rope(fields, theta=500_000.0, others=OF_IMAGES)
    return attention(fields, rope=rotation, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm())


def _thinker(fields: Fields, model_type: str) -> Fields:
    """The text model's fields of a thinker, or of a checkpoint with a thinker and a talker."""
    inner = fields.get("thinker_config")
    if isinstance(inner, Mapping):
        fields = fields.with_values(**inner)
        fields.ignore("thinker_config", "talker_config", "token2wav_config", "code2wav_config", "enable_audio_output")
    fields.ignore("audio_config", "position_id_per_seconds", "seconds_per_chunk", "enable_talker")
    fields.ignore(*(name for name in fields if name.endswith("_token_index")))
    return text_of(fields, model_type)


FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "Qwen2MoeForCausalLM": read_qwen2_moe,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "Qwen3NextForCausalLM": read_qwen3_next,
    "Qwen3_5ForCausalLM": read_qwen3_5,
    "Qwen3_5ForConditionalGeneration": read_qwen3_5,
    "Qwen3_5MoeForCausalLM": read_qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": read_qwen3_5_moe,
    "Qwen2VLForConditionalGeneration": read_qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": read_qwen2_vl,
    "Qwen2_5OmniForConditionalGeneration": read_qwen2_omni,
    "Qwen2_5OmniModel": read_qwen2_omni,
    "Qwen2_5OmniThinkerForConditionalGeneration": read_qwen2_omni,
    "Qwen3VLForConditionalGeneration": read_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": read_qwen3_vl_moe,
    "Qwen3OmniMoeForConditionalGeneration": read_qwen3_omni,
    "Qwen3OmniMoeThinkerForConditionalGeneration": read_qwen3_omni,
}
