"""The cost of each format for a model of real shape on a CPU: agreement with bfloat16, memory, CPU time.

    python -m benchmarks.quality.formats --out benchmarks/results --llama-quantize PATH
    python -m benchmarks.quality.formats --out DIR --folder KEPT --only GPTQ MXFP4    some rows, beside those that KEPT has
    python -m benchmarks.quality.formats --errors       how far each format's numbers are from normal weights
    python -m benchmarks.quality.formats --shape qwen2-wide …      four layers, whose widths suit GGUF's K kinds

Qwen2.5 0.5B's shape with random weights, of which some channels are large, as trained models have them. The texts are what the
model itself says at temperature 1. Without llama.cpp's `llama-quantize` there are no rows of GGUF. Each format has a
row for the numbers that it stands for, in bfloat16 (a GPU's), and, where a CPU rounds these again, one as a CPU serves it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.cpu import __main__ as cpu
from benchmarks.cpu.llama_cpp import write_gguf
from benchmarks.engine.sequences import new_sequence, step
from benchmarks.environment import describe
from benchmarks.quality import agreement
from benchmarks.tables import heading, keep, table
from benchmarks.weights.checkpoint import STD, write_checkpoint
from common.messages import SamplingParams
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.formats.int4 import quantise_groups
from engine.kernels.quantised import int8
from tests.unit.engine.formats.checkpoints import Store, compressed, fp8_row
from tests.unit.engine.formats.codebooks import codebook4
from tests.unit.engine.formats.packing import awq, gptq, mxfp4_rows, nvfp4, packed_rows

SHAPE, SEED = "qwen2.5-0.5b", 20_261_123
LARGE_CHANNELS, LARGE, LOGITS_STD = 6, 20.0, 4.79  # the last makes the model as sure as trained ones are
TEXTS, TEXT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 4, 192, 64, 20
EXACT = "exact"  # of an arm: its products multiply the numbers that the format stands for
ROUNDING = (
    "formats.grouped.multiplies_bytes",
    "families.quantised.gguf.multiplies_bytes",
    "kernels.quantised.tiles.is_usable",
)
HEAD = ("lm_head",)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
PACKED = {"type": "int", "num_bits": 4, "group_size": 128}
ERROR_ROWS, ERROR_INPUTS, INT4_GROUPS, GGUF_ALONE = 256, 4096, (128, 64, 32), ("Q4_0", "Q5_0", "Q8_0")
GGUF = ("Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS")


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of a checkpoint: a store of tests, and its `quantization_config`."""

    store: Store
    config: Mapping[str, Any]


def _packed(format: str, **weights: Any) -> dict[str, Any]:
    return compressed("group", ignore=HEAD, **weights)["quantization_config"] | {"format": format}


