"""TII (Technology Innovation Institute): Falcon-H1."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import Family, Fields, attention, gated_mlp, mamba, mamba_head_dim, model, with_defaults
from engine.kernels.mamba.heads import Norm
from engine.spec.ends import EmbeddingSpec, HeadSpec
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec, SideBySideSpec, UnsupportedModelError


def read_falcon_h1(fields: Fields) -> ModelSpec:
    """Falcon-H1: Mamba-2 and attention side by side in each layer, and a multiplier of every product."""
    fields = with_defaults(fields, "falcon_h1")
    fields.only("mamba_use_mlp", True)
    fields.only("attn_layer_indices")
    # Fields that repeat sizes, or concern generation.
    fields.ignore("mlp_expansion_factor", "num_logits_to_keep", "layer_types", "layers_block_type")
    of_gate, of_down = _several(fields, "mlp_multipliers", 2)
    bias = fields.flag("mlp_bias")
    mlp = gated_mlp(fields, bias=bias, gate_multiplier=of_gate, under="feed_forward", down="feed_forward.down_proj")
    around_mlp = BranchSpec(before="pre_ff_layernorm", multiplier=of_down)
    layer = LayerSpec(mixer=_mixer(fields), mlp=mlp, around_mixer=BranchSpec(), around_mlp=around_mlp)
    return model(
        fields,
        [layer] * fields.number("num_hidden_layers"),
        head=HeadSpec(norm="model.final_layernorm", multiplier=fields.real("lm_head_multiplier", 1.0)),
        embedding=EmbeddingSpec(multiplier=fields.real("embedding_multiplier", 1.0)),
    )


def _mixer(fields: Fields) -> SideBySideSpec:
    """The mixer; input multipliers are folded into the following products, which are linear without biases."""
    bias, inner_bias = fields.flag("attention_bias"), fields.flag("mamba_proj_bias")
    of_input, of_state = fields.real("attention_in_multiplier", 1.0), fields.real("ssm_in_multiplier", 1.0)
    for name, value, has_bias in (
        ("attention_in_multiplier", of_input, bias),
        ("ssm_in_multiplier", of_state, inner_bias),
    ):
        if has_bias and value != 1.0:
            raise UnsupportedModelError(f"config.json: {name} = {value} is not supported beside a bias; supported: 1.0")
    full = attention(fields, qkv_bias=bias, output_bias=bias)
    scale = full.heads.head_dim**-0.5 * fields.real("key_multiplier", 1.0) * of_input**2
    multipliers = tuple(of_state * each for each in _several(fields, "ssm_multipliers", 5))
    total = None
    if fields.get("mamba_d_ssm") is not None:
        total = fields.number("mamba_d_ssm")
        fields.ignore("mamba_expand")
    state = mamba(
        fields,
        head_dim=mamba_head_dim(fields, total=total),
        out_bias=fields.flag("projectors_bias"),
        norm=_norm(fields),
        norm_groups=fields.number("mamba_n_groups"),
        multipliers=multipliers if set(multipliers) != {1.0} else (),
    )
    return SideBySideSpec(
        mamba=state,
        attention=replace(full, scores=replace(full.scores, scale=scale)),
        around_mamba=BranchSpec(before="input_layernorm", multiplier=fields.real("ssm_out_multiplier", 1.0)),
        around_attention=BranchSpec(shares=True, multiplier=of_input * fields.real("attention_out_multiplier", 1.0)),
    )


def _norm(fields: Fields) -> Norm:
    is_before = fields.flag("mamba_norm_before_gate")
    if not fields.flag("mamba_rms_norm"):
        return "none"
    return "before" if is_before else "after"


def _several(fields: Fields, name: str, count: int) -> list[float]:
    values = fields.get(name)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list | tuple) or len(values) != count:
        raise UnsupportedModelError(f"config.json: {name} must be {count} numbers, not {values!r:.40}")
    return [Fields({name: value}).real(name, 1.0) for value in values]


FAMILIES: dict[str, Family] = {
    "FalconH1ForCausalLM": read_falcon_h1,
}
