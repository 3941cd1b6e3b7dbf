"""NVIDIA: Nemotron (Minitron), Nemotron-H, Nemotron Nano 2 and Nemotron 3."""

from __future__ import annotations

from engine.families.reading import (
    FULL,
    LINEAR,
    Family,
    Fields,
    attention,
    mamba,
    model,
    num_experts_of,
    sigmoid_rule,
    with_defaults,
)
from engine.spec.ends import NormSpec
from engine.spec.experts import ExpertTensors, LatentExperts, RouterSpec, SharedExpertSpec, SparseMlpSpec
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec, PlainMlpSpec, UnsupportedModelError
from engine.weights.names import StoredNames

OF_MAMBA = {
    "num_heads": "mamba_num_heads",
    "groups": "n_groups",
    "state_size": "ssm_state_size",
    "taps": "conv_kernel",
    "taps_bias": "use_conv_bias",
    "bias": "use_bias",
    "activation": "mamba_hidden_act",
    "chunk": "chunk_size",
}
MLP, EXPERTS = "mlp", "moe"
DEFAULT = (LINEAR, EXPERTS, FULL, MLP)
_LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
_OLD = {"mamba": LINEAR, "attention": FULL}
# Names of tensors in checkpoints that say `mixer`.
_MODULES = {LINEAR: "mamba", FULL: "self_attn", MLP: "mlp", EXPERTS: "mlp"}
TENSORS = ExpertTensors(
    each=("mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    all=(("mlp.experts.up_proj", "mlp.experts.down_proj"),),
    correction=("mlp.gate.e_score_correction_bias",),
)
AROUND = BranchSpec(before="norm")


def read_nemotron(fields: Fields) -> ModelSpec:
    """Nemotron and Minitron: LayerNorm of 1 + weight, half of each head rotated, an MLP of relu² without a gate."""
    fields = with_defaults(fields, "nemotron")
    return model(fields, squared_layers(fields), eps="norm_eps", norms=NormSpec(kind="layer_plus_one", has_bias=True))


def squared_layers(fields: Fields) -> list[LayerSpec]:
    """Layers with an MLP of relu² without a gate."""
    fields.only("hidden_act", "relu2")
    bias, size = fields.flag("attention_bias"), fields.number("intermediate_size")
    mlp = PlainMlpSpec(size=size, bias=fields.flag("mlp_bias"), activation="relu2")
    layer = LayerSpec(mixer=attention(fields, qkv_bias=bias, output_bias=bias), mlp=mlp)
    return [layer] * fields.number("num_hidden_layers")


def read_nemotron_h(fields: Fields) -> ModelSpec:
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is Mamba-2, attention, an MLP or experts, without gates or rope."""
    fields = with_defaults(fields, "nemotron_h")
    _refuse_what_differs(fields)
    kinds = _kinds(fields)
    made = {kind: _layer(fields, kind) for kind in dict.fromkeys((*DEFAULT, *kinds))}
    names = {
        f"{theirs}.layers.{index}.mixer.": f"model.layers.{index}.{_MODULES[kind]}."
        for theirs in ("backbone", "model")
        for index, kind in enumerate(kinds)
    }
    names |= {"backbone.layers.": "model.layers."}
    for theirs in ("backbone", "model"):
        names |= {f"{theirs}.embeddings.": "model.embed_tokens.", f"{theirs}.norm_f.": "model.norm."}
    stored = StoredNames(renamed=names, ignored=("mtp.",))
    return model(fields, [made[kind] for kind in kinds], eps="layer_norm_epsilon", stored=stored)


def _layer(fields: Fields, kind: str) -> LayerSpec:
    if kind == FULL:
        return LayerSpec(mixer=attention(fields, rope=None), around_mixer=AROUND)
    if kind == LINEAR:
        head_dim, groups = fields.number("mamba_head_dim"), fields.number("n_groups")
        mixer = mamba(fields, head_dim=head_dim, names=OF_MAMBA, norm_groups=groups)
        return LayerSpec(mixer=mixer, around_mixer=AROUND)
    if kind == MLP:
        size, bias = fields.number("intermediate_size"), fields.flag("mlp_bias")
        return LayerSpec(mlp=PlainMlpSpec(size=size, bias=bias, activation="relu2"), around_mlp=AROUND)
    return LayerSpec(mlp=_experts(fields), around_mlp=AROUND)


def _experts(fields: Fields) -> SparseMlpSpec:
    shared, bias = fields.number("moe_shared_expert_intermediate_size"), fields.flag("mlp_bias")
    latent = None
    if size := fields.count("moe_latent_size"):
        latent = LatentExperts(size=size, before="mlp.fc1_latent_proj", behind="mlp.fc2_latent_proj", bias=bias)
    return SparseMlpSpec(
        num_experts=num_experts_of(fields),
        size=fields.number("moe_intermediate_size"),
        router=RouterSpec(rule=sigmoid_rule(fields)),
        tensors=TENSORS,
        latent=latent,
        shared=SharedExpertSpec(
            size=shared, under="mlp.shared_experts", activation="relu2", bias=fields.flag("mlp_bias")
        ),
        activation="relu2",
    )


def _kinds(fields: Fields) -> list[str]:
    """Read the kind of each layer: a list of names, or a letter for each."""
    named, pattern = fields.get("layers_block_type") or fields.get("layer_types"), fields.get("hybrid_override_pattern")
    fields.ignore("layer_types")
    if not named:
        named = [_LETTERS.get(letter, letter) for letter in pattern] if pattern else DEFAULT
    kinds = [_OLD.get(kind, kind) for kind in named]
    if unknown := set(kinds) - set(_MODULES):
        raise UnsupportedModelError(f"config.json: layers_block_type = {sorted(unknown)} is not supported")
    if FULL not in kinds:
        raise UnsupportedModelError("config.json: layers_block_type without attention is not supported")
    if fields.get("num_hidden_layers") not in (None, len(kinds)):
        asked = fields["num_hidden_layers"]
        raise UnsupportedModelError(
            f"config.json: num_hidden_layers = {asked!r:.40}, but {len(kinds)} layers have a kind"
        )
    return kinds


def _refuse_what_differs(fields: Fields) -> None:
    fields.only("mlp_hidden_act", "relu2")
    fields.only("mamba_ssm_cache_dtype", "float32")
    fields.only("n_shared_experts", 1)
    for name in ("attention_bias", "mamba_proj_bias", "residual_in_fp32", "tie_word_embeddings"):
        fields.only(name, False)
    fields.only("sliding_window")
    fields.only("attention_head_dim", fields.number("head_dim"))
    for name in ("norm_eps", "rms_norm_eps"):
        fields.only(name, fields.real("layer_norm_epsilon", 1e-5))
    # Fields of the start of training, of concurrency, and layers that predict further tokens.
    fields.ignore("rescale_prenorm_residual", "moe_shared_expert_overlap", "num_logits_to_keep", "expand")
    fields.ignore("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    fields.ignore("rope_theta", "rope_parameters", "partial_rotary_factor")  # there is no rope


FAMILIES: dict[str, Family] = {
    "NemotronForCausalLM": read_nemotron,
    "NemotronHForCausalLM": read_nemotron_h,
}
