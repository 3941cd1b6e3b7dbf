"""A published model in four bits beside llama.cpp on the same file, in tokens a second of CPU time, in turn.

    python -m benchmarks.cpu.beside_llama --out benchmarks/results
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python -m benchmarks.cpu.beside_llama --out benchmarks/results

llama.cpp is the shared library of a package that npm has, which chooses its code by the processor: only the two variables'
arm keeps Baton to AVX2. Each cell is CPU time of one process with one thread by default; `--threads 2` adds what waiting costs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.__main__ import BATCHES, CONTEXT, PROMPT, STEPS, measured
from benchmarks.cpu.beside import report
from benchmarks.environment import describe
from services.runtime.models.packaged import fetched
from tests.real import packages
from tests.real.llama_cpp import Batch, library_of, set_field

ROUNDS = 5
REACH = {"decode, batch 1": 0.8, "decode, batch 8": 1.2, "prompt": 1.4}
SPECIAL = 100  # ids below are control tokens


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path, help="a GGUF file; SmolLM2-135M-Instruct in Q4_1 by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--one", choices=("baton", "llama.cpp"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    file = options.model or fetched("smollm2", lambda line: print(line, file=sys.stderr))
    if options.one:
        own = measured(file, "auto", options.threads) if options.one == "baton" else llamas(file, options.threads)
        print(json.dumps(own))
        return 0
    rounds = [
        {who: _alone(who, file, options.threads) for who in ("baton", "llama.cpp")} for _ in range(options.rounds)
    ]
    facts = describe("benchmarks.cpu.beside_llama", arguments, torch.device("cpu"))
    facts |= {
        "model": file.name,
        "threads": str(options.threads),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    title = "A model in four bits beside llama.cpp, on a CPU"
    report(rounds, "llama.cpp", REACH, out=options.out, stem="small-machines", title=title, facts=facts)
    return 0


def _alone(who: str, file: Path, threads: int) -> dict[str, float]:
    """The cells of one side, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.cpu.beside_llama", "--one", who, "--model", str(file)]
    done = subprocess.run([*command, "--threads", str(threads)], check=True, stdout=subprocess.PIPE, text=True)
    cells: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return cells


def llamas(file: Path, threads: int) -> dict[str, float]:
    """llama.cpp's cells, as `benchmarks.cpu` has them."""
    library, draw = library_of(packages.llama_cpp()), random.Random(1)
    model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
    parameters = library.llama_context_default_params()
    set_field(parameters, 0, "I", 512, max(BATCHES) * 2 * PROMPT)  # n_ctx
    set_field(parameters, 4, "I", 2048, PROMPT)  # n_batch
    set_field(parameters, 8, "I", 512, PROMPT)  # n_ubatch
    set_field(parameters, 12, "I", 1, max(BATCHES))  # n_seq_max
    context = library.llama_init_from_model(model, parameters)
    library.llama_set_n_threads(context, threads, threads)
    most = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def compute(places: Sequence[tuple[int, int]], num_last: int) -> float:
        """CPU seconds of a pass over (sequence, position)s, of which the last ones get logits."""
        batch, kept = _batch(places, num_last, lambda: draw.randrange(SPECIAL, most))
        began = time.process_time()
        assert library.llama_decode(context, batch) == 0
        _ = library.llama_get_logits(context)[0]  # waits for it
        del kept
        return time.process_time() - began

    def clear() -> None:
        library.llama_memory_clear(library.llama_get_memory(context), True)

    found = dict[str, float]()
    for size in BATCHES:
        clear()
        for sequence in range(size):
            compute([(sequence, position) for position in range(CONTEXT)], 1)
        taken = sum(compute([(at, CONTEXT + step) for at in range(size)], size) for step in range(STEPS))
        found[f"decode, batch {size}"] = size * STEPS / taken
    times = []
    for _ in range(3):
        clear()
        times.append(compute([(0, position) for position in range(PROMPT)], 1))
    found["prompt"] = PROMPT / statistics.median(times)
    found["peak, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def _batch(places: Sequence[tuple[int, int]], num_last: int, token: Any) -> tuple[Batch, object]:
    """A pass, and the arrays that it points into."""
    count = len(places)
    own = [(ctypes.c_int32 * 1)(sequence) for sequence, _ in places]
    sequences = (ctypes.c_void_p * count)(*map(ctypes.addressof, own))
    numbers = (ctypes.c_int32 * count)(*[1] * count)
    batch = Batch(
        n_tokens=count,
        token=(ctypes.c_int32 * count)(*(token() for _ in places)),
        pos=(ctypes.c_int32 * count)(*(position for _, position in places)),
        n_seq_id=ctypes.cast(numbers, ctypes.c_void_p),
        seq_id=ctypes.cast(sequences, ctypes.c_void_p),
        logits=(ctypes.c_int8 * count)(*[0] * (count - num_last), *[1] * num_last),
    )
    return batch, (own, sequences, numbers)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
