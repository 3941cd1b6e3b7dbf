"""Tables of `gguf_names`: our names of a GGUF file's tensors, and which architectures' were changed."""

from __future__ import annotations

from collections.abc import Mapping

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_AROUND_BOTH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL = {f"ffn_{ours}_exps": f"block_sparse_moe.experts.{{}}.{theirs}" for ours, theirs in
            (("gate", "w1"), ("up", "w3"), ("down", "w2"))} | {"ffn_gate_inp": "block_sparse_moe.gate"}  # fmt: skip
_LFM_2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
} | {
    f"ffn_{ours}{kind}": f"feed_forward.{under}{theirs}"
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    for kind, under in (("", ""), ("_exps", "experts.{}."))
}
OWN: Mapping[str, dict[str, str]] = {
    "llama": _MIXTRAL,
    "olmo2": _AROUND_BOTH,
    "gemma2": _AROUND_BOTH,
    "gemma3": _AROUND_BOTH,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "lfm2": _LFM_2,
    "lfm2moe": _LFM_2,
    "gpt-oss": {
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
}
# No module's: sinks, and the correction of a router's choice.
WITHOUT_KIND = ("exp_probs_b", "attn_sinks")

ROTATED_IN_PAIRS = ("llama", "granite", "smollm3")
NORMS_HOLD_ONE = ("gemma", "gemma2", "gemma3")
