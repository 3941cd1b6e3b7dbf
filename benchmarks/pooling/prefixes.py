"""A query before many documents: what a reranker that is a decoder saves by computing it once, on a CPU in float32.

    python -m benchmarks.pooling.prefixes

A random decoder of Qwen3's kind scores 32 pairs whose first 120 tokens are an instruction and a query, in passes as a worker's.
Ways take turns: every text alone as before, a query that nobody asked yet, and the same query with other documents. Times are
those of the CPU with one thread, which others on the machine change little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.environment import describe, device_of
from benchmarks.pooling.card import Shape, write
from benchmarks.results_format import Result
from engine.pooling.engine import PoolingConfig, PoolingEngine, PoolingInput
from services.pool.process import CPU_BATCH_TOKENS

SHAPE = Shape(
    "reranker",
    "Qwen3",
    {
        "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024,
    },
    None,
)  # fmt: skip
DOCUMENTS, QUERY_TOKENS, DOCUMENT_TOKENS = 32, 120, 100


def figures(*, rounds: int, documents: int = DOCUMENTS) -> Iterator[Result]:
    """Yield each way's time, the tokens that it finds, and the times that sharing is the faster."""
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), SHAPE, torch.float32)
        config = PoolingConfig(model=Path(folder), num_threads=1)
        engine, plain = PoolingEngine(config), PoolingEngine(config)
    plain.prefixes = None

    def drawn(tokens: int) -> list[int]:
        return chance.choices(range(SHAPE.fields["vocab_size"]), k=tokens)

    times: dict[str, list[float]] = {"each alone": [], "a new query": [], "the same query": []}
    found = dict[str, int]()
    for _ in range(rounds + 1):
        query = drawn(QUERY_TOKENS)
        first, other = ([query + drawn(DOCUMENT_TOKENS) for _ in range(documents)] for _ in range(2))
        for way, one, texts in zip(times, (plain, engine, engine), (first, first, other), strict=True):
            began = time.process_time()
            rows, found[way] = _scored(one, texts)
            times[way].append(time.process_time() - began)
            if way == "each alone":
                wanted = rows
            elif way == "a new query":
                torch.testing.assert_close(rows, wanted, rtol=1e-5, atol=1e-5)
    seconds = {way: statistics.median(some[1:]) for way, some in times.items()}
    for way, median in seconds.items():
        yield Result(name=f"{documents} documents, {way}", value=1000 * median, unit="ms of CPU", better="lower")
        yield Result(name=f"{documents} documents, {way}, found", value=found[way], unit="tokens", better="higher")
    for way in list(times)[1:]:
        ratios = [alone / its for alone, its in zip(times["each alone"][1:], times[way][1:], strict=True)]
        yield Result(name=f"{way}, times as fast", value=statistics.median(ratios), unit="x", better="higher")
        yield Result(name=f"{way}, times as fast, least of rounds", value=min(ratios), unit="x", better="higher")


def _scored(engine: PoolingEngine, texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, int]:
    """Rows of all texts and the tokens found, in passes of a worker's size."""
    length = len(texts[0])
    some, rows, found = CPU_BATCH_TOKENS // length, list[torch.Tensor](), 0
    for at in range(0, len(texts), some):
        rows += engine.compute([PoolingInput(tokens=one) for one in texts[at : at + some]])
        found += sum(engine.found)
    return torch.cat(rows), found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    device = device_of("benchmarks.pooling.prefixes", "cpu")
    for name, fact in describe("benchmarks.pooling.prefixes", arguments, device).items():
        print(f"{name}: {fact}", flush=True)
    for result in figures(rounds=options.rounds):
        print(f"{result.name:56} {result.value:12.3f} {result.unit}", flush=True)
    return 0


if __name__ == "__main__":
    torch.manual_seed(0)
    raise SystemExit(main(sys.argv[1:]))
