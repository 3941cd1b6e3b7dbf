"""Architectures of GGUF, a row each: the class that computes it, the parts of its config.json, and fields of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.families.gguf import google, granite, own, recurrent
from engine.families.gguf.entries import Config, Entries
from engine.families.gguf.experts import chosen_experts, deepseek, sigmoid_alone, sigmoid_experts, softmax_experts
from engine.families.gguf.parts import (
    biases,
    common,
    common_normed_after,
    full_attention,
    head_dim,
    layer_normed,
    rope,
)

Read = Callable[[Entries], Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One architecture: its class, unless a part says another; parts; and fields, each with its entry or what reads it."""

    family: str
    parts: tuple[Callable[[Entries], Config], ...] = (common, rope)
    fields: Mapping[str, str | Read] = field(default_factory=dict)

    def read(self, entries: Entries) -> Config:
        """Return the fields of a config.json. Raises UnsupportedModelError, naming the entry."""
        config: Config = {"architectures": [self.family]}
        for part in self.parts:
            config |= part(entries)
        for name, value in self.fields.items():
            config[name] = entries[value] if isinstance(value, str) else value(entries)
        return config


def always(value: Any) -> Read:
    """A value that no entry has, as in published models."""
    return lambda entries: value


def has(tensor: str) -> Read:
    """A fact that only the tensors tell."""
    return lambda entries: entries.has(tensor)


def flag(name: str) -> Read:
    """False where there is no such entry."""
    return lambda entries: bool(entries.get(name, False))


_Q_BIAS, _UP_BIAS = has("blk.0.attn_q.bias"), has("blk.0.ffn_up.bias")
_WINDOW, _NO_WINDOW = {"sliding_window": "attention.sliding_window"}, {"sliding_window": always(None)}
_HEADS: Mapping[str, Read] = {"head_dim": head_dim}
_QWEN = (common, rope, full_attention)
_QWEN_3 = {**_HEADS, "attention_bias": _Q_BIAS}
_SHARED = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_SIZE = {"intermediate_size": "expert_feed_forward_length"}
_MOE_SIZE = {"moe_intermediate_size": "expert_feed_forward_length"}
_LOCAL = chosen_experts("num_local_experts")
_DELTA_EXPERTS = (recurrent.gated_delta, softmax_experts(renormalised=True))
_NEMOTRON_H = Row("NemotronHForCausalLM", (recurrent.nemotron_h,))

