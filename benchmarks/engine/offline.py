"""The class `LLM` beside the table's offline cell: the same model, lengths and batch, in turns.

python -m benchmarks.engine.offline --model smollm2 --requests 48 --prompt 128 --output 64
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from baton import LLM, SamplingParams
from benchmarks.engine.ceilings import Ceilings
from benchmarks.engine.cells import Bench, Offline
from benchmarks.engine.floors import ModelCost
from benchmarks.engine.workload import Prompts
from engine.engine import Engine
from engine.processor import settle
from services.runtime.settings import from_root
from services.worker.settings import WorkerServiceSettings

SEED = 20_261_129


def main(arguments: Sequence[str]) -> int:
    """Print tokens a second of both, round by round, and their ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-memory-mb", type=int, default=512)
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; 0: its cores")
    for name, default in (("requests", 48), ("prompt", 128), ("output", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    settings = WorkerServiceSettings(
        model=Path(options.model), device=options.device, kv_memory_mb=options.kv_memory_mb, threads=options.threads
    ).sized()
    if options.device == "cpu":
        settle()
    engine = Engine(settings.engine())
    nothing = cast("tuple[Ceilings, ModelCost]", (None, None))  # floors are not asked for
    prompts = Prompts(vocab_size=engine.vocab_size, seed=SEED)
    bench = Bench(engine, *nothing, prompts, token_budget=settings.max_batch_tokens)
    cell = Offline(options.requests, options.prompt, options.output, warm_up=0)  # both warm up before all rounds
    tokens = options.requests * (options.prompt + options.output)
    rates: dict[str, list[float]] = {"cell": [], "LLM": [], "cell, CPU": [], "LLM, CPU": []}
    in_system = {"cell": 0.0, "LLM": 0.0}
    asyncio.run(Offline(4, options.prompt, options.output, warm_up=0).run(bench))
    draw = random.Random(SEED)
    print(f"{options.model} on {options.device}, torch {torch.__version__}: {vars(options)}")
    own = {"device": options.device, "kv_memory_mb": options.kv_memory_mb}
    own |= {"threads": options.threads} if options.threads else {}
    with LLM(from_root(Path(options.model)), **own) as llm:
        params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True, min_tokens=options.output)
        llm.generate(_drawn(draw, engine, 4, options.prompt), params)
        for turn in range(options.rounds):
            for name in ("cell", "LLM") if turn % 2 else ("LLM", "cell"):
                process = os.getpid() if name == "cell" else llm.pid
                user, system = cpu_seconds(process)
                if name == "cell":
                    seconds = asyncio.run(cell.run(bench))
                else:
                    drawn = _drawn(draw, engine, options.requests, options.prompt)
                    began = time.perf_counter()
                    found = llm.generate(drawn, params)
                    seconds = time.perf_counter() - began
                    assert all(len(one.outputs[0].token_ids) == options.output for one in found)
                rates[name].append(tokens / seconds)
                spent = cpu_seconds(process)
                in_system[name] += spent[1] - system
                of_cpu = tokens / (sum(spent) - user - system)
                rates[f"{name}, CPU"].append(of_cpu)
                print(f"round {turn}: {name:<5}{tokens / seconds:10.1f} tok/s {of_cpu:10.1f} tok/CPU s", flush=True)
    for word, chosen in (("medians", statistics.median), ("best", max)):
        for kind, unit in (("", "tok/s"), (", CPU", "tok/CPU s")):  # the latter where others use the machine
            cell_rate, llm_rate = chosen(rates[f"cell{kind}"]), chosen(rates[f"LLM{kind}"])
            ratio = f"{llm_rate:.1f} / {cell_rate:.1f} {unit} = {llm_rate / cell_rate:.3f}"
            print(f"LLM / cell, {word} of {options.rounds}: {ratio}")
    for name, seconds in in_system.items():  # new pages: LLM keeps prefixes, so it writes to blocks that nobody touched
        print(f"{name}: {seconds / options.rounds:.2f} s a round in the system")
    return 0


def cpu_seconds(process: int) -> tuple[float, float]:
    """Processor time that a process took so far, its own and the system's for it."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(words[11]) / ticks, int(words[12]) / ticks


def _drawn(draw: random.Random, engine: Engine, count: int, length: int) -> list[list[int]]:
    return [draw.choices(range(engine.vocab_size), k=length) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
