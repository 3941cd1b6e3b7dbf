"""LG AI Research: EXAONE 3 to 4, K-EXAONE."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import (
    CORRECTED,
    DENSE,
    SLIDING,
    SPARSE,
    Family,
    Fields,
    attention,
    behind_dense,
    every,
    gated_mlp,
    layer_types,
    layers_by_kind,
    model,
    rope,
    shared_experts,
    sigmoid_rule,
    sliding_window,
    sparse_mlp,
    with_defaults,
)
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec
from engine.weights.names import StoredNames

AROUND_MIXER = BranchSpec(after="post_attention_layernorm")
AROUND_MLP = BranchSpec(after="post_feedforward_layernorm")
ALSO_BESIDE = replace(CORRECTED, correction=(*CORRECTED.correction, "mlp.e_score_correction_bias"))
PREDICTIONS = StoredNames(ignored=("mtp.",))


def read_exaone(fields: Fields) -> ModelSpec:
    """EXAONE 3 and 3.5: Llama by other names."""
    fields = _renamed(fields, num_layers="num_hidden_layers", layer_norm_epsilon="rms_norm_eps")
    fields = _renamed(fields, activation_function="hidden_act")
    fields.ignore("embed_dropout")
    num_layers, mlp = (
        fields.number("num_hidden_layers"),
        gated_mlp(fields, gate="c_fc_0", up="c_fc_1", down="mlp.c_proj"),
    )
    layer = LayerSpec(
        mixer=attention(fields, output="self_attn.out_proj"),
        mlp=mlp,
        around_mixer=BranchSpec(before="ln_1"),
        around_mlp=BranchSpec(before="ln_2"),
    )
    attentions = {
        f"transformer.h.{each}.attn.attention.": f"model.layers.{each}.self_attn." for each in range(num_layers)
    }
    others = {
        "transformer.h.": "model.layers.",
        "transformer.wte.": "model.embed_tokens.",
        "transformer.ln_f.": "model.norm.",
    }
    names = StoredNames(renamed=attentions | others, ignored=tuple(f"{name}rotary." for name in attentions))
    return model(fields, [layer] * num_layers, stored=names)


def _renamed(fields: Fields, **names: str) -> Fields:
    """The same fields under other families' names."""
    fields.ignore(*names)
    return fields.with_values(**{ours: fields[theirs] for theirs, ours in names.items() if theirs in fields})


def read_exaone4(fields: Fields) -> ModelSpec:
    """EXAONE 4: norms after each half, none before; queries and keys normed by head; layers without a window have no rope."""
    fields = with_defaults(fields, "exaone4")
    mlp = gated_mlp(fields)
    return model(
        fields,
        [
            LayerSpec(mixer=mixer, mlp=mlp, around_mixer=AROUND_MIXER, around_mlp=AROUND_MLP)
            for mixer in _mixers(fields)
        ],
    )


def _mixers(fields: Fields) -> list[AttentionSpec]:
    """Each layer's attention."""
    window, pattern = sliding_window(fields), fields.get("sliding_window_pattern")
    rotation = rope(fields)
    return [
        attention(
            fields,
            rope=rotation if kind == SLIDING or not window else None,
            window=window if kind == SLIDING else 0,
            qk_norm=QkNorm(),
        )
        for kind in layer_types(fields, _kinds(fields, pattern if window else 0))
    ]


def _kinds(fields: Fields, pattern: int | str | None) -> list[str]:
    """Kinds of layers; old checkpoints write the pattern as letters: "LLLG"."""
    if isinstance(pattern, str):
        return every(fields, len(pattern))
    return every(fields, int(pattern or 0))


def read_k_exaone(fields: Fields) -> ModelSpec:
    """K-EXAONE: EXAONE 4's attention, DeepSeek-V3's experts, norms before each half."""
    fields = with_defaults(fields, "exaone_moe")
    fields.ignore("num_nextn_predict_layers", "mtp_loss_scaling_factor")
    dense, shared = gated_mlp(fields), shared_experts(fields, "num_shared_experts")
    sparse = sparse_mlp(fields, sigmoid_rule(fields), tensors=ALSO_BESIDE, shared=shared)
    default = [SPARSE if there else DENSE for there in fields.get("is_moe_layer") or ()] or behind_dense(fields)
    mixers, has_experts = _mixers(fields), layers_by_kind(fields, default)
    layers = [
        LayerSpec(mixer=mixer, mlp=sparse if there else dense) for mixer, there in zip(mixers, has_experts, strict=True)
    ]
    return model(fields, layers, stored=PREDICTIONS)


FAMILIES: dict[str, Family] = {
    "ExaoneForCausalLM": read_exaone,
    "Exaone4ForCausalLM": read_exaone4,
    "ExaoneMoeForCausalLM": read_k_exaone,
}
