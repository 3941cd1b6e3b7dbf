"""The engine on a CPU, in tokens a second of CPU time: decoding alone, eight at once, and a prompt.

    python -m benchmarks.cpu --out benchmarks/results                     Qwen2.5 0.5B's shape, each dtype in turn
    python -m benchmarks.cpu --llama-bench PATH --gguf bf16=FILE …         beside llama.cpp's llama-batched-bench, in turn

CPU time of the process, one thread by default: other work on the machine disturbs it less than it does wall time. The arm
int8 is `--quantization int8`, int4 alike. `benchmarks.cpu.llama_cpp` writes the same weights as GGUF. Beside it, what the
arms make of the demo model's dialogues.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.cpu import llama_cpp
from benchmarks.engine.sequences import made_up, new_sequence, scored, step
from benchmarks.environment import ROOT, describe
from benchmarks.tables import heading, keep, table
from benchmarks.weights.checkpoint import write_checkpoint
from demo.data import dialogue
from engine.config import EngineConfig
from engine.engine import Engine
from services.runtime.memory import give_back

CONTEXT, STEPS, PROMPT = 250, 16, 512
DEMO = ROOT / "demo"
DIALOGUES, TOKENS = 100, 200
BATCHES = (1, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for cpu.md and cpu.json")
    parser.add_argument("--model", type=Path, help="a checkpoint of yours")
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="of benchmarks.weights.checkpoint, with random weights")
    parser.add_argument("--arms", nargs="+", default=["float32", "bfloat16", "int8"], help="dtypes, int8 or int4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-batched-bench")
    parser.add_argument("--gguf", nargs="*", default=[], help="NAME=FILE for it: the same weights")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # an arm, measured in this process
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.model, options.one, options.threads)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            model = Path(folder)
            write_checkpoint(model, options.shape)
        rounds = [_round(options, model, number) for number in range(options.rounds)]
    rows = {
        arm: {name: statistics.median(each[arm][name] for each in rounds) for name in rounds[0][arm]}
        for arm in rounds[0]
    }
    said = {arm: dialogues(arm) for arm in options.arms}
    text = page(rows, options.shape if options.model is None else options.model.name, options) + of_dialogues(said)
    print(text)
    keep(options.out, "cpu", text, {"rounds": rounds, "threads": options.threads, "dialogues": said})
    return 0


def _round(options: argparse.Namespace, model: Path, number: int) -> dict[str, dict[str, float]]:
    """Each arm once, in a process of its own."""
    found = {}
    for arm in options.arms:
        print(f"round {number + 1}: {arm} …", file=sys.stderr, flush=True)
        command = [
            sys.executable,
            "-m",
            "benchmarks.cpu",
            "--one",
            arm,
            "--model",
            str(model),
            "--threads",
            str(options.threads),
        ]
        found[f"Baton {arm}"] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for name, _, file in (entry.partition("=") for entry in options.gguf):
        print(f"round {number + 1}: llama.cpp {name} …", file=sys.stderr, flush=True)
        found[f"llama.cpp {name}"] = llama_cpp.measured(
            options.llama_bench, Path(file), options.threads,
            context=CONTEXT, steps=STEPS, prompt=PROMPT, batches=BATCHES,
        )  # fmt: skip
    return found


def config_of(model: Path, arm: str, **limits: int) -> EngineConfig:
    """The engine of an arm: a dtype, or weights in 8 or 4 bits."""
    named = {"quantization": arm} if arm in ("int8", "int4") else {"dtype": arm}
    return EngineConfig.of(model=model, **named, **limits)


def dialogues(arm: str) -> dict[str, float]:
    """An arm's results on the tokens of the demo model's dialogues, each after those before it."""
    engine = Engine(config_of(DEMO, arm, num_blocks=256))
    tokenizer, draw = Tokenizer.from_file(str(DEMO / "tokenizer.json")), random.Random(20261123)
    logprobs, ranks = list[float](), list[int]()
    for _ in range(DIALOGUES):
        words = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in dialogue(draw))
        scores = scored(engine, tokenizer.encode(words, add_special_tokens=False).ids[:TOKENS])
        logprobs += np.frombuffer(scores.logprobs, "<f4").tolist()
        ranks += np.frombuffer(scores.ranks, "<u4").tolist()
    return {
        "tokens": len(ranks),
        "perplexity": math.exp(-statistics.fmean(logprobs)),
        "first choice, %": 100 * sum(rank == 1 for rank in ranks) / len(ranks),
    }


def measured(model: Path, dtype: str, threads: int) -> dict[str, float]:
    """Tokens a CPU second of each cell, and the peak memory in MB."""
    began = time.process_time()
    engine = Engine(config_of(model, dtype, num_threads=threads, max_model_len=2 * PROMPT, num_blocks=512))
    return {"start, CPU s": time.process_time() - began} | of(engine)


def of(engine: Engine) -> dict[str, float]:
    """The cells of an engine that has started."""
    found = dict[str, float]()
    give_back()  # as a worker does once it is ready
    for batch in BATCHES:
        sequences = [new_sequence(engine, made_up(engine, CONTEXT, index), index=index) for index in range(batch)]
        for sequence in sequences:
            step(engine, [sequence])
        step(engine, sequences)
        began = time.process_time()
        for _ in range(STEPS):
            step(engine, sequences)
        found[f"decode, batch {batch}"] = batch * STEPS / (time.process_time() - began)
    seconds = []
    for _ in range(2):
        prompt = new_sequence(engine, made_up(engine, PROMPT))
        began = time.process_time()
        step(engine, [prompt])
        seconds.append(time.process_time() - began)
    found[f"prompt of {PROMPT}"] = PROMPT / min(seconds)
    give_back()
    found["afterwards, MB"] = _resident_mb()
    found["peak, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def _resident_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def page(rows: dict[str, dict[str, float]], model: str, options: argparse.Namespace) -> str:
    """The table: each row beside the first one."""
    described = describe("benchmarks.cpu", sys.argv[1:], torch.device("cpu"))
    names = list(next(iter(rows.values())))
    first = next(iter(rows.values()))
    shown = {
        arm: [f"{cells[name]:.3g} ({cells[name] / first[name]:.2f})" if name in cells else "" for name in names]
        for arm, cells in rows.items()
    }
    said = (
        f"{model}, {options.threads} thread(s), tokens a second of CPU time, medians of {options.rounds} rounds in turn"
    )
    how = f"context {CONTEXT}; in brackets: times the first row"
    return "\n".join([*heading("The engine on a CPU", described, said, how), *table("", names, shown)]) + "\n"


def of_dialogues(said: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(said.values())))
    rows = {arm: [f"{cells[name]:.5g}" for name in names] for arm, cells in said.items()}
    head = ["", "The demo model's dialogues, each token after those before it:", ""]
    return "\n".join([*head, *table("", names, rows)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
