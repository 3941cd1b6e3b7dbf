"""Baton beside llama-server on the same file, by HTTP, in turn: as a person who has one of them on a laptop finds them.

    python -m benchmarks.cpu.beside_llama_server --server PATH/llama-server --out benchmarks/results
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python -m benchmarks.cpu.beside_llama_server …     Baton by AVX2

`--server` is llama.cpp's, which has no package that pip installs: its source is in that of llama-cpp-python
(`pip download --no-binary :all: --no-deps llama-cpp-python`, then `vendor/llama.cpp`, `cmake -B build` and
`cmake --build build --target llama-server`). Both have as many threads. Times are a client's, so the machine must have nothing
else to do; beside them are tokens a second of all of a server's CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import torch

from benchmarks.cpu.beside import report
from benchmarks.environment import ROOT, describe
from services.runtime.models.packaged import fetched
from services.runtime.servers import free_port

REACH = {"one stream": 0.8, "eight streams": 1.2, "prompt": 1.4}
STREAMS, TOKENS, PROMPT_WORDS, CONTEXT = 8, 96, 700, 2048
READY_S, ANSWER_S, STOP_S, POLL_S = 120.0, 300.0, 60.0, 0.01
WORDS = ["river", "stone", "light", "paper", "garden", "window", "music", "winter", "bridge", "letter"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=Path, required=True, help="llama-server")
    parser.add_argument("--out", type=Path, help="folder for the page and its figures")
    parser.add_argument("--model", type=Path, help="a GGUF file; SmolLM2-135M-Instruct in Q4_1 by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if not os.access(options.server, os.X_OK):
        parser.error(f"--server {options.server}: no program is there; build llama.cpp's target llama-server")
    file = options.model or fetched("smollm2", lambda line: print(line, file=sys.stderr))
    rounds = []
    for number in range(options.rounds):
        measured = {who: asyncio.run(_cells(who, file, options)) for who in ("baton", "llama-server")}
        rounds.append(measured)
        print(f"round {number + 1} of {options.rounds}: {json.dumps(measured)}", file=sys.stderr, flush=True)
    facts = describe("benchmarks.cpu.beside_llama_server", arguments, torch.device("cpu"))
    facts |= {"model": file.name, "threads": str(options.threads), "load": f"{os.getloadavg()[0]:.1f} in a minute"}
    title = "A model in four bits beside llama-server, by HTTP"
    report(rounds, "llama-server", REACH, out=options.out, stem="small-machines-http", title=title, facts=facts)
    return 0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers `/v1/completions`, its process, and when that was started."""

    process: psutil.Process
    client: httpx.AsyncClient
    started: float

    def cpu_s(self) -> float:
        """Seconds of all of its processes so far."""
        each = [self.process, *self.process.children(recursive=True)]
        return sum(sum(one.cpu_times()[:2]) for one in each)

    async def answer(self, prompt: str, tokens: int) -> list[float]:
        """Return when each piece of a streamed answer came."""
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": False,
        }
        came = []
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                raise RuntimeError((await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                if line.startswith("data: {") and any(one.get("text") for one in json.loads(line[6:])["choices"]):
                    came.append(time.perf_counter())
        return came


async def _cells(who: str, file: Path, options: argparse.Namespace) -> dict[str, float]:
    """One side's cells: tokens a second, also of its CPU time, and seconds from its start to the first token."""
    draw = random.Random(1)
    async with _serving(who, file, options) as server:
        first = await _until_it_answers(server)
        cells = {"cold start until the first token, s": first - server.started}
        for _ in range(2):  # kernels and caches of each kind are warm
            await server.answer(_words(draw, PROMPT_WORDS), 8)

        async def one() -> float:
            came = await server.answer(_words(draw, 20), TOKENS)
            return (TOKENS - 1) / (came[-1] - came[0])

        async def eight() -> float:
            began = time.perf_counter()
            await asyncio.gather(*(server.answer(_words(draw, 20), TOKENS) for _ in range(STREAMS)))
            return STREAMS * TOKENS / (time.perf_counter() - began)

        async def prompt() -> float:
            began = time.perf_counter()
            came = await server.answer(_words(draw, PROMPT_WORDS), 1)
            return PROMPT_WORDS / (came[0] - began)

        for name, tokens, cell in (
            ("one stream", TOKENS, one),
            ("eight streams", STREAMS * TOKENS, eight),
            ("prompt", PROMPT_WORDS, prompt),
        ):
            cells |= await _measured(name, tokens, cell, server)
    return cells


async def _measured(name: str, tokens: int, cell: Callable[[], Awaitable[float]], server: Server) -> dict[str, float]:
    """The median of three runs, and the tokens a second of all CPU time in them."""
    before = server.cpu_s()
    rates = [await cell() for _ in range(3)]
    return {name: statistics.median(rates), f"{name}, of CPU time": 3 * tokens / (server.cpu_s() - before)}


def _words(draw: random.Random, number: int) -> str:
    """Text of about a token a word, which no cache knows."""
    return " ".join(draw.choice(WORDS) for _ in range(number))


async def _until_it_answers(server: Server) -> float:
    """When the first token of the first answer came."""
    while True:
        try:
            return (await server.answer("Once", 4))[0]
        except (httpx.TransportError, RuntimeError):  # nobody listens yet, or it says that it loads
            if time.perf_counter() - server.started > READY_S or not server.process.is_running():
                raise
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def _serving(who: str, file: Path, options: argparse.Namespace) -> AsyncIterator[Server]:
    port, threads = free_port(), str(options.threads)
    if who == "baton":
        command = [str(ROOT / "baton"), "up", "--model", str(file), "--served-model-name", "model", "--port", str(port)]
        command += ["--max-model-len", str(CONTEXT), "--threads", threads]
    else:
        command = [str(options.server), "-m", str(file), "--port", str(port), "-t", threads, "--no-webui"]
        command += ["-c", str(STREAMS * CONTEXT), "-np", str(STREAMS)]
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=log, stderr=log)
        try:
            # llama-server closes connections that it said it would keep.
            one_each = httpx.Limits(max_keepalive_connections=0)
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S, limits=one_each
            ) as client:
                yield Server(psutil.Process(process.pid), client, started)
        except Exception:
            log.seek(0)
            print(log.read().decode(errors="replace")[-2000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGINT)
            await asyncio.wait_for(process.wait(), STOP_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
