"""Three models in the place of two, loaded and unloaded under load: lost and wrong answers, memory, shares, times.

    python -m benchmarks.models.swaps --seconds 1800 --out benchmarks/results

SmolLM2-135M and Gemma 3 270M (from the Python index) and the demo model, on a CPU. Every answer is compared with that of the same
model alone, by an engine without servers. Askers draw models and rests, so that models become idle and are unloaded; now and then
a canary's alias is asked in a burst. Nothing here sleeps until a figure fits: what the targets miss is on the page.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from baton import LLM, SamplingParams
from benchmarks.environment import ROOT, describe
from benchmarks.models.stack import Stack, running
from benchmarks.results_format import Result, ResultsPage, notes_of
from services.runtime.models.packaged import fetched
from tests.real import packages

STEM = "swaps"
TOKENS = 16
PROMPTS = ("The capital of France is", "Once upon a time there was", "In the morning I like to", "Water is made of")
CANARY, WHOLE, SMALL, PERCENT = "canary", "demo", "smollm2", 5.0
ASKERS = 3
RESTS_S = (0.0, 0.0, 0.0, 6.0)
KEEP_ALIVE_S = 3
MAX_LOADED = 2
ROUNDS = 5
BURST, BURST_WIDTH, BURST_EACH_S = 250, 4, 40.0
LEFT_MB = 64.0  # caches of gateway and servers, not a model
ANSWER_S = 300.0
DTYPE = "float32"  # a batch rounds no answer to another one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="under load")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the times without load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    models = {"smollm2": fetched("smollm2", print), "gemma3": packages.gemma3(), "demo": ROOT / "demo"}
    facts = describe("benchmarks.models.swaps", sys.argv[1:], torch.device("cpu"))
    facts["load"] = f"{', '.join(f'{one:.1f}' for one in os.getloadavg())} before; {os.cpu_count()} cores"
    facts["models"] = f"{', '.join(models)}; --max-loaded {MAX_LOADED} --keep-alive {KEEP_ALIVE_S}s"
    expected = {name: alone(model) for name, model in models.items()}
    with tempfile.TemporaryDirectory() as folder:
        results, remarks = asyncio.run(measured(models, expected, Path(folder), options))
    facts["load after"] = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    for result in results:
        print(f"{result.name}: {result.value:.3f} {result.unit}{'' if result.met is not False else '   MISSED'}")
    print(*remarks, sep="\n")
    if options.out is not None:
        page = ResultsPage(
            options.out, STEM, title="Models swapped under load", facts=facts, notes=notes_of(STEM, options.out)
        )
        page.remarks += remarks
        page.add(*results)
    return int(any(result.met is False for result in results))


def alone(model: Path) -> dict[str, str]:
    """The answers of a model by an engine without servers."""
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(model), max_model_len=256, dtype=DTYPE) as llm:
        return {prompt: llm.generate(prompt, greedy)[0].outputs[0].text for prompt in PROMPTS}


@dataclass(slots=True)
class Tally:
    """The answers under load."""

    answers: Counter[str] = field(default_factory=Counter)
    chosen: Counter[str] = field(default_factory=Counter)  # by the canary's alias
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)


async def measured(
    models: dict[str, Path], expected: dict[str, dict[str, str]], folder: Path, options: argparse.Namespace
) -> tuple[list[Result], list[str]]:
    """Start, measure times without load, then load, then look at what is left."""
    words = [word for name, path in models.items() for word in ("--model", f"{name}={path}")]
    words += ["--alias", f"{CANARY}={WHOLE}@{100 - PERCENT:g}%,{CANARY}={SMALL}@{PERCENT:g}%"]
    words += [
        "--keep-alive",
        f"{KEEP_ALIVE_S}s",
        "--max-loaded",
        str(MAX_LOADED),
        "--max-model-len",
        "256",
        "--dtype",
        DTYPE,
    ]
    async with running(words, folder) as stack:
        tally = Tally()
        times = await quiet(stack, list(models), options.rounds)
        for name in models:  # what is imported and cached once is no model's memory
            await ask(stack.client, tally, name, PROMPTS[0], expected)
        await stack.is_idle()
        idle_mb, loads = stack.memory_mb(), stack.loads()
        began = time.monotonic()
        await under_load(stack, tally, expected, options)
        seconds = time.monotonic() - began
        loads = Counter(stack.loads()) - Counter(loads)
        await stack.is_idle()
        left_mb = stack.memory_mb() - idle_mb
    return results_of(tally, times, loads, left_mb, idle_mb), [
        f"{sum(tally.answers.values())} answers and {sum(tally.chosen.values())} of the canary in {seconds:.0f} s under load; "
        f"loaded {', '.join(f'{name} {count} times' for name, count in sorted(loads.items()))}",
        f"memory is private bytes of all processes: {idle_mb:.0f} MB with no model loaded",
        *tally.lost[:5],
        *tally.wrong[:5],
    ]


async def quiet(stack: Stack, models: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds to the first token of a model: never loaded before, loaded again, woken, and in another one's place."""
    times: dict[str, list[float]] = {}
    for name in models:
        times[f"{name}: first start"] = [await first_token(stack.client, name)]
        await stack.unloaded(name)
    for _ in range(rounds):
        for name in models:
            times.setdefault(f"{name}: loaded again", []).append(await first_token(stack.client, name))
            if await stack.parked(name):
                times.setdefault(f"{name}: woken", []).append(await first_token(stack.client, name))
                await stack.unloaded(name)
    for _ in range(rounds):
        for index, name in enumerate(models):
            await asyncio.gather(*(stack.stays(models[index - other]) for other in (1, 2)))
            times.setdefault(f"{name}: in an idle one's place", []).append(await first_token(stack.client, name))
            await stack.unloaded(*models)
    return times


