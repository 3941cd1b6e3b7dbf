"""llama.cpp's `llama-batched-bench` in CPU time, and checkpoints of Qwen2's and Llama's shapes as GGUF for it.

    python -m benchmarks.cpu.llama_cpp FOLDER FILE.gguf      the same weights in bfloat16 (needs the package gguf)

`llama-quantize FILE.gguf OUT.gguf Q8_0` makes the others. The bench has no clock of CPU time, so a cell is the difference of two
runs, one of which does more: starting and loading cost both the same.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

FEW, REPEATS = 4, 3
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def measured(
    bench: Path, file: Path, threads: int, *, context: int, steps: int, prompt: int, batches: tuple[int, ...]
) -> dict[str, float]:
    """Tokens a CPU second of each of `benchmarks.cpu`'s cells, and the peak memory in MB."""
    found = dict[str, float]()

    def seconds(prompt: int, steps: int, batches: str) -> float:
        room = max(int(each) for each in batches.split(",")) * (prompt + steps + 8)
        numbers = {"-c": room, "-npp": prompt, "-ntg": steps, "-npl": batches, "-t": threads, "-tb": threads}
        words = [str(bench), "-m", str(file), *(str(word) for pair in numbers.items() for word in pair)]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{bench} ended with {process.returncode}: run {' '.join(words)}")
        found["peak, MB"] = max(found.get("peak, MB", 0.0), usage.ru_maxrss / 1024)
        return usage.ru_utime + usage.ru_stime

    for batch in batches:
        taken = seconds(context, FEW + steps, str(batch)) - seconds(context, FEW, str(batch))
        found[f"decode, batch {batch}"] = batch * steps / taken
    more = ",".join(["1"] * REPEATS)
    taken = (seconds(prompt, 1, more) - seconds(prompt, 1, "1")) / (REPEATS - 1)
    found[f"prompt of {prompt}"] = prompt / taken
    return found


def write_gguf(folder: Path, file: Path) -> None:
    """Write a checkpoint in bfloat16, of one file, as GGUF with a vocabulary of made-up words."""
    gguf: Any = import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), config["model_type"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<{index}>" for index in range(size)])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["< 0", "0 >"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    with (folder / "model.safetensors").open("rb") as stored:
        (length,) = struct.unpack("<Q", stored.read(8))
        header = json.loads(stored.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            stored.seek(8 + length + begin)
            values = np.frombuffer(stored.read(end - begin), dtype=np.uint16).reshape(entry["shape"])
            if values.ndim == 1:
                writer.add_tensor(_named(name), (values.astype(np.uint32) << 16).view(np.float32))
            else:
                rows = values.view(np.uint8).reshape(len(values), -1)
                writer.add_tensor(_named(name), rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _named(name: str) -> str:
    """llama.cpp's name of a tensor."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{_NAMES[module]}.{kind}"
    index, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{_NAMES[rest]}.{kind}"


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
