"""K-EXAONE: EXAONE 4's attention, DeepSeek-V3's experts, norms before each half."""

from __future__ import annotations

from dataclasses import replace

from engine.model.families.dense import exaone4
from engine.model.families.experts.fields import (
    CORRECTED,
    DENSE,
    SPARSE,
    behind_dense,
    layers_by_kind,
    shared_experts,
    sigmoid_rule,
    sparse_mlp,
)
from engine.model.families.fields import Fields, gated_mlp, model
from engine.model.names import StoredNames
from engine.model.spec import LayerSpec, ModelSpec

EXAONE_MOE = exaone4.DEFAULTS | {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
TENSORS = replace(CORRECTED, correction=(*CORRECTED.correction, "mlp.e_score_correction_bias"))
PREDICTIONS = StoredNames(ignored=("mtp.",))


def read(fields: Fields) -> ModelSpec:
    if "num_local_experts" not in fields:
        fields = fields.over({"num_experts": 64})
    fields = fields.over(EXAONE_MOE)
    fields.ignore("num_nextn_predict_layers", "mtp_loss_scaling_factor")
    dense, shared = gated_mlp(fields), shared_experts(fields, "num_shared_experts")
    sparse = sparse_mlp(fields, sigmoid_rule(fields), tensors=TENSORS, shared=shared)
    default = [SPARSE if there else DENSE for there in fields.get("is_moe_layer") or ()] or behind_dense(fields)
    mixers, has_experts = exaone4.mixers(fields), layers_by_kind(fields, default)
    layers = [
        LayerSpec(mixer=mixer, mlp=sparse if there else dense) for mixer, there in zip(mixers, has_experts, strict=True)
    ]
    return model(fields, layers, stored=PREDICTIONS)