async def first_token(client: httpx.AsyncClient, model: str) -> float:
    """Seconds from the request to its first text."""
    began, seconds = time.perf_counter(), 0.0
    body = {"model": model, "prompt": PROMPTS[0], "max_tokens": 1, "temperature": 0, "stream": True, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith('data: {"') and not seconds:
                seconds = time.perf_counter() - began
    if not seconds:
        raise RuntimeError(f"{model} answered without a token")
    return seconds


async def under_load(
    stack: Stack, tally: Tally, expected: dict[str, dict[str, str]], options: argparse.Namespace
) -> None:
    """Ask for the given time."""
    until = time.monotonic() + options.seconds

    async def keep_asking(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < until:
            await ask(stack.client, tally, chance.choice(list(expected)), chance.choice(PROMPTS), expected)
            await asyncio.sleep(chance.choice(RESTS_S))

    async def bursts() -> None:
        while time.monotonic() < until:
            await burst(stack.client, tally, expected)
            await asyncio.sleep(min(BURST_EACH_S, max(0.0, until - time.monotonic())))

    await asyncio.gather(bursts(), *(keep_asking(options.seed + index) for index in range(ASKERS)))


async def burst(client: httpx.AsyncClient, tally: Tally, expected: dict[str, dict[str, str]]) -> None:
    """Ask the canary's alias for one token each."""
    left = iter(range(BURST))

    async def some() -> None:
        for index in left:
            prompt = PROMPTS[index % len(PROMPTS)]
            answer = await posted(client, tally, CANARY, prompt, tokens=1)
            if answer is None:
                continue
            model = answer.headers["x-baton-model"]
            tally.chosen[model] += 1
            text = answer.json()["choices"][0]["text"]
            if not expected[model][prompt].startswith(text):
                tally.wrong.append(f"{CANARY} by {model}, {prompt!r}: {text!r}")

    await asyncio.gather(*(some() for _ in range(BURST_WIDTH)))


async def ask(
    client: httpx.AsyncClient, tally: Tally, model: str, prompt: str, expected: dict[str, dict[str, str]]
) -> None:
    """Ask a model, and compare."""
    began = time.perf_counter()
    answer = await posted(client, tally, model, prompt, tokens=TOKENS)
    if answer is None:
        return
    tally.waits_s.append(time.perf_counter() - began)
    tally.answers[model] += 1
    text = answer.json()["choices"][0]["text"]
    if answer.json()["model"] != model or text != expected[model][prompt]:
        tally.wrong.append(f"{model}, {prompt!r}: {text!r} for {expected[model][prompt]!r}")


async def posted(
    client: httpx.AsyncClient, tally: Tally, model: str, prompt: str, *, tokens: int
) -> httpx.Response | None:
    """An answer; None, and noted, if there is none."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    try:
        answer = await client.post("/v1/completions", json=body | {"ignore_eos": True}, timeout=ANSWER_S)
    except httpx.HTTPError as error:
        tally.lost.append(f"{model}: {error!r}")
        return None
    if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != tokens:
        tally.lost.append(f"{model}: {answer.status_code} {answer.text[:300]}")
        return None
    return answer


def results_of(
    tally: Tally, times: dict[str, list[float]], loads: Counter[str], left_mb: float, idle_mb: float
) -> list[Result]:
    chosen, asked = tally.chosen, sum(tally.chosen.values())
    off = abs(100 * chosen[SMALL] / asked - PERCENT) if asked else 100.0
    found = [
        Result(name="load: requests lost", value=len(tally.lost), unit="requests", better="lower", target=0),
        Result(name="load: answers of another model", value=len(tally.wrong), unit="answers", better="lower", target=0),
        Result(name="memory above idle", value=max(0.0, left_mb), unit="MB", better="lower", target=LEFT_MB),
        Result(name="canary: off its share", value=off, unit="points", better="lower", target=1.0),
        Result(name="load: answers", value=sum(tally.answers.values()), unit="answers", better="higher"),
        Result(name="canary: answers", value=asked, unit="answers", better="higher"),
        Result(name="load: models loaded", value=sum(loads.values()), unit="times", better="higher"),
        Result(name="memory without a model", value=idle_mb, unit="MB", better="lower"),
    ]
    for percent in (50, 90, 99):
        value = _percentile(tally.waits_s, percent)
        found.append(Result(name=f"load: answer, p{percent}", value=value, unit="s", better="lower"))
    for name, values in times.items():
        found.append(Result(name=name, value=statistics.median(values), unit="s", better="lower"))
    return found


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0


if __name__ == "__main__":
    sys.exit(main())
