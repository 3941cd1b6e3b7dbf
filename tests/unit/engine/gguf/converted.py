# mypy: allow-untyped-calls
"""Checkpoints as llama.cpp's converter writes them. Its metadata and shapes are in converted.jsonl.

Each line is what the converter of llama-cpp-python 0.3.36 wrote of a case's folder, without vocabulary. What it does to
weights is said here a second time: both gave the same tensors, bit for bit, on 2026-11-23.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from tests.gguf_files import blocks_of
from tests.unit.engine.families.exact import prompt_of
from tests.unit.engine.generate import Generator, new_sequence

_LINES = Path(__file__).with_name("converted.jsonl")
_PAIRED = ("llama", "granite", "granitemoe", "granitehybrid", "nemotron_h", "nemotron_h_moe", "arcee", "mistral3")
_DELTA = ("qwen3next", "qwen35", "qwen35moe")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_LAYER = re.compile(r"layers\.(\d+)\.")
# Names that the package's table lacks, or has for others.
_NAMES = {
    "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "router.scale": "ffn_gate_inp.scale",
    "layer_scalar": "layer_output_scale.weight",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
_BLOCK = {kind.name: elements for kind, (elements, _) in gguf.GGML_QUANT_SIZES.items()}
Tensors = dict[str, torch.Tensor]


def answer(model: Path) -> tuple[list[int], list[float]]:
    """Eight tokens, and the logprobs of the likeliest twenty of each."""
    engine = Engine(EngineConfig(model=model, dtype="float32", cache=CacheConfig(num_blocks=64)))
    generator = Generator(engine, chunk_size=23)
    (tokens,) = generator.run([new_sequence("one", prompt_of(40), max_tokens=8, logprobs=20)])
    found = [sampled.logprobs for sampled in generator.results["one"] if sampled is not None]
    return tokens, [value for each in found if each is not None for value in each.top_logprobs]


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """By the cases' names: architecture, metadata and the tensors' shapes."""
    lines = (json.loads(line) for line in _LINES.read_text(encoding="utf-8").splitlines())
    return {line["case"]: line for line in lines}


def write_converted(
    folder: Path, file: Path, case: str, *, kind: str | Mapping[str, str] = "F32", narrow: str = "F32"
) -> Path:
    """Write the folder's weights as the converter did, matrices as `kind`, or `narrow` where a row is no whole blocks of it.

    `kind` may be one for each part of a tensor's name, the last that fits.
    Raises AssertionError where names differ from the recorded ones.
    """
    kinds = {"": kind} if isinstance(kind, str) else kind
    line = recorded()[case]
    writer = gguf.GGUFWriter(file, line["architecture"])
    for name, value in line["metadata"].items():
        _add(writer, f"{line['architecture']}.{name}", value)
    tensors = converted(folder, line["architecture"])
    shapes: Mapping[str, list[int]] = line["tensors"]
    assert tensors.keys() == shapes.keys(), sorted(tensors.keys() ^ shapes.keys())
    for name, shape in shapes.items():
        wanted = [kinds[part] for part in kinds if part in name][-1] if len(shape) > 1 else "F32"
        fitting = (each for each in (wanted, narrow) if shape[-1] % _BLOCK.get(each, 1) == 0)
        stored = gguf.GGMLQuantizationType[next(fitting, "F32")]
        array = tensors[name].float().contiguous().view(shape).numpy()
        writer.add_tensor(name, blocks_of(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    kinds = {str: "STRING", bool: "BOOL", float: "FLOAT32", int: "INT32"}
    kind = gguf.GGUFValueType[kinds[type(value[0] if isinstance(value, list) else value)]]
    if isinstance(value, list):
        writer.add_key_value(name, value, gguf.GGUFValueType.ARRAY, kind)
    else:
        writer.add_key_value(name, value, kind)


def converted(folder: Path, architecture: str) -> Tensors:
    """The folder's tensors by the file's names."""
    config = json.loads((folder / "config.json").read_text())
    config |= config.get("text_config") or {}
    stored: Tensors = {}
    for part in sorted(folder.glob("*.safetensors")):
        stored |= load_file(part)
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.get("num_hidden_layers") or len(config["layers_block_type"]))
    found: Tensors = {}
    for name, tensor in _together(stored, config):
        for theirs, changed in _changed(name, tensor, config, architecture):
            known = next((theirs.replace(part, ours) for part, ours in _NAMES.items() if part in theirs), theirs)
            layer = _LAYER.search(known)
            if known != theirs and layer is not None:
                ours: str | None = f"blk.{layer[1]}.{known.rpartition(f'layers.{layer[1]}.')[2]}"
            else:
                ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            assert ours is not None, f"gguf knows no {theirs}"
            has_kind = not architecture.startswith("gemma") or ours.endswith((".weight", ".bias", ".scale"))
            found[ours if has_kind else f"{ours}.weight"] = changed
    return found | _beside(stored, config, architecture)


def _beside(stored: Tensors, config: Mapping[str, Any], architecture: str) -> Tensors:
    """Tensors of several, and what Gemma 4's rotation leaves."""
    found: Tensors = {}
    if architecture == "gemma3n":
        for name, theirs in (("altup_proj", "altup_projections"), ("altup_unembd_proj", "altup_unembed_projections")):
            found[f"{name}.weight"] = torch.stack([stored[f"model.{theirs}.{index}.weight"] for index in range(3)])
    if architecture == "gemma4":
        full = config["rope_parameters"]["full_attention"]
        half = max(len(tensor) for name, tensor in stored.items() if "k_norm" in name) // 2
        rotated = int(half * full["partial_rotary_factor"])
        found["rope_freqs.weight"] = torch.tensor([1.0] * rotated + [1e30] * (half - rotated))
    return found


