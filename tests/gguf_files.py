# mypy: allow-untyped-calls
"""Checkpoints of transformers as GGUF files, written by the `gguf` package by its own table of tensor names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "GptOssForCausalLM": "gpt-oss",
}
_PAIRED = ("llama", "granite", "smollm3")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


def write_gguf(
    folder: Path,
    file: Path,
    *,
    kind: str | Mapping[str, str] = "F32",
    pre: str = "gpt-2",
    tokenizer: bool = True,
    parts: int = 1,
    rounded: bool = False,
    architecture: str = "",
) -> Path:
    """Write the checkpoint in `folder` as `file`: matrices as `kind`, all else in float32. Returns the first file.

    `kind` may be one for each part of a tensor's name, the last that fits. With `rounded` the folder gets the values that the
    file stands for. Kinds that `gguf` can't quantise to become random blocks. `architecture`: another with the same tensors.
    """
    config = _fields(folder)
    architecture = architecture or _ARCHITECTURES[config["architectures"][0]]
    options = {"split_max_tensors": -(-_num_tensors(folder, config, architecture) // parts)} if parts > 1 else {}
    writer = gguf.GGUFWriter(file, architecture, **options)
    writer.add_vocab_size(config["vocab_size"])
    _add_sizes(writer, config, architecture)
    if tokenizer:
        add_tokenizer(writer, folder, pre)
    kinds = {"": kind} if isinstance(kind, str) else kind
    values: dict[str, torch.Tensor] = {}
    for name, theirs, tensor in _converted(folder, config, architecture):
        wanted = (
            [kinds[part] for part in kinds if part in name][-1]
            if tensor.dim() > 1 and not name.endswith(".bias")
            else "F32"
        )
        stored = gguf.GGMLQuantizationType[wanted if tensor.shape[-1] % 32 == 0 else "F32"]
        data = blocks_of(tensor.float().numpy(), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
        if rounded and theirs:
            plain = torch.from_numpy(gguf.dequantize(data, stored)).view(tensor.shape)
            values |= _as_ours(theirs, plain, config, architecture)
    if rounded:
        save_file(_with_halves_together(values, config), folder / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if parts == 1 else sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))[0]


def _fields(folder: Path) -> dict[str, Any]:
    """Of config.json, where gpt-oss has another name for an expert's width."""
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
    own = {"moe_intermediate_size": fields["intermediate_size"]} if _is_gpt_oss(fields) else {}
    return fields | own


def _is_gpt_oss(config: Mapping[str, Any]) -> bool:
    return bool(config["architectures"] == ["GptOssForCausalLM"])


