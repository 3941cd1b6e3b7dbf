"""Perplexity that formats cost a real model: five real texts, in windows of 512 tokens.

    python -m benchmarks.quality.perplexity --model FILE.gguf --out DIR      each way in which a CPU keeps weights or KV
    python -m benchmarks.quality.perplexity --model FOLDER --arm plain: --arm fp8:quantization=fp8

The texts are pages of Python's manual, which every interpreter has, and this project's licence. The first arm is what the
others are compared with: any fields of EngineConfig. A few windows say little about half a percent, so each cost has its
standard error over the windows beside it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine import sequences
from benchmarks.environment import describe, device_of
from benchmarks.quality.agreement import arms_of, engine_of
from benchmarks.quality.real_texts import real_texts
from benchmarks.results_format import Result, ResultsPage
from engine.engine import Engine
from gateway.answers.tokenizer import ChatTokenizer

ARMS = (
    "float32:dtype=float32",
    "int8:quantization=int8,dtype=float32",
    "int8 in bfloat16:quantization=int8,dtype=bfloat16",
    "int4:quantization=int4,dtype=float32",
    "int4 in tiles:quantization=int4",
    "fp8 rounded:quantization=fp8,dtype=float32",
    "int8 KV:dtype=float32,kv_cache_dtype=int8",
    "fp8 KV:dtype=float32,kv_cache_dtype=fp8",
    "int4 KV:dtype=float32,kv_cache_dtype=int4",
)
WINDOW = 512
MOST_COST = 0.5  # percent, of int8: the default of GGUF files on a CPU


Windows = dict[str, list[list[int]]]  # token ids, by the text's name
Logprobs = dict[str, "np.ndarray[Any, np.dtype[np.float64]]"]  # [windows, WINDOW - 1] of each text


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for perplexity.md and perplexity.json")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--arm", action="append", help="NAME:field=value,…; the first one is what others are compared with"
    )
    parser.add_argument("--windows", type=int, default=8, help="of each text at most")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = device_of("benchmarks.quality.perplexity", "cpu")
    windows = texts(options.model, options.windows)
    page = None
    if options.out is not None:
        facts = describe("benchmarks.quality.perplexity", arguments, device)
        facts["texts"] = ", ".join(f"{name} ({WINDOW * len(found)} tokens)" for name, found in windows.items())
        page = ResultsPage(options.out, "perplexity", title=f"What formats cost: {options.model.name}", facts=facts)
    base: Logprobs = {}
    for name, fields in arms_of(options.arm or ARMS).items():
        found = scored(engine_of(options.model, "cpu", fields), windows)
        base = base or found
        results = results_of(name, found, base)
        print("\n".join(f"{result.name}: {result.value:.5g} {result.unit}" for result in results), flush=True)
        if page is not None:
            page.add(*results)
    return 0


def texts(model: Path, most: int) -> Windows:
    """The token ids of each text's windows, by its name."""
    tokenizer = ChatTokenizer(model)
    found = {name: tokenizer.encode(text) for name, text in real_texts().items()}
    return {
        name: [ids[at : at + WINDOW] for at in range(0, min(len(ids) - WINDOW + 1, most * WINDOW), WINDOW)]
        for name, ids in found.items()
    }


def scored(engine: Engine, windows: Windows) -> Logprobs:
    """Each token's logprob behind those before it in its window."""
    return {name: np.stack([logprobs(engine, ids) for ids in some]) for name, some in windows.items()}


def logprobs(engine: Engine, token_ids: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The logprobs of all tokens but the first."""
    return np.frombuffer(sequences.scored(engine, token_ids).logprobs, "<f4").astype(np.float64)


def results_of(name: str, found: Logprobs, base: Logprobs) -> list[Result]:
    """An arm's perplexity, and what it costs over the first arm: in all, by how much chance moves that, and text by text."""
    results = [Result(name=f"{name}, perplexity", value=perplexity(*found.values()), unit="1", better="lower")]
    if found is base:
        return results
    target = MOST_COST if name.startswith("int8") and "KV" not in name else None
    lost = np.concatenate([base[text].mean(axis=1) - found[text].mean(axis=1) for text in base])  # of each window
    costs = {"": float(lost.mean()), " (standard error)": float(lost.std(ddof=1)) / math.sqrt(len(lost))}
    costs |= {f", {text}": float((base[text] - found[text]).mean()) for text in base}
    return results + [
        Result(
            name=f"{name}, cost{of}",
            value=100 * math.expm1(cost),
            unit="%",
            better="lower",
            target=None if of else target,
        )
        for of, cost in costs.items()
    ]


def perplexity(*texts: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Perplexity of all tokens together; `texts`: their logprobs, in any shape."""
    return math.exp(-float(np.concatenate([each.ravel() for each in texts]).mean()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
