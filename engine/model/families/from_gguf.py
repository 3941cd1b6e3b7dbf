"""The metadata of a GGUF file as the fields of a config.json, so that families read both alike.

What nobody here reads and nobody knows to be harmless is refused, as fields of a config.json are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.model.gguf import GgufHeader, read_header
from engine.model.spec import UnsupportedModelError

Config = dict[str, Any]
_MAX_FACTORS = 1 << 12
_MAX_LAYERS = 1 << 12  # families refuse more
# They say what other fields say, or nothing about the arithmetic.
_HARMLESS = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "attention.value_length", "pooling_type"}
_HARMLESS |= {"rope.scaling.yarn_log_multiplier"}
# Of images: the three positions of text are one, and it has no features of other layers.
_HARMLESS |= {"rope.dimension_sections", "n_deepstack_layers"}
_ROPE_FREQUENCIES = "rope_freqs.weight"
_LAYERS_OF_GEMMA_2_27B, _LAYERS_OF_GEMMA_3_27B = 46, 62
_LAYERS_TO_NO_ROPE_OF_SMOLLM3 = 4
_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func


def config_of(file: Path) -> Config:
    """Raises UnsupportedModelError, naming the entry; GgufError; OSError."""
    return config_of_header(read_header(file))


def config_of_header(header: GgufHeader) -> Config:
    """Raises as `config_of`."""
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.file}: general.architecture = {architecture!r:.40} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )
    entries = _Entries(header, architecture)
    try:
        config = _ARCHITECTURES[architecture](entries)
    except UnsupportedModelError:
        raise
    except (TypeError, ValueError, ArithmeticError, struct.error) as error:  # a value of another type
        raise entries.unsupported(entries.newest) from error
    entries.check_all_read()
    return config


class _Entries:
    """The metadata of one architecture, and which of them were read."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._header, self._beginning = header, f"{architecture}."
        self._read: set[str] = set()
        self.newest = ""  # was read last

    def get(self, name: str, default: Any = None) -> Any:
        """A value; one for all layers where each has the same."""
        self._read.add(name)
        self.newest = name
        value = self._header.metadata.get(self._beginning + name, default)
        if isinstance(value, list):
            if not value or any(each != value[0] for each in value):
                raise self.unsupported(name)
            return value[0]
        return value

    def of_layers(self, name: str) -> list[Any]:
        """Each layer's value."""
        self._read.add(name)
        self.newest = name
        value = self._header.metadata.get(self._beginning + name)
        if not isinstance(value, list) or len(value) != self["block_count"]:
            raise self.unsupported(name)
        return value

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise UnsupportedModelError(f"{self._header.file}: {self._beginning}{name} is missing")
        return value

    def number(self, name: str) -> int:
        value = self[name]
        if type(value) is not int:
            raise self.unsupported(name)
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self._header.tensors

    def rows(self, tensor: str) -> int:
        if tensor not in self._header.tensors:
            raise UnsupportedModelError(f"{self._header.file}: there is no tensor {tensor}")
        return self._header.tensors[tensor].shape[0]

    def columns(self, tensor: str) -> int:
        self.rows(tensor)
        return self._header.tensors[tensor].shape[-1]

    def floats(self, tensor: str) -> list[float]:
        """A short tensor's values."""
        found = self._header.tensors[tensor]
        count = found.shape[0]
        if found.kind != "F32" or len(found.shape) != 1 or count > _MAX_FACTORS:
            raise UnsupportedModelError(f"{found.file}: {tensor} is no list of up to {_MAX_FACTORS} F32")
        with found.file.open("rb") as opened:
            opened.seek(found.begin)
            return list(struct.unpack(f"<{count}f", opened.read(found.end - found.begin)))

    def dtype(self) -> str:
        """What most weights are stored in, where that can be computed in."""
        sizes: dict[str, int] = {}
        for tensor in self._header.tensors.values():
            if len(tensor.shape) > 1:
                sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.end - tensor.begin
        most = max(sizes, key=lambda kind: sizes[kind], default="")
        return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")

    def agree(self, name: str, does: bool) -> None:
        """Raise UnsupportedModelError for a size that is not that of the tensors."""
        if not does:
            value = self._header.metadata.get(self._beginning + name)
            raise UnsupportedModelError(
                f"{self._header.file}: {self._beginning}{name} = {value!r:.40}, but the file's tensors say otherwise"
            )

    def unsupported(self, name: str) -> UnsupportedModelError:
        value = self._header.metadata.get(self._beginning + name)
        return UnsupportedModelError(
            f"{self._header.file}: {self._beginning}{name} = {str(value)[:40]} is not supported"
        )

    def check_all_read(self) -> None:
        for key, value in self._header.metadata.items():
            name = key.removeprefix(self._beginning)
            if name != key and value and name not in self._read | _HARMLESS:
                raise self.unsupported(name)