FORMS = {
    "AWQ": Form(awq(128), AWQ),
    "GPTQ": Form(gptq(4, 128), GPTQ),
    "GPTQ, 8 bits": Form(gptq(8, 128), GPTQ | {"bits": 8}),
    "compressed-tensors W4A16": Form(packed_rows(4, 128), _packed("pack-quantized", **PACKED)),
    "compressed-tensors fp8 rows": Form(fp8_row, compressed("channel", ignore=HEAD)["quantization_config"]),
    "bitsandbytes nf4": Form(codebook4("nf4", nested=True), BITSANDBYTES | {"bnb_4bit_quant_type": "nf4"}),
    "bitsandbytes fp4": Form(codebook4("fp4", nested=True), BITSANDBYTES | {"bnb_4bit_quant_type": "fp4"}),
    "MXFP4": Form(mxfp4_rows, _packed("mxfp4-pack-quantized", type="float", num_bits=4, group_size=32)),
    "NVFP4": Form(nvfp4(modelopt=True), {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": list(HEAD)}),
}
PLAIN = {
    "bfloat16": "",
    "float32": "dtype=float32",
    "--quantization fp8": "quantization=fp8",
    "--quantization int8": "quantization=int8",
    "--quantization int4": f"quantization=int4,{EXACT}=1",
    "--quantization int4, CPU": "quantization=int4",
    "--kv-cache-dtype fp8": "kv_cache_dtype=fp8",
    "--kv-cache-dtype int8": "kv_cache_dtype=int8",
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for formats.md and formats.json")
    parser.add_argument("--llama-quantize", type=Path, help="llama.cpp's program that writes GGUF's kinds")
    parser.add_argument(
        "--folder", type=Path, help="keeps checkpoints and measurements: a later call adds what is missing"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--only", nargs="*", help="these rows, beside bfloat16")
    parser.add_argument("--errors", action="store_true", help="the errors of normal weights, and nothing else")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # a model, fields, texts: in this process
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(_one(Path(options.one[0]), options.one[1], Path(options.one[2]))))
        return 0
    if options.errors:
        print("\n".join(f"| {name} | {100 * error:.2f} |" for name, error in weight_errors().items()))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(_all(options, options.folder or Path(folder)))
    return 0


def _tell(rows: Mapping[str, list[dict[str, Any]]], options: argparse.Namespace) -> str:
    """The page of what there is, written after every measurement."""
    found = {name: _row(own, rows["bfloat16"][0]) for name, own in rows.items()}
    notes = [
        f"{name} has matrices of other kinds: {each}" for name, own in rows.items() if (each := own[0].get("instead"))
    ]
    text = page(found, notes, options)
    keep(options.out, "formats" if options.shape == SHAPE else f"formats-{options.shape}", text, found)
    return text


def _all(options: argparse.Namespace, folder: Path) -> str:
    plain, texts, kept = folder / "plain", folder / "texts.json", folder / "rows.json"
    if not texts.exists():
        write_checkpoint(plain, options.shape, seed=SEED)
        with_large_channels(plain)
        texts.write_text(json.dumps(said_by(plain)))
    arms = {name: (plain, fields) for name, fields in PLAIN.items()}
    for name in FORMS:
        model = folder / name.replace(" ", "-")
        arms |= {name: (model, f"{EXACT}=1"), f"{name}, CPU": (model, "")}
    if options.llama_quantize:
        for kind in GGUF:
            arms |= {
                f"GGUF {kind}": (folder / f"{kind}.gguf", f"{EXACT}=1"),
                f"GGUF {kind}, CPU": (folder / f"{kind}.gguf", ""),
            }
    wanted = ["bfloat16", *(name for name in options.only or arms if name != "bfloat16")]
    rows: dict[str, list[dict[str, Any]]] = json.loads(kept.read_text()) if kept.exists() else {}
    for number in range(options.rounds):
        for name in wanted:
            if number < len(rows.get(name, ())):
                continue
            model, fields = arms[name]
            print(f"round {number + 1}: {name} …", file=sys.stderr, flush=True)
            if not model.exists():
                _write(options, name.removesuffix(", CPU"), plain, model)
            command = [sys.executable, "-m", "benchmarks.quality.formats", "--one", str(model), fields, str(texts)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
            if (instead := model.with_suffix(".instead")).exists():
                rows[name][-1]["instead"] = instead.read_text()
            kept.write_text(json.dumps(rows))
            _tell({name: rows[name] for name in arms if name in rows}, options)
    return _tell({name: rows[name] for name in arms if name in rows}, options)


def with_large_channels(folder: Path) -> None:
    """Make a few channels of each norm large, and the logits as far apart as a trained model's."""
    tensors, draw = load_file(folder / "model.safetensors"), random.Random(SEED)
    for name, tensor in tensors.items():
        if name == "model.norm.weight":
            tensor.fill_(LOGITS_STD / (STD * len(tensor) ** 0.5))
        elif name.endswith("layernorm.weight"):
            tensor[draw.sample(range(len(tensor)), LARGE_CHANNELS)] = LARGE
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def said_by(model: Path) -> list[list[int]]:
    """Texts that the model draws at temperature 1."""
    engine, draw = (
        Engine(EngineConfig(model=model, max_model_len=1024, cache=CacheConfig(num_blocks=256))),
        random.Random(SEED),
    )
    sequences = []
    for index in range(TEXTS):
        sampling = SamplingParams(temperature=1.0, max_tokens=100_000, seed=SEED + index)
        first = draw.sample(range(engine.vocab_size), 4)
        sequences.append(new_sequence(engine, first, index=index, sampling=sampling, steps=TEXT_TOKENS + 16))
    while len(sequences[0].token_ids) < TEXT_TOKENS:
        step(engine, sequences)
    return [sequence.token_ids for sequence in sequences]


def _write(options: argparse.Namespace, name: str, plain: Path, target: Path) -> None:
    if name.startswith("GGUF "):
        whole = target.with_name("plain.gguf")
        if not whole.exists():
            write_gguf(plain, whole)
        command = [options.llama_quantize, "--allow-requantize", whole, target, name.removeprefix("GGUF ")]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        instead = Counter(re.findall(r"falling back to +(\w+)", done.stdout))
        target.with_suffix(".instead").write_text(", ".join(f"{count} {kind}" for kind, count in instead.items()))
        return
    form, tensors = FORMS[name], load_file(plain / "model.safetensors")
    for stored, weight in list(tensors.items()):
        module = stored.removesuffix(".weight")
        if module != stored and weight.dim() == 2 and "embed" not in stored:
            parts, _ = form.store(module, tensors.pop(stored).float())
            biased = {kind: part for kind, part in parts.items() if f"{module}.{kind}" not in tensors}
            tensors |= {f"{module}.{kind}": part.contiguous() for kind, part in biased.items()}
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((plain / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**fields, "quantization_config": form.config}))


def _one(model: Path, fields: str, texts: Path) -> dict[str, Any]:
    """Speed and memory first: what they are compared by needs more."""
    asked = {"dtype": "bfloat16", **dict(pair.split("=") for pair in fields.split(",") if pair)}
    is_exact = asked.pop(EXACT, "")
    config = EngineConfig.of(model=model, max_model_len=1024, num_blocks=512, **asked)
    with ExitStack() as stack:
        for rounds in ROUNDING if is_exact else ():
            stack.enter_context(mock.patch(f"engine.{rounds}", return_value=False))
        engine = Engine(config)
    speed = cpu.of(engine)
    del speed["peak, MB"]  # Linux counts what the process had that started this one
    given = json.loads(texts.read_text())
    with mock.patch.object(agreement, "ANSWER_TOKENS", ANSWER_TOKENS):
        found = agreement.measured(engine, given, [text[:QUESTION_TOKENS] for text in given])
    return {
        "speed": speed,
        "logprobs": found.logprobs.tolist(),
        "likeliest": found.likeliest.tolist(),
        "answers": found.answers,
    }


def weight_errors() -> dict[str, float]:
    """Root mean square errors of normal weights, as parts of their standard deviation."""
    quants: Any = import_module("gguf.quants")
    drawn = torch.randn(ERROR_ROWS, ERROR_INPUTS, generator=torch.Generator().manual_seed(SEED)) * STD
    found = {name: form.store(name, drawn)[1] for name, form in FORMS.items()}
    rows = int8.quantise(drawn)
    found["--quantization int8"] = rows.floats(torch.arange(len(drawn)), torch.float32)
    for group in INT4_GROUPS:
        codes, scales = quantise_groups(drawn, group)
        values = (codes.float() - 8).unflatten(1, (-1, group)) * scales.float()[..., None]
        found[f"--quantization int4, in groups of {group}"] = values.flatten(1)
    for kind in GGUF_ALONE:
        stored = quants.quantize(drawn.numpy(), quants.GGMLQuantizationType[kind])
        found[f"GGUF {kind}"] = torch.from_numpy(quants.dequantize(stored, quants.GGMLQuantizationType[kind]))
    errors = {name: float((values - drawn).norm() / drawn.norm()) for name, values in found.items()}
    return dict(sorted(errors.items(), key=lambda each: each[1]))


def _row(rounds: list[dict[str, Any]], base: dict[str, Any]) -> dict[str, float]:
    own, same = rounds[0], [0, 0]
    for ours, theirs in zip(own["answers"], base["answers"], strict=True):
        same[0] += next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))
        same[1] += len(ours)
    speeds = {name: statistics.median(each["speed"][name] for each in rounds) for name in own["speed"]}
    return {
        "perplexity": math.exp(-statistics.fmean(own["logprobs"])),
        "likeliest token as bfloat16's, %": 100 * float(np.mean(np.equal(own["likeliest"], base["likeliest"]))),
        "greedy tokens before they part, %": 100 * same[0] / same[1],
        **speeds,
    }


def page(rows: Mapping[str, Mapping[str, float]], notes: Sequence[str], options: argparse.Namespace) -> str:
    described = describe("benchmarks.quality.formats", sys.argv[1:], torch.device("cpu"))
    names = list(next(iter(rows.values())))
    how = f"{TEXTS * TEXT_TOKENS} scored tokens, {TEXTS} greedy answers of {ANSWER_TOKENS}"
    speeds = f"speeds in tokens a second of CPU time, medians of {options.rounds} rounds"
    lines = heading(f"What formats cost {options.shape}'s shape on a CPU", described, how, speeds, *notes)
    cells = {name: [f"{row[each]:.4g}" for each in names] for name, row in rows.items()}
    return "\n".join([*lines, *table("", names, cells), ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