def changed(file: Path, target: Path, **entries: Any) -> Path:
    """The same file with other entries of its metadata; None takes one away."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(target, "")
    writer.kv_data[0].clear()
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    for name, value in (fields | {name.replace("__", "."): value for name, value in entries.items()}).items():
        if value is not None:
            kind = reader.fields[name].types[0] if name in reader.fields else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(name, value, kind, _inner(reader, name))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def as_floats(file: Path, target: Path) -> Path:
    """The same file with the numbers that its blocks stand for."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(target, "")
    writer.kv_data[0].clear()
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], _inner(reader, name))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _inner(reader: gguf.GGUFReader, name: str) -> Any:
    types = reader.fields[name].types if name in reader.fields else []
    return types[1] if len(types) > 1 else None


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    """What llama.cpp's converter says of a tokenizer.json."""
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    built = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = built.get_added_tokens_decoder()
    size = max(built.get_vocab().values()) + 1
    tokens = [built.id_to_token(index) or f"[PAD{index}]" for index in range(size)]
    types = [_type(index, text, added, described["model"]) for index, text in enumerate(tokens)]
    is_llama = described["model"].get("byte_fallback", False)
    writer.add_tokenizer_model(pre if pre == "gemma4" else "llama" if is_llama else "gpt2")
    writer.add_tokenizer_pre("default" if is_llama else pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    if is_llama:
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix("Prepend" in json.dumps(described["normalizer"]))
    if not is_llama or pre == "gemma4":
        writer.add_token_merges(merges)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for name, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        if settings.get(name):
            add(tokens.index(settings[name]))
    writer.add_add_bos_token(bool(built.encode("").ids))
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    if text:
        writer.add_chat_template(text)


def _type(index: int, text: str, added: Mapping[int, Any], model: Mapping[str, Any]) -> int:
    if text == model.get("unk_token"):
        return _UNKNOWN
    if index in added:
        return _CONTROL if added[index].special else _USER_DEFINED
    return _BYTE if model.get("byte_fallback") and text.startswith("<0x") and len(text) == 6 else _NORMAL


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """As SentencePiece has them for pieces that were merged in this order."""
    made = {merge.replace(" ", "", 1): -float(rank) for rank, merge in enumerate(merges)}
    return [made.get(token, -1e6) for token in tokens]


def _num_tensors(folder: Path, config: Mapping[str, Any], architecture: str) -> int:
    return sum(1 for _ in _converted(folder, config, architecture))


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any], architecture: str) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(_mlp_size(config))
    writer.add_head_count(heads)
    kv_heads = config.get("num_key_value_heads") or heads
    if architecture.startswith("lfm2"):
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in config["layer_types"]]
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if architecture == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.get("rope_parameters") or {}
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if architecture == "olmo2" and "layer_types" in config:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if "vl" in architecture:
        writer.add_rope_dimension_sections([head_dim // 4, head_dim // 8, head_dim // 8, 0])
        writer.add_num_deepstack_layers(3)
    if architecture in ("llama", "phi3", "granite"):
        share = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1
        writer.add_rope_dimension_count(int(head_dim * share))
    _add_rope(writer, config, rope)
    for name, add in (
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if config.get(name):
            add(config[name])
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)


def _mlp_size(config: Mapping[str, Any]) -> int:
    """The width that LFM2's layers have, if the field is not it."""
    size = int(config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim"):
        return size
    multiple, factor = config["block_multiple_of"], config["block_ffn_dim_multiplier"]
    return int(-(-int(factor * int(2 * size / 3)) // multiple) * multiple)


def _add_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(_original(config, rope))
    if kind == "longrope":
        scale = config["max_position_embeddings"] / _original(config, rope)
        magnitude = math.sqrt(1 + math.log(scale) / math.log(_original(config, rope))) if scale > 1 else 1.0
        writer.add_rope_scaling_attn_factors(magnitude)


def _original(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    return int(config.get("original_max_position_embeddings") or rope["original_max_position_embeddings"])


def _known(name: str) -> str:
    """As `gguf` looks for it."""
    kind = {"expert_bias": ".bias", "sinks": ".weight"}.get(name.rpartition(".")[2], "")
    return name + kind


def _converted(folder: Path, config: Mapping[str, Any], architecture: str) -> list[tuple[str, str, torch.Tensor]]:
    """What the file holds, by the names of the `gguf` package and of the checkpoint."""
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    if config.get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    found: list[tuple[str, str, torch.Tensor]] = []
    for name, tensor in _with_experts_together(_with_halves_apart(stored)).items():
        ours = names.get_name(_known(name), try_suffixes=(".weight", ".bias"))
        if ours is None:
            raise ValueError(f"gguf knows no {name}")
        found.append((ours, name, _as_stored(name, tensor, config, architecture)))
    return found + [(name, "", tensor) for name, tensor in _rope_factors(config)]


def _as_stored(name: str, tensor: torch.Tensor, config: Mapping[str, Any], architecture: str) -> torch.Tensor:
    if architecture in _PAIRED and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor.float() + 1
    return tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor


def _as_ours(name: str, tensor: torch.Tensor, config: Mapping[str, Any], architecture: str) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors of one that was converted."""
    if architecture in _PAIRED and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
        return {name: pairs.swapaxes(1, 2).reshape(tensor.shape).contiguous()}
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return {name: tensor - 1}
    if ".experts." in name:
        before, _, matrix = name.partition(".experts.")
        return {f"{before}.experts.{expert}.{matrix}": own.clone() for expert, own in enumerate(tensor)}
    return {name: tensor}


def blocks_of(array: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    try:
        return gguf.quantize(array, kind)
    except NotImplementedError:
        return _random_blocks(array, kind)


# Where the factors of a block are, and how large they are beside its values.
_FACTORS = {
    "Q2_K": ((80, 1 / 12), (82, 1 / 8)),
    "Q3_K": ((108, 1 / 42),),
    "Q4_K": ((0, 1 / 145), (2, 1 / 19.3)),
    "Q5_K": ((0, 1 / 290), (2, 1 / 18.7)),
    "Q6_K": ((208, 1 / 1330),),
    "IQ4_XS": ((0, 1 / 1200),),
    "IQ4_NL": ((0, 1 / 72),),
    "IQ2_XS": ((0, 1 / 55),),
    "IQ3_S": ((0, 1 / 150),),
}


def _random_blocks(array: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Any codes, with factors that give values about as large as these."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(array.size)
    blocks = random.integers(0, 256, (array.size // elements, size), dtype=np.uint8)
    for at, factor in _FACTORS[kind.name]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(array.std() * factor).tobytes(), dtype=np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)


def _with_halves_apart(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss's experts, all in one tensor whose columns alternate, as if each had its own."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        before, marker, matrix = name.partition(".experts.")
        if matrix not in _OF_GPT_OSS:
            found[name] = tensor
            continue
        kind = "bias" if matrix.endswith("_bias") else "weight"
        rows = tensor if kind == "bias" else tensor.transpose(1, 2)
        halves = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if "gate_up" in matrix else {"down": rows}
        for half, own in halves.items():
            found |= {f"{before}{marker}{i}.{half}_proj.{kind}": one.contiguous() for i, one in enumerate(own)}
    return found


def _with_halves_together(values: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The other way around."""
    if not _is_gpt_oss(config):
        return dict(values)
    found = {name: tensor for name, tensor in values.items() if ".experts." not in name}
    for before in {name.partition(".experts.")[0] for name in values.keys() - found.keys()}:
        for kind, ending in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                torch.stack(
                    [values[f"{before}.experts.{i}.{half}_proj.{kind}"] for i in range(config["num_local_experts"])]
                )
                for half in ("gate", "up", "down")
            )
            both = torch.stack((gate, up), dim=2).flatten(1, 2)
            for name, tensor in (("gate_up", both), ("down", down)):
                turned = tensor if ending else tensor.transpose(1, 2)
                found[f"{before}.experts.{name}_proj{ending}"] = turned.contiguous()
    return found


_OF_GPT_OSS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def _with_experts_together(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    together: dict[str, list[torch.Tensor]] = {}
    rest: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        before, marker, after = name.partition(".experts.")
        if marker:
            _, _, matrix = after.partition(".")
            together.setdefault(f"{before}.experts.{matrix}".replace("block_sparse_moe", "feed_forward"), []).append(
                tensor
            )
        else:
            rest[name] = tensor
    return rest | {_plain(name): torch.stack(tensors) for name, tensors in together.items()}


def _plain(name: str) -> str:
    """As the table spells the experts of Mixtral."""
    return name.removeprefix("model.") if "feed_forward" in name else name


def _rope_factors(config: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return [(f"rope_factors_{name}.weight", torch.tensor(rope[f"{name}_factor"])) for name in ("long", "short")]
    if rope.get("rope_type") != "llama3":
        return []
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    turns = rope["rope_theta"] ** (np.arange(0, dim, 2) / dim) * 2 * math.pi  # wavelengths
    old, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((old / turns - low) / (high - low)).clip(0, 1)
    return [("rope_freqs.weight", torch.tensor(1 / ((1 - smooth) / factor + smooth), dtype=torch.float32))]
