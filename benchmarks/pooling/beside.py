"""Engines in turn on the same texts: medians of each, and the ratio of each round."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.environment import ROOT
from benchmarks.pooling import peer
from benchmarks.results_format import Result
from services.runtime.commands import SPINS
from tests.real.packages import minilm

OURS, THEIRS = "baton", ("sentence_transformers", "onnxruntime")
CELLS = ((1, 128), (32, 128), (1, 512), (32, 512))  # texts, tokens of each
SECONDS = 1.0  # of a turn
TARGET = 1.2
LEAST_COSINE = 0.9999
START_S = 180.0


@dataclass(frozen=True, slots=True)
class Engine:
    """A process that computes when it is asked."""

    name: str
    process: subprocess.Popen[str]

    @classmethod
    def started(cls, name: str, python: Path, model: Path, threads: int) -> Engine:
        file = str(Path(peer.__file__))
        command = [str(python), *(("-m", peer.__name__) if name == OURS else (file,)), name, str(model), str(threads)]
        own = {SPINS: "2000"} if name == OURS else {}  # as Baton's commands have it
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | own, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        return cls(name, process)

    def said(self) -> dict[str, Any] | None:
        """Its next line; None if it ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def turn(self, texts: Sequence[str], seconds: float) -> tuple[float, list[float]]:
        """The median time of its runs, and the first text's vector. Raises RuntimeError."""
        assert self.process.stdin is not None
        print(json.dumps({"texts": texts, "seconds": seconds}), file=self.process.stdin, flush=True)
        answer = self.said()
        if answer is None:
            raise RuntimeError(f"{self.name} ended in a turn: {self.end()}")
        return statistics.median(answer["times"]), answer["vector"]

    def end(self) -> str:
        """End it; returns the last line of what it said besides."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        assert self.process.stderr is not None
        told = self.process.stderr.read().strip().splitlines()
        self.process.wait(timeout=START_S)
        return told[-1][:200] if told else "nothing said"


def figures(
    python: Path, *, threads: int, rounds: int, state: Callable[[str, str], None], model: Path | None = None
) -> Iterator[Result]:
    """Yield each cell's ratio, and the times of each engine. `state` gets versions, and who was skipped. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        copy = _copied(model or minilm(), Path(folder))
        engines = list(_engines(python, copy, threads, state))
        for each in engines:
            stack.callback(each.end)
        for number, length in CELLS:
            texts = _texts(copy, number, length)
            times, vectors = {each.name: list[float]() for each in engines}, dict[str, list[float]]()
            for each in engines:
                _, vectors[each.name] = each.turn(texts, 0)  # warm
            _check(vectors)
            for _ in range(rounds):
                for each in engines:
                    times[each.name].append(each.turn(texts, SECONDS)[0])
            yield from _results(f"{number} x {length}", times)


def _results(cell: str, times: dict[str, list[float]]) -> Iterator[Result]:
    others = [name for name in times if name != OURS]
    if others:
        best = min(others, key=lambda name: statistics.median(times[name]))
        ratios = [theirs / ours for ours, theirs in zip(times[OURS], times[best], strict=True)]
        value = statistics.median(ratios)
        yield Result(name=f"{cell}: times the better", value=value, unit="times", better="higher", target=TARGET)
        for which, end in (("least", min(ratios)), ("most", max(ratios))):
            yield Result(name=f"{cell}: times the better, {which} of rounds", value=end, unit="times", better="higher")
    for name, own in times.items():
        yield Result(name=f"{cell}: {name}", value=1000 * statistics.median(own), unit="ms", better="lower")
        spread = 100 * (max(own) - min(own)) / statistics.median(own)
        yield Result(name=f"{cell}: {name}, spread", value=spread, unit="%", better="lower")


def _engines(python: Path, model: Path, threads: int, state: Callable[[str, str], None]) -> Iterator[Engine]:
    Engine.started("export", python, model, threads).end()
    for name in (OURS, *THEIRS):
        engine = Engine.started(name, Path(sys.executable) if name == OURS else python, model, threads)
        answer = engine.said()
        if answer is None:
            why = engine.end()
            if name == OURS:
                raise RuntimeError(f"{name} did not start: {why}")
            state(name, f"skipped: {why}")
            continue
        state(name, answer["version"])
        yield engine


def _copied(model: Path, folder: Path) -> Path:
    """The model with its own longest text in place of sentence-transformers' 256 tokens."""
    for path in model.rglob("*"):
        link = folder / path.relative_to(model)
        if path.is_dir():
            link.mkdir(parents=True, exist_ok=True)
        else:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    own = folder / "sentence_bert_config.json"
    own.unlink(missing_ok=True)
    own.write_text(json.dumps({"max_seq_length": config["max_position_embeddings"], "do_lower_case": False}))
    return folder


def _texts(model: Path, number: int, length: int) -> list[str]:
    """Texts of exactly so many tokens, each of other words. Raises RuntimeError for a tokenizer that parts them."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and word.islower())
    ends, draw = tokenizer.num_special_tokens_to_add(False), random.Random(length)
    texts = [" ".join(draw.choices(words, k=length - ends)) for _ in range(number)]
    if {len(each.ids) for each in tokenizer.encode_batch(texts)} != {length}:
        raise RuntimeError("the tokenizer parts words of its own vocabulary")
    return texts


def _check(vectors: dict[str, list[float]]) -> None:
    """Raises RuntimeError where an engine's vector is not ours."""
    for name, vector in vectors.items():
        if (cosine := float(np.dot(vectors[OURS], vector))) < LEAST_COSINE:
            raise RuntimeError(f"{name}: the cosine of its vector and ours is {cosine:.5f}")


def processor() -> str:
    """The processor's name."""
    return _of_cpuinfo("model name")


def flags() -> str:
    """Its vector instructions."""
    return " ".join(each for each in _of_cpuinfo("flags").split() if each.startswith(("avx", "amx", "fma", "f16c")))


def _of_cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "unknown")
