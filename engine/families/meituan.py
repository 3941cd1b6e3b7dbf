"""Meituan: LongCat-Flash.

One of its layers is two of ours. Its experts read what the first one's MLP reads, and add behind the second one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.families.reading import Family, Fields, gated_mlp, mla_attention, model, with_defaults
from engine.kernels.experts.rule import RoutingRule
from engine.spec.experts import ExpertTensors, RouterSpec, SparseMlpSpec
from engine.spec.mla import MLASpec
from engine.spec.model import LayerSpec, ModelSpec, ShortcutSpec, UnsupportedModelError
from engine.weights.names import StoredNames

TENSORS = ExpertTensors(
    router=("moe.router.classifier",),
    each=("moe.experts.{}.gate_proj", "moe.experts.{}.up_proj", "moe.experts.{}.down_proj"),
    all=(("moe.experts.gate_up_proj", "moe.experts.down_proj"),),
    correction=("moe.router.e_score_correction_bias",),
)


def read_longcat(fields: Fields) -> ModelSpec:
    """LongCat-Flash: latent attention twice a layer; experts, some without a product, that a shortcut joins to its end."""
    fields = with_defaults(fields, "longcat_flash")
    # transformers scales MLA's low ranks whatever these fields say; other servers only if they are true.
    for name in ("mla_scale_q_lora", "mla_scale_kv_lora"):
        fields.only(name, True)
    fields.only("attention_method", "MLA")
    fields.only("router_bias", False)
    fields.only("router_dtype", "float32")
    fields.only("norm_topk_prob", False)
    fields.ignore("num_hidden_layers", "num_nextn_predict_layers", "nextn_use_scmoe")
    mixer, dense, num_layers = (
        _attention(fields),
        gated_mlp(fields, size="ffn_hidden_size"),
        fields.number("num_layers"),
    )
    first = LayerSpec(mixer=mixer, mlp=ShortcutSpec(dense=dense, experts=_experts(fields)))
    second = LayerSpec(mixer=mixer, mlp=dense, ends_shortcut=True)
    names = StoredNames(renamed=dict(_names(num_layers)), ignored=("model.mtp.",))
    return model(fields, [first, second] * num_layers, stored=names)


def _attention(fields: Fields) -> MLASpec:
    """Queries and latents are scaled as if they had the full rank."""
    mixer = mla_attention(fields, interleaved=True, value_dim=fields.number("v_head_dim"))
    hidden = fields.number("hidden_size")
    of_queries = (hidden / fields.number("q_lora_rank")) ** 0.5
    return replace(mixer, scale=mixer.scale * of_queries, latent_scale=(hidden / mixer.sizes.rank) ** 0.5)


def _experts(fields: Fields) -> SparseMlpSpec:
    fields.only("zero_expert_type", "identity")
    num_experts, identities = fields.number("n_routed_experts"), fields.count("zero_expert_num")
    chosen = fields.number("moe_topk")
    if chosen > num_experts + identities:
        raise UnsupportedModelError(f"config.json: moe_topk = {chosen} of {num_experts + identities} experts")
    rule = RoutingRule(chosen=chosen, scale=fields.real("routed_scaling_factor", 1.0))
    return SparseMlpSpec(
        num_experts=num_experts,
        size=fields.number("expert_ffn_hidden_size"),
        router=RouterSpec(rule=rule, is_wide=True),
        tensors=TENSORS,
        identities=identities,
    )


def _names(num_layers: int) -> Iterator[tuple[str, str]]:
    """Prefixes of a checkpoint's names, and ours."""
    for layer in range(num_layers):
        theirs, ours = f"model.layers.{layer}.", [f"model.layers.{2 * layer + half}." for half in (0, 1)]
        for half in (0, 1):
            yield f"{theirs}mlps.{half}.", f"{ours[half]}mlp."
            for module in ("self_attn", "input_layernorm", "post_attention_layernorm"):
                yield f"{theirs}{module}.{half}.", f"{ours[half]}{module}."
        yield f"{theirs}mlp.", f"{ours[0]}moe."


FAMILIES: dict[str, Family] = {
    "LongcatFlashForCausalLM": read_longcat,
}