def _together(stored: Tensors, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts of a layer are one tensor; gates and ups are two. A tied head is no tensor."""
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sorted(
        stored.items(), key=lambda item: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", item[0])]
    ):
        found = _EXPERT.fullmatch(name)
        if "altup_projections" in name or "altup_unembed" in name:
            continue
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if found is not None:
            experts.setdefault(f"{found[1]}.{found[3]}", []).append(tensor)
        else:
            yield name, tensor
    for name, tensors in experts.items():
        yield name.replace("backbone.", "model.").replace("mixer.experts", "mlp.experts"), torch.stack(tensors)


def _in_order(item: tuple[str, torch.Tensor]) -> list[tuple[int, str]]:
    """By names, numbers in them by their size."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", item[0])]


def _changed(
    name: str, tensor: torch.Tensor, config: Mapping[str, Any], architecture: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """What becomes of one tensor."""
    if name.endswith("_linear.weight"):
        yield from _halves(name, tensor, config)
        return
    if name.endswith("kv_b_proj.weight"):
        keys, values = config["qk_nope_head_dim"], config["v_head_dim"]
        both = tensor.unflatten(0, (-1, keys + values))
        yield name.replace("kv_b_proj", "k_b_proj"), both[:, :keys].transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), both[:, keys:]
        return
    if architecture in _DELTA:
        name, tensor = name.replace("model.language_model.", "model."), _delta(name, tensor, config, architecture)
    if architecture == "llama4" and ".experts." in name:
        transposed = tensor.transpose(1, 2)
        halves = transposed.chunk(2, dim=1) if "gate_up" in name else (transposed,)
        for kind, part in zip(("gate", "up") if "gate_up" in name else ("down",), halves, strict=True):
            yield f"{name.rpartition('.')[0]}.{kind}_proj.weight", part
        return
    if architecture == "nemotron" and name.endswith("norm.weight"):
        tensor = tensor.float() + 1
    if "in_proj_qkvz" in name:
        yield from _by_kind(name, tensor, config)
        return
    if architecture == "falcon-h1":
        tensor = _multiplied(name, tensor, config)
    for ending, theirs, change in _CHANGES:
        if name.endswith(ending):
            yield name.removesuffix(ending) + theirs, change(tensor)
            return
    if architecture in _PAIRED and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    yield name, tensor


def _delta(name: str, tensor: torch.Tensor, config: Mapping[str, Any], architecture: str) -> torch.Tensor:
    """Norms hold 1 more. Qwen3.5's value heads: the first of each key head's, then the second."""
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return tensor.float() + 1
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    first = 2 * keys * config["linear_key_head_dim"]

    def in_turn(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten(0, 2)

    if architecture == "qwen3next" or "linear_attn" not in name or "linear_attn.norm" in name:
        return tensor
    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat((tensor[:first], in_turn(tensor[first:])))
    return in_turn(tensor.t()).t() if "out_proj" in name else in_turn(tensor)


def _by_kind(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Qwen3-Next: of each key head queries, keys, values and gates; then all queries, all keys and so on."""
    keys, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    q, k, v, z = (each.flatten(0, 1) for each in tensor.unflatten(0, (keys, -1)).split((key, key, value, value), dim=1))
    yield name.replace("in_proj_qkvz", "in_proj_qkv"), torch.cat((q, k, v))
    yield name.replace("in_proj_qkvz", "in_proj_z"), z


def _multiplied(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Falcon-H1's multipliers go into its weights."""
    gate, down = config["mlp_multipliers"]
    into = config["attention_in_multiplier"]
    for part, factor in (
        ("down_proj", down),
        ("gate_proj", gate),
        ("k_proj", config["key_multiplier"] * into),
        ("q_proj", into),
        ("v_proj", into),
        ("o_proj", config["attention_out_multiplier"]),
        ("out_proj", config["ssm_out_multiplier"]),
        ("lm_head", config["lm_head_multiplier"]),
        ("embed_tokens", config["embedding_multiplier"]),
    ):
        if part in name:
            return tensor * factor
    if "in_proj" not in name:
        return tensor
    size, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    parts = (tensor * config["ssm_in_multiplier"]).split((size, size, keys, keys, config["mamba_n_heads"]))
    return torch.cat([part * factor for part, factor in zip(parts, config["ssm_multipliers"], strict=True)])


_CHANGES: tuple[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (".A_log", ".A_log", lambda tensor: -tensor.exp()),
    (".expert_bias", ".expert_bias.bias", lambda tensor: tensor),
    (".dt_bias", ".dt_proj.bias", lambda tensor: tensor),
    ("e_score_correction_bias", "e_score_correction.bias", lambda tensor: tensor),
)


def _halves(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Granite's experts and shared expert, which is the MLP where there are no experts."""
    before = name.rpartition(".block_sparse_moe.")[0] or name.rpartition(".shared_mlp.")[0]
    is_shared = "shared_mlp" in name
    kind = "mlp.experts"
    if is_shared:
        kind = "mlp.shared_experts" if config.get("num_local_experts") else "mlp"
    if "output_linear" in name:
        yield f"{before}.{kind}.down_proj.weight", tensor
        return
    gate, up = tensor.chunk(2, dim=-2)
    yield f"{before}.{kind}.gate_proj.weight", gate
    yield f"{before}.{kind}.up_proj.weight", up
