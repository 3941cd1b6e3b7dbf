"""Checkpoints of real shapes with random weights, in Hugging Face's format: for speed and for agreement, not for sense.

python -m benchmarks.weights.checkpoint /tmp/llama8b llama-3.1-8b
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
NOISE_ELEMENTS = 512 << 20  # then the noise repeats; more than the largest matrix has
STD = 0.02

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN_500M: dict[str, Any] = {  # Qwen2.5 0.5B: heads of 64, tied, no powers of two
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}
_SMALL = {"num_hidden_layers": 2, "vocab_size": 32_000, "bos_token_id": 1, "eos_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA_8B | {"bos_token_id": 128_000, "eos_token_id": 128_001},
    "llama-small": _LLAMA_8B | _SMALL,
    "mistral-small": {  # Mistral 7B v0.1
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "sliding_window": 256,  # not 4096, to be reached by short prompts
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    }
    | _SMALL,
    "qwen2-small": _QWEN_500M | _SMALL,
    "qwen2.5-0.5b": _QWEN_500M
    | {"vocab_size": 151_936, "num_hidden_layers": 24, "bos_token_id": 151_643, "eos_token_id": 151_645},
    "qwen2-wide": _QWEN_500M  # layers of Qwen2.5 1.5B: widths are multiples of 256, as GGUF's K kinds need
    | _SMALL
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 4},
    "qwen3-small": {  # Qwen3 0.6B: all heads together are wider than the hidden state
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }
    | _SMALL,
}


@dataclass(frozen=True, slots=True)
class _Weight:
    name: str
    shape: tuple[int, ...]
    begin: int  # where its values begin in the repeated noise

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_norm(self) -> bool:
        return self.name.endswith("norm.weight")


def write_checkpoint(folder: Path, shape_name: str, *, seed: int = 0, shards: int = 0) -> None:
    """Write config.json and bfloat16 weights of a shape of `SHAPES` into `folder`; the same arguments give the same bytes.

    Matrices and biases are normal with standard deviation 0.02, norms are 1. `shards` = 0: four from 4 GiB on, else one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = SHAPES[shape_name] | {"hidden_act": "silu", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    weights = list(_weights(fields))
    total = sum(weight.num_elements for weight in weights)
    shards = shards or (4 if 2 * total >= 4 << 30 else 1)
    parts: list[list[_Weight]] = [[] for _ in range(shards)]
    for weight in weights:
        parts[weight.begin * shards // total].append(weight)
    single = ["model.safetensors"]
    names = single if shards == 1 else [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    noise = _noise(min(total, NOISE_ELEMENTS), seed)
    with ThreadPoolExecutor(shards) as threads:
        list(threads.map(lambda name, part: _write(folder / name, part, noise), names, parts))
    if shards > 1:
        weight_map = {weight.name: name for name, part in zip(names, parts, strict=True) for weight in part}
        index = {"metadata": {"total_size": 2 * total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_tokenizer(folder: Path, vocab_size: int, *, base: Path) -> None:
    """Write the tokenizer of the model folder `base`, grown to `vocab_size`: each new id i is the word `<i>`.

    Prompts become the base's tokens. Random weights answer with any id, and each of them is some text.
    """
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    known = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab |= {f"<{index}>": index for index in range(vocab_size) if index not in known}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(base / "tokenizer_config.json", folder)


def kept_checkpoint(folder: Path, shape_name: str) -> Path:
    """The checkpoint of that shape in `folder`, written now unless an earlier run did."""
    target = folder / shape_name
    if not (target / "written").is_file():
        write_checkpoint(target, shape_name)
        (target / "written").touch()
    return target


def served_checkpoint(folder: Path, shape_name: str) -> Path:
    """The same with a tokenizer, as a server needs it."""
    target = kept_checkpoint(folder, shape_name)
    if not (target / "tokenizer_config.json").is_file():
        write_tokenizer(target, SHAPES[shape_name]["vocab_size"], base=ROOT / "demo")
    return target


def _weights(fields: dict[str, Any]) -> Iterator[_Weight]:
    begin = 0
    for name, shape in _shapes(fields):
        weight = _Weight(name, shape, begin)
        yield weight
        begin += weight.num_elements


def _shapes(fields: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, intermediate = fields["hidden_size"], fields["intermediate_size"]
    head = fields.get("head_dim") or hidden // fields["num_attention_heads"]
    sizes = {"q": fields["num_attention_heads"] * head, "k": fields["num_key_value_heads"] * head}
    sizes["v"] = sizes["k"]
    yield "model.embed_tokens.weight", (fields["vocab_size"], hidden)
    for layer in range(fields["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, size in sizes.items():
            yield f"{prefix}.self_attn.{name}_proj.weight", (size, hidden)
            if fields["model_type"] == "qwen2":
                yield f"{prefix}.self_attn.{name}_proj.bias", (size,)
        if fields["model_type"] == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", (head,)
            yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, sizes["q"])
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (intermediate, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (intermediate, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, intermediate)
    yield "model.norm.weight", (hidden,)
    if not fields["tie_word_embeddings"]:
        yield "lm_head.weight", (fields["vocab_size"], hidden)


def _noise(size: int, seed: int, step: int = 8 << 20) -> memoryview:
    """Return the bytes of `size` normal values in bfloat16.

    Each part has a seed of its own, so the number of threads changes nothing.
    """
    noise = torch.empty(size, dtype=torch.bfloat16)

    def draw(part: int) -> None:
        values = noise[part * step : (part + 1) * step]
        generator = torch.Generator().manual_seed((seed << 20) + part)
        values.copy_(torch.empty(len(values)).normal_(0.0, STD, generator=generator))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(draw, range(-(-size // step))))
    return memoryview(noise.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write(file: Path, weights: list[_Weight], noise: memoryview) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        begin, end = end, end + 2 * weight.num_elements
        header[weight.name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb", buffering=0) as opened:
        opened.write(len(encoded).to_bytes(8, "little") + encoded)
        for weight in weights:
            if weight.is_norm:
                _write_all(opened, memoryview(b"\x80\x3f" * weight.num_elements))  # 1.0
            else:
                _write_noise(opened, noise, 2 * weight.begin, 2 * weight.num_elements)


def _write_noise(opened: Any, noise: memoryview, begin: int, size: int) -> None:
    at = begin % len(noise)
    while size:
        part = noise[at : at + size]
        _write_all(opened, part)
        size -= len(part)
        at = 0


def _write_all(opened: Any, data: memoryview) -> None:
    while data:
        data = data[opened.write(data) :]


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), sys.argv[2])
