"""Granite 4: Mamba-2 in most layers or in none, experts beside a shared one or that one alone; Granite's multipliers."""

from __future__ import annotations

from engine.families.dense import granite
from engine.families.experts.fields import checked, sparse_mlp
from engine.families.experts.granite_moe import TENSORS
from engine.families.fields import FULL, Fields, count, gated_mlp, number
from engine.families.hybrids import mamba
from engine.families.hybrids.fields import LINEAR
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.experts import SharedExpertSpec
from engine.spec.model import MixerSpec, MlpSpec, ModelSpec

GRANITE_4 = (
    granite.GRANITE
    | mamba.DEFAULTS
    | {"shared_intermediate_size": 1024, "num_local_experts": 8, "num_experts_per_tok": 2}
)


def read(fields: Fields) -> ModelSpec:
    fields = fields.over(GRANITE_4)
    kinds = mamba.kinds_of_layers(fields, [LINEAR] * number(fields, "num_hidden_layers"))
    fields.only("position_embedding_type", "rope", "nope")
    fields.only("normalization_function", "rmsnorm")
    fields.ignore("layers_block_type")
    has_rope = fields.get("position_embedding_type") == "rope"
    mixers: dict[str, MixerSpec] = {FULL: granite.attention_of(fields, has_rope=has_rope)}
    if LINEAR in kinds:
        mixers[LINEAR] = mamba.mamba(fields, head_dim=mamba.head_dim(fields))
    else:
        fields.ignore("time_step_limit", *(name for name in fields if name.startswith("mamba_")))
    mlp = _mlp(fields)
    return granite.around(fields, [granite.layer(fields, mixers[kind], mlp) for kind in kinds])


def _mlp(fields: Fields) -> MlpSpec:
    if not count(fields, "num_local_experts"):
        fields.ignore("intermediate_size", "num_experts_per_tok")
        return gated_mlp(
            fields, size="shared_intermediate_size", fused="shared_mlp.input_linear", down="shared_mlp.output_linear"
        )
    size = number(fields, "shared_intermediate_size")
    shared = SharedExpertSpec(size=size, under="shared_mlp", gate_up="input_linear", down="output_linear")
    rule = RoutingRule(chosen=number(fields, "num_experts_per_tok"), score=Score.SOFTMAX_OF_CHOSEN)
    return sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", tensors=TENSORS, shared=shared)
