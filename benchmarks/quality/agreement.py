"""The quality cost of a format: perplexity, and agreement with the first arm, of the demo model or one of yours.

    python -m benchmarks.quality.agreement --out benchmarks/results                          keys and values as fp8, int8 and int4
    python -m benchmarks.quality.agreement --arm plain: --arm fp8:quantization=fp8           any fields of EngineConfig

Each arm scores the same made-up dialogues, which training has not seen as such, and answers the same questions greedily. A step
is measured in CPU time, the arms in turn. Below: the error of attention alone, over random keys and values.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.sequences import made_up, new_sequence, step
from benchmarks.environment import ROOT, describe
from benchmarks.tables import heading, keep, table
from common.messages import PromptLogprobs, SamplingParams
from demo.data import dialogue
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.kernels.attention import AttentionBatch, Scores
from engine.kernels.attention.reference import attend
from engine.kernels.codes import KINDS, Kind, coded
from gateway.answers.tokenizer import ChatTokenizer

SEED = 20_261_123
KV = "dtype=bfloat16"
ARMS = (
    f"bfloat16:{KV}",
    f"fp8 KV:{KV},kv_cache_dtype=fp8",
    f"int8 KV:{KV},kv_cache_dtype=int8",
    f"int4 KV:{KV},kv_cache_dtype=int4",
    "float32:dtype=float32",
)
TEXTS, TEXT_TOKENS, QUESTIONS, ANSWER_TOKENS = 24, 900, 64, 40
STEPS, ROUNDS, LONG_CONTEXT = 8, 3, 1000
HEAD_DIMS, POSITIONS = (64, 128), 1024


def main(arguments: SequenceOf[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for agreement.md and agreement.json")
    parser.add_argument("--model", type=Path, default=ROOT / "demo")
    parser.add_argument(
        "--arm", action="append", help="NAME:field=value,…; the first one is what others are compared with"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few texts: whether it runs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    arms = arms_of(options.arm or ARMS)
    engines = {name: engine_of(options.model, options.device, fields) for name, fields in arms.items()}
    few = 8 if options.quick else 1
    texts, questions = _texts(options.model, TEXTS // few), _questions(options.model, QUESTIONS // few)
    found = {name: measured(engine, texts, questions) for name, engine in engines.items()}
    rows = compared(found, engines)
    errors = {f"{kind}, heads of {dim}": attention_error(kind, dim) for kind in KINDS for dim in HEAD_DIMS}
    text = page(rows, errors, options, sum(map(len, texts)))
    print(text)
    keep(options.out, "agreement", text, {"rows": rows, "errors": errors})
    return 0


def arms_of(texts: SequenceOf[str]) -> dict[str, dict[str, Any]]:
    """The changes to an EngineConfig of each arm NAME:field=value,…"""
    return {name: _fields(text) for name, _, text in (arm.partition(":") for arm in texts)}


def _fields(text: str) -> dict[str, Any]:
    """The changes of an arm, each as its field's type."""
    fields = (*dataclasses.fields(EngineConfig), *dataclasses.fields(CacheConfig))
    kinds = {field.name: field.type for field in fields if field.name != "cache"}
    pairs = [pair.partition("=")[::2] for pair in text.split(",") if pair]
    if unknown := [name for name, _ in pairs if name not in kinds]:
        raise SystemExit(f"--arm: EngineConfig has no {', '.join(unknown)}")
    return {name: int(value) if str(kinds[name]).startswith("int") else value for name, value in pairs}


def engine_of(model: Path, device: str, fields: dict[str, Any]) -> Engine:
    """An engine of an arm."""
    return Engine(
        EngineConfig.of(
            **{
                "device": device,
                "num_blocks": 512,
                "max_batch_tokens": 1024,
                **fields,
                "model": Path(fields.get("model", model)),
            }
        )
    )


def _texts(model: Path, count: int) -> list[list[int]]:
    """Token ids of dialogues, one after another, up to the same length."""
    tokenizer, rng, texts = ChatTokenizer(model), random.Random(SEED), []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < TEXT_TOKENS:
            ids += tokenizer.encode_chat(dialogue(rng))
        texts.append(ids[:TEXT_TOKENS])
    return texts


def _questions(model: Path, count: int) -> list[list[int]]:
    """Token ids of dialogues whose last answer is wanted; behind others, so that there is something to attend to."""
    tokenizer, rng, questions = ChatTokenizer(model), random.Random(SEED + 1), []
    for _ in range(count):
        before = [token for _ in range(6) for token in tokenizer.encode_chat(dialogue(rng))]
        questions.append(before + tokenizer.encode_chat(dialogue(rng)[:-1], add_generation_prompt=True))
    return questions


