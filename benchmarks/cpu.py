"""The engine on a CPU, in tokens a second of CPU time: decoding alone, eight at once, and a prompt.

    python -m benchmarks.cpu --out benchmarks/results                     Qwen2.5 0.5B's shape, each dtype in turn
    python -m benchmarks.cpu --llama-bench PATH --gguf bf16=FILE …         beside llama.cpp, in the same alternation

CPU time of the process, one thread by default: other work on the machine disturbs it less than it does wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.checkpoint import write_checkpoint
from benchmarks.environment import describe
from common.messages import SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sequence import Sequence

CONTEXT, STEPS, PROMPT = 250, 16, 512
BATCHES = (1, 8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=100_000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for cpu.md and cpu.json")
    parser.add_argument("--model", type=Path, help="a checkpoint of yours")
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="of benchmarks.checkpoint, with random weights")
    parser.add_argument("--arms", nargs="+", default=["float32", "bfloat16"], help="dtypes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-bench")
    parser.add_argument("--gguf", nargs="*", default=[], help="NAME=FILE for llama-bench: the same weights")
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
    text = page(rows, options.shape if options.model is None else options.model.name, options)
    print(text)
    if options.out is not None:
        (options.out / "cpu.md").write_text(text, encoding="utf-8")
        (options.out / "cpu.json").write_text(
            json.dumps({"rounds": rounds, "threads": options.threads}, indent=1) + "\n"
        )
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
        found[f"llama.cpp {name}"] = _llama(options.llama_bench, file, options.threads)
    return found


def measured(model: Path, dtype: str, threads: int) -> dict[str, float]:
    """Tokens a CPU second of each cell, and the peak memory in MB."""
    began = time.process_time()
    engine = Engine(
        EngineConfig(model=model, dtype=dtype, num_threads=threads, max_model_len=2 * PROMPT, num_blocks=512)
    )
    found = {"start, CPU s": time.process_time() - began}
    for batch in BATCHES:
        sequences = [_sequence(engine, CONTEXT, index) for index in range(batch)]
        for sequence in sequences:
            _step(engine, [sequence])
        _step(engine, sequences)
        began = time.process_time()
        for _ in range(STEPS):
            _step(engine, sequences)
        found[f"decode, batch {batch}"] = batch * STEPS / (time.process_time() - began)
    seconds = []
    for _ in range(2):
        prompt = _sequence(engine, PROMPT, 0)
        began = time.process_time()
        _step(engine, [prompt])
        seconds.append(time.process_time() - began)
    found[f"prompt of {PROMPT}"] = PROMPT / min(seconds)
    found["peak, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def _sequence(engine: Engine, length: int, index: int) -> Sequence:
    size = engine.layout.block_size
    blocks = -(-(length + STEPS + 8) // size)
    return Sequence(
        request_id=f"r{index}",
        attempt=1,
        token_ids=[(7 * position + index) % engine.vocab_size for position in range(length)],
        num_prompt_tokens=length,
        sampling=GREEDY,
        hash_root=b"",
        block_table=list(range(index * blocks, (index + 1) * blocks)),
    )


def _step(engine: Engine, sequences: list[Sequence]) -> None:
    chunks = [sequence.schedule(sequence.num_unscheduled) for sequence in sequences]
    for chunk, sampled in zip(chunks, engine.launch(chunks).wait(), strict=True):
        chunk.sequence.finish(chunk)
        assert sampled is not None
        chunk.sequence.append(sampled.token_id)


def _llama(bench: Path, file: str, threads: int) -> dict[str, float]:
    """The same cells by llama-bench: wall time, as it has no other clock."""
    cells = ["-p", str(PROMPT), "-n", "0", "-pg", "0,0", "-d", "0"], ["-p", "0", "-n", str(STEPS), "-d", str(CONTEXT)]
    found = {}
    for name, words in zip((f"prompt of {PROMPT}", "decode, batch 1"), cells, strict=True):
        command = [str(bench), "-m", file, "-t", str(threads), "-r", "2", "-o", "json", *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[name] = max(float(row["avg_ts"]) for row in json.loads(done.stdout))
    return found


def page(rows: dict[str, dict[str, float]], model: str, options: argparse.Namespace) -> str:
    """The table: each row beside the first one."""
    described = describe("benchmarks.cpu", sys.argv[1:], torch.device("cpu"))
    names = list(next(iter(rows.values())))
    lines = [
        "# The engine on a CPU",
        "",
        f"{model}, {options.threads} thread(s), tokens a second of CPU time, medians of {options.rounds} rounds in turn;",
        f"context {CONTEXT}. In brackets: times the first row.",
        "",
        *(f"- {name}: {value}" for name, value in described.items()),
        f"- load average: {os.getloadavg()[0]:.1f}",
        "",
        f"| | {' | '.join(names)} |",
        f"|---|{'--:|' * len(names)}",
    ]
    first = next(iter(rows.values()))
    for arm, cells in rows.items():
        shown = [f"{cells[name]:.3g} ({cells[name] / first[name]:.2f})" if name in cells else "" for name in names]
        lines.append(f"| {arm} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
