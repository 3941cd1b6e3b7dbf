"""Bamba: Mamba-2 in most layers, attention with half of each head rotated in some."""

from __future__ import annotations

from engine.families.fields import FULL, Fields, attention, flag, gated_mlp, model, number
from engine.families.hybrids import mamba
from engine.families.hybrids.fields import LINEAR
from engine.spec.model import BranchSpec, LayerSpec, MixerSpec, ModelSpec, UnsupportedModelError

BAMBA = mamba.DEFAULTS | {
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
}
ROTATED = 0.5  # share of a head, whatever config.json says


def read(fields: Fields) -> ModelSpec:
    fields = fields.over(BAMBA).with_values(partial_rotary_factor=ROTATED)
    bias = flag(fields, "attention_bias")
    full = attention(fields, qkv_bias=bias, output_bias=bias)
    if full.rope is None or full.rope.share != ROTATED:
        raise UnsupportedModelError(f"config.json: partial_rotary_factor is not supported; supported: {ROTATED}")
    fields.only("attn_rotary_emb", full.rope.rotary_dim(full.heads.head_dim))
    mixers: dict[str, MixerSpec] = {FULL: full, LINEAR: mamba.mamba(fields, head_dim=mamba.head_dim(fields))}
    mlp = gated_mlp(fields, bias=flag(fields, "mlp_bias"), under="feed_forward", down="feed_forward.down_proj")
    after = BranchSpec(before="pre_ff_layernorm")
    layers = [LayerSpec(mixer=mixers[kind], mlp=mlp, around_mlp=after) for kind in _kinds(fields)]
    fields.ignore("z_loss_coefficient", "num_logits_to_keep")  # neither changes an answer
    return model(fields, layers, final_norm="model.final_layernorm")


def _kinds(fields: Fields) -> list[str]:
    found = fields.get("attn_layer_indices") or []
    fields.ignore("layer_types", "layers_block_type")
    num_layers = number(fields, "num_hidden_layers")
    if not found or sorted(set(found) & set(range(num_layers))) != sorted(found):
        raise UnsupportedModelError(f"config.json: attn_layer_indices = {found!r:.40} names no layers of {num_layers}")
    return [FULL if index in found else LINEAR for index in range(num_layers)]