ROWS: Mapping[str, Row] = {
    # -- dense
    "llama": Row("LlamaForCausalLM", (common, rope, own.llama_or_mixtral), _HEADS),
    "arcee": Row("ArceeForCausalLM", (common, rope, biases), _HEADS),
    "ernie4_5": Row("Ernie4_5ForCausalLM", fields={**_HEADS, "use_bias": _UP_BIAS}),
    "exaone4": Row("Exaone4ForCausalLM", (common_normed_after, rope, own.exaone4_windows), _HEADS),
    "glm4": Row("Glm4ForCausalLM", (common, rope, biases), _HEADS),
    "hunyuan-dense": Row("HunYuanDenseV1ForCausalLM", (common, rope, biases), _HEADS),
    "mistral3": Row("MistralForCausalLM", (common, rope, own.mistral_or_ministral3), {**_HEADS, **_NO_WINDOW}),
    "olmo2": Row("Olmo2ForCausalLM", (common_normed_after, rope, own.olmo2_or_3), {"attention_bias": _Q_BIAS}),
    "phi3": Row("Phi3ForCausalLM", (common, rope, own.phi3_positions)),
    "qwen2": Row("Qwen2ForCausalLM", _QWEN),
    "qwen2vl": Row("Qwen2ForCausalLM", _QWEN),
    "qwen3": Row("Qwen3ForCausalLM", _QWEN, _QWEN_3),
    "qwen3vl": Row("Qwen3ForCausalLM", _QWEN, _QWEN_3),
    "seed_oss": Row(
        "SeedOssForCausalLM",
        (common, rope, biases),
        {**_HEADS, "attention_out_bias": has("blk.0.attn_output.bias")},
    ),
    "smollm3": Row(
        "SmolLM3ForCausalLM",
        (common, rope, biases),
        # Later files may say which step the layers without rotation have.
        {"no_rope_layer_interval": always(4), "use_sliding_window": always(False)},
    ),
    # -- Gemma
    "gemma": Row("GemmaForCausalLM", (google.gemma, rope)),
    "gemma2": Row("Gemma2ForCausalLM", (google.gemma2, rope)),
    "gemma3": Row("Gemma3ForCausalLM", (google.gemma3,)),
    "gemma3n": Row("Gemma3nForCausalLM", (google.gemma3n,)),
    "gemma4": Row("Gemma4ForCausalLM", (google.gemma4,)),
    # -- LayerNorm
    "command-r": Row(
        "CohereForCausalLM",
        (layer_normed("layer_norm_eps"), rope),
        {"logit_scale": "logit_scale", "use_qk_norm": has("blk.0.attn_q_norm.weight")},
    ),
    "cohere2": Row(
        "Cohere2ForCausalLM",
        (layer_normed("layer_norm_eps"), rope),
        {"logit_scale": "logit_scale", **_HEADS, **_WINDOW, "sliding_window_pattern": always(4)},
    ),
    "nemotron": Row(
        "NemotronForCausalLM",
        (layer_normed("norm_eps"), rope, biases, own.without_rms),
        {**_HEADS, "hidden_act": always("relu2")},
    ),
    "phi2": Row(
        "PhiForCausalLM",
        (layer_normed("layer_norm_eps"), rope),
        # The width that files say is not the MLP's in small models.
        {"intermediate_size": lambda entries: entries.rows("blk.0.ffn_up.weight"), "hidden_act": always("gelu_new")},
    ),
    "stablelm": Row(
        "StableLmForCausalLM",
        (layer_normed("layer_norm_eps"), rope),
        {
            "use_qkv_bias": _Q_BIAS,
            "use_parallel_residual": flag("use_parallel_residual"),
            "qk_layernorm": always(False),
        },
    ),
    "starcoder2": Row(
        "Starcoder2ForCausalLM",
        (layer_normed("norm_epsilon"), rope),
        {"use_bias": _Q_BIAS, **_NO_WINDOW, "hidden_act": always("gelu_pytorch_tanh")},
    ),
    # -- experts
    "afmoe": Row(
        "AfmoeForCausalLM",
        (common, rope, sigmoid_alone, chosen_experts("num_experts"), own.trinity),
        {**_HEADS, **_MOE_SIZE, **_WINDOW},
    ),
    "deepseek2": Row("DeepseekV3ForCausalLM", (common, deepseek)),
    "dots1": Row("Dots1ForCausalLM", (common, rope, sigmoid_experts), {**_QWEN_3, **_NO_WINDOW}),
    "ernie4_5-moe": Row("Ernie4_5_MoeForCausalLM", (common, rope, own.ernie_experts), _HEADS),
    "glm4moe": Row(
        "Glm4MoeForCausalLM",
        (common, rope, sigmoid_experts),
        {**_QWEN_3, "use_qk_norm": has("blk.0.attn_q_norm.weight")},
    ),
    "gpt-oss": Row(
        "GptOssForCausalLM", (common_normed_after, own.gpt_oss_rope, _LOCAL), {**_QWEN_3, **_WINDOW, **_SIZE}
    ),
    "llama4": Row("Llama4ForCausalLM", (common, rope, _LOCAL, own.llama4), _HEADS),
    "minimax-m2": Row("MiniMaxM2ForCausalLM", (common, rope, sigmoid_alone, _LOCAL), {**_HEADS, **_SIZE}),
    "olmoe": Row(
        "OlmoeForCausalLM",
        (common, rope, chosen_experts("num_experts")),
        {"norm_topk_prob": flag("expert_weights_norm")},
    ),
    "qwen2moe": Row("Qwen2MoeForCausalLM", (*_QWEN, softmax_experts(renormalised=False)), _SHARED),
    "qwen3moe": Row("Qwen3MoeForCausalLM", (*_QWEN, softmax_experts(renormalised=True)), _QWEN_3),
    "qwen3vlmoe": Row("Qwen3MoeForCausalLM", (*_QWEN, softmax_experts(renormalised=True)), _QWEN_3),
    # -- Granite
    "granite": Row(
        "GraniteForCausalLM", (common, rope, granite.multipliers, granite.dense), {"attention_bias": _Q_BIAS}
    ),
    "granitemoe": Row("GraniteMoeSharedForCausalLM", (common, rope, granite.multipliers, granite.experts)),
    "granitehybrid": Row("GraniteMoeHybridForCausalLM", (granite.hybrid,)),
    # -- states
    "falcon-h1": Row(
        "FalconH1ForCausalLM",
        (common, rope, recurrent.mamba),
        # Its multipliers are in the weights. Where states are normed, it is behind their gate.
        {
            **_QWEN_3,
            "mamba_d_ssm": "ssm.inner_size",
            "mamba_rms_norm": has("blk.0.ssm_norm.weight"),
            "mamba_norm_before_gate": always(False),
            "mlp_bias": _UP_BIAS,
            "projectors_bias": has("blk.0.ssm_out.bias"),
        },
    ),
    "jamba": Row("JambaForCausalLM", (recurrent.jamba,)),
    "lfm2": Row("Lfm2ForCausalLM", (recurrent.convolutions,), {"block_auto_adjust_ff_dim": always(False)}),
    "lfm2moe": Row("Lfm2MoeForCausalLM", (recurrent.convolutions, recurrent.lfm2_experts)),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "qwen3next": Row("Qwen3NextForCausalLM", _DELTA_EXPERTS, _SHARED),
    "qwen35": Row("Qwen3_5ForCausalLM", (recurrent.gated_delta,)),
    "qwen35moe": Row("Qwen3_5MoeForCausalLM", _DELTA_EXPERTS, _SHARED),
}