def _common(entries: _Entries, architecture: str, *, kv_heads: int | None = None, norm: str = "attn_norm") -> Config:
    """What nearly all have; `kv_heads`: where layers differ in it; `norm`: a tensor of each layer.

    Sizes that nothing of is there would take memory before a tensor is looked at.
    """
    entries.agree("embedding_length", entries.columns("token_embd.weight") == entries["embedding_length"])
    entries.agree("block_count", entries.has(f"blk.{entries.number('block_count') - 1}.{norm}.weight"))
    return {
        "architectures": [architecture],
        "dtype": entries.dtype(),
        "vocab_size": entries.rows("token_embd.weight"),
        "hidden_size": entries["embedding_length"],
        "intermediate_size": entries["feed_forward_length"],
        "num_hidden_layers": entries["block_count"],
        "num_attention_heads": entries["attention.head_count"],
        "num_key_value_heads": kv_heads or entries.get("attention.head_count_kv") or entries["attention.head_count"],
        "max_position_embeddings": entries["context_length"],
        "rms_norm_eps": entries["attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": not entries.has("output.weight"),
    }


def _head_dim(entries: _Entries) -> int:
    return entries.get("attention.key_length") or entries.number("embedding_length") // entries.number(
        "attention.head_count"
    )


def _rope(entries: _Entries, *, theta: float = 10_000.0) -> Config:
    """The rotation. Factors that a tensor has are LongRoPE's of any length."""
    values: Config = {"rope_theta": float(entries.get("rope.freq_base", theta))}
    share = entries.get("rope.dimension_count", _head_dim(entries)) / _head_dim(entries)
    if share != 1:
        values["partial_rotary_factor"] = share
    kind = entries.get("rope.scaling.type", "none")
    factor = entries.get("rope.scaling.factor") or entries.get("rope.scale_linear")
    original = entries.get("rope.scaling.original_context_length")
    magnitude = entries.get("rope.scaling.attn_factor")
    if entries.has("rope_factors_long.weight"):
        factors = {f"{length}_factor": entries.floats(f"rope_factors_{length}.weight") for length in ("short", "long")}
        values |= {"rope_type": "longrope", "original_max_position_embeddings": original} | factors
    elif entries.has(_ROPE_FREQUENCIES):
        divisors = entries.floats(_ROPE_FREQUENCIES)
        values |= {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors}
        values |= {"original_max_position_embeddings": entries["context_length"], "attention_factor": 1.0}
    elif kind == "yarn":
        values |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            values |= {name: given} if (given := entries.get(f"rope.scaling.{key}")) else {}
    elif kind == "linear" and factor:
        values |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear", "longrope") or (kind == "none" and factor not in (None, 0, 1)):
        raise entries.unsupported("rope.scaling.type")
    if magnitude is not None:
        values["attention_factor"] = magnitude
    return {"rope_parameters": values}


def _llama(entries: _Entries) -> Config:
    config = _common(entries, "LlamaForCausalLM") | _rope(entries) | {"head_dim": _head_dim(entries)}
    if experts := entries.get("expert_count"):
        config |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": experts}
        return config | {"num_experts_per_tok": entries["expert_used_count"]}
    biases = {"attention_bias": entries.has("blk.0.attn_q.bias"), "mlp_bias": entries.has("blk.0.ffn_up.bias")}
    return config | biases