@dataclasses.dataclass(frozen=True)
class Found:
    logprobs: np.ndarray[Any, np.dtype[np.float32]]  # of every text's tokens
    likeliest: np.ndarray[Any, np.dtype[np.uint32]]
    answers: list[list[int]]


def measured(engine: Engine, texts: list[list[int]], questions: list[list[int]]) -> Found:
    scores = [_scores(engine, text) for text in texts]
    return Found(
        np.concatenate([np.frombuffer(each.logprobs, np.float32) for each in scores]),
        np.concatenate([np.frombuffer(each.top_ids, np.uint32) for each in scores]),
        [_answer(engine, question) for question in questions],
    )


def compared(found: dict[str, Found], engines: dict[str, Engine]) -> dict[str, dict[str, float]]:
    """The table's rows."""
    base, times = next(iter(found.values())), _step_ms(engines)
    return {
        name: {
            "KV, bytes a token": engines[name].layout.block_bytes / engines[name].layout.block_size,
            "perplexity": math.exp(-float(each.logprobs.mean())),
            "likeliest token as in the first row, %": 100 * float((each.likeliest == base.likeliest).mean()),
            "equal answers, %": 100 * statistics.mean(map(list.__eq__, each.answers, base.answers)),
            f"step at {LONG_CONTEXT} positions, CPU ms": times[name],
        }
        for name, each in found.items()
    }


def _scores(engine: Engine, text: list[int]) -> PromptLogprobs:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    sequence = new_sequence(engine, text, sampling=sampling)
    while not sequence.num_generated:
        chunk = sequence.schedule(sequence.num_next)
        (result,) = engine.launch([chunk]).wait()
        sequence.finish(chunk)
        if result is not None and result.prompt_logprobs is not None:
            sequence.scored(chunk, result.prompt_logprobs)
        if chunk.sample and result is not None:
            sequence.append(result.token_id)
    assert sequence.prompt_logprobs is not None
    return sequence.prompt_logprobs


def _answer(engine: Engine, question: list[int]) -> list[int]:
    sequence = new_sequence(engine, question, steps=ANSWER_TOKENS)
    while sequence.num_generated < ANSWER_TOKENS:
        step(engine, [sequence])
    return sequence.token_ids[len(question) :]


def _step_ms(engines: dict[str, Engine]) -> dict[str, float]:
    """CPU time of a step behind a long context: medians of rounds in which each arm has its turn."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            sequence = new_sequence(engine, made_up(engine, LONG_CONTEXT))
            for _ in range(2):
                step(engine, [sequence])
            began = time.process_time()
            for _ in range(STEPS):
                step(engine, [sequence])
            times[name].append(1000 * (time.process_time() - began) / STEPS)
    return {name: statistics.median(each) for name, each in times.items()}


def attention_error(kind: Kind, head_dim: int) -> dict[str, float]:
    """Relative errors of one query's attention, against float64 over the numbers before they became codes."""
    random = torch.Generator().manual_seed(SEED)
    plain = torch.randn(POSITIONS // 16, 2, 16, 4, head_dim, generator=random)
    outliers = plain.clone()
    outliers[:, 0, :, :, :2] *= 20  # two large features of the keys, as rotations leave them
    return {"even": _error(plain, kind), "with large features": _error(outliers, kind)}


def _error(numbers: torch.Tensor, kind: Kind) -> float:
    q = torch.randn(64, 8, numbers.shape[-1], generator=torch.Generator().manual_seed(SEED + 1))
    pages, codes = coded(numbers, kind)
    batch = AttentionBatch(
        query_start=torch.arange(len(q) + 1, dtype=torch.int32),
        context_len=torch.full((len(q),), POSITIONS, dtype=torch.int32),
        block_table=torch.arange(len(pages), dtype=torch.int32).repeat(len(q), 1),
        max_query_len=1,
        max_context_len=POSITIONS,
    )
    how = Scores(scale=numbers.shape[-1] ** -0.5)
    exact = attend(q, numbers, batch, how)
    return float((attend(q, pages, batch, how, codes) - exact).norm() / exact.norm())


def page(
    rows: dict[str, dict[str, float]], errors: dict[str, dict[str, float]], options: argparse.Namespace, tokens: int
) -> str:
    described = describe("benchmarks.quality.agreement", sys.argv[1:], torch.device(options.device))
    how = f"{tokens} scored tokens, greedy answers of {ANSWER_TOKENS} tokens"
    lines = heading("What formats cost in quality", described, how)
    for arms, title in ((rows, options.model.name), (errors, "relative error of attention")):
        names = list(next(iter(arms.values())))
        cells = {name: [f"{row[each]:.4g}" for each in names] for name, row in arms.items()}
        lines += [*table(title, names, cells), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