def _smollm_3(entries: _Entries) -> Config:
    """Every fourth layer has no rotation. Later files may say which step that is."""
    biases = {"attention_bias": entries.has("blk.0.attn_q.bias"), "mlp_bias": entries.has("blk.0.ffn_up.bias")}
    config = _common(entries, "SmolLM3ForCausalLM") | _rope(entries) | biases
    return config | {"no_rope_layer_interval": _LAYERS_TO_NO_ROPE_OF_SMOLLM3, "use_sliding_window": False}


def _olmo_2(entries: _Entries) -> Config:
    """Norms stand behind both halves; OLMo 3 has windows too."""
    config = _common(entries, "Olmo2ForCausalLM", norm="post_attention_norm") | _rope(entries)
    config |= {"attention_bias": entries.has("blk.0.attn_q.bias")}
    window = entries.get("attention.sliding_window")
    if not window:
        return config
    windowed = entries.of_layers("attention.sliding_window_pattern")
    full, theta = config.pop("rope_parameters"), float(entries.get("rope.freq_base", 10_000.0))
    sliding = {"rope_type": "default", "rope_theta": float(entries.get("rope.freq_base_swa", theta))}
    return config | {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": ["sliding_attention" if there else "full_attention" for there in windowed],
        "rope_parameters": {"full_attention": {"rope_type": "default"} | full, "sliding_attention": sliding},
    }


def _qwen_2(entries: _Entries) -> Config:
    return _common(entries, "Qwen2ForCausalLM") | _rope(entries) | _full_attention(entries)


def _qwen_3(entries: _Entries) -> Config:
    own = {"head_dim": _head_dim(entries), "attention_bias": entries.has("blk.0.attn_q.bias")}
    return _common(entries, "Qwen3ForCausalLM") | _rope(entries) | own | _full_attention(entries)


def _qwen_2_moe(entries: _Entries) -> Config:
    own = {"shared_expert_intermediate_size": entries["expert_shared_feed_forward_length"]}
    config = _common(entries, "Qwen2MoeForCausalLM") | _rope(entries) | own | _full_attention(entries)
    return config | _experts(entries, renormalised=False)


def _qwen_3_moe(entries: _Entries) -> Config:
    own = {"head_dim": _head_dim(entries), "attention_bias": entries.has("blk.0.attn_q.bias")}
    config = _common(entries, "Qwen3MoeForCausalLM") | _rope(entries) | own | _full_attention(entries)
    return config | _experts(entries, renormalised=True)


def _experts(entries: _Entries, *, renormalised: bool) -> Config:
    """Of a mixture whose router's softmax is over all experts."""
    if entries.get("expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise entries.unsupported("expert_gating_func")
    if entries.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise entries.unsupported("expert_weights_scale")
    layers = range(min(entries.number("block_count"), _MAX_LAYERS))
    return {
        "num_experts": entries["expert_count"],
        "num_experts_per_tok": entries["expert_used_count"],
        "moe_intermediate_size": entries["expert_feed_forward_length"],
        "norm_topk_prob": bool(entries.get("expert_weights_norm", renormalised)),
        "mlp_only_layers": [layer for layer in layers if not entries.has(f"blk.{layer}.ffn_gate_inp.weight")],
    }


def _full_attention(entries: _Entries) -> Config:
    """Qwen's windows are never used by such files."""
    entries.get("attention.sliding_window")
    return {"use_sliding_window": False}


def _gemma(entries: _Entries) -> Config:
    return _of_gemma(entries, "GemmaForCausalLM") | _rope(entries)


def _gemma_2(entries: _Entries) -> Config:
    soft_caps = {"attn_logit_softcapping": entries["attn_logit_softcapping"]}
    return _with_windows(entries, "Gemma2ForCausalLM", _LAYERS_OF_GEMMA_2_27B) | soft_caps | _rope(entries)


def _gemma_3(entries: _Entries) -> Config:
    entries.get("attn_logit_softcapping")
    local = {"rope_local_base_freq": float(entries.get("rope.freq_base_swa", 10_000.0))}
    period = {"sliding_window_pattern": entries.get("attention.sliding_window_pattern", 6)}
    config = _with_windows(entries, "Gemma3ForCausalLM", _LAYERS_OF_GEMMA_3_27B) | local | period
    rotation = _rope(entries, theta=1_000_000.0)["rope_parameters"]
    if "rope_type" not in rotation:
        return config | {"rope_theta": rotation["rope_theta"]}
    scaling = {name: value for name, value in rotation.items() if name != "rope_theta"}
    return config | {"rope_theta": rotation["rope_theta"], "rope_scaling": scaling}


def _of_gemma(entries: _Entries, architecture: str) -> Config:
    config = _common(entries, architecture) | {"head_dim": _head_dim(entries)}
    return config | {"dtype": {"float16": "bfloat16"}.get(config["dtype"], config["dtype"])}


def _with_windows(entries: _Entries, architecture: str, layers_of_the_largest: int) -> Config:
    """The largest model of a generation divides scores by another size than a head's, which no entry says."""
    config = _of_gemma(entries, architecture)
    is_largest = config["num_hidden_layers"] == layers_of_the_largest
    scale = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    config |= {"query_pre_attn_scalar": scale, "sliding_window": entries["attention.sliding_window"]}
    return config | {"final_logit_softcapping": entries.get("final_logit_softcapping")}


def _phi_3(entries: _Entries) -> Config:
    config = _common(entries, "Phi3ForCausalLM") | _rope(entries)
    config["sliding_window"] = entries.get("attention.sliding_window") or None
    if original := entries.get("rope.scaling.original_context_length"):
        config["original_max_position_embeddings"] = original
    return config


def _granite(entries: _Entries) -> Config:
    scales = {
        "attention_multiplier": entries["attention.scale"],
        "embedding_multiplier": entries.get("embedding_scale", 1.0),
        "residual_multiplier": entries.get("residual_scale", 1.0),
        "logits_scaling": entries.get("logit_scale", 1.0),
        "attention_bias": entries.has("blk.0.attn_q.bias"),
    }
    return _common(entries, "GraniteForCausalLM") | _rope(entries) | scales


def _lfm_2(entries: _Entries) -> Config:
    return _with_convolutions(entries, "Lfm2ForCausalLM") | {"block_auto_adjust_ff_dim": False}


def _lfm_2_moe(entries: _Entries) -> Config:
    if entries["expert_gating_func"] != _SIGMOID:
        raise entries.unsupported("expert_gating_func")
    num_dense = entries.number("leading_dense_block_count")
    own = {
        "num_dense_layers": num_dense,
        "num_experts": entries["expert_count"],
        "num_experts_per_tok": entries["expert_used_count"],
        "moe_intermediate_size": entries["expert_feed_forward_length"],
        "norm_topk_prob": bool(entries.get("expert_weights_norm", True)),
        "routed_scaling_factor": entries.get("expert_weights_scale") or 1.0,
        "use_expert_bias": entries.has(f"blk.{num_dense}.exp_probs_b.bias"),
    }
    return _with_convolutions(entries, "Lfm2MoeForCausalLM") | own


def _with_convolutions(entries: _Entries, architecture: str) -> Config:
    """Layers without heads of keys and values are convolutions."""
    heads = entries.of_layers("attention.head_count_kv")
    if len(set(heads) - {0}) != 1:
        raise entries.unsupported("attention.head_count_kv")
    config = _common(entries, architecture, kv_heads=max(heads)) | _rope(entries, theta=1_000_000.0)
    config["norm_eps"] = config.pop("rms_norm_eps")
    kinds = ["full_attention" if there else "conv" for there in heads]
    return config | {"layer_types": kinds, "conv_L_cache": entries["shortconv.l_cache"], "head_dim": _head_dim(entries)}


_ARCHITECTURES: dict[str, Callable[[_Entries], Config]] = {
    "llama": _llama,
    "smollm3": _smollm_3,
    "olmo2": _olmo_2,
    "qwen2": _qwen_2,
    "qwen2vl": _qwen_2,
    "qwen2moe": _qwen_2_moe,
    "qwen3": _qwen_3,
    "qwen3vl": _qwen_3,
    "qwen3moe": _qwen_3_moe,
    "qwen3vlmoe": _qwen_3_moe,
    "gemma": _gemma,
    "gemma2": _gemma_2,
    "gemma3": _gemma_3,
    "phi3": _phi_3,
    "granite": _granite,
    "lfm2": _lfm_2,
    "lfm2moe": _lfm_2_moe,
}
