"""A recorded trace played to a whole Baton with a host tier, beside the simulation of the same sizes: tokens found again.

    python -m benchmarks.sessions.replay --out DIR --trace conversation_trace.jsonl             on a CPU, in minutes
    python -m benchmarks.sessions.replay --out DIR --trace F --simulate-only --host-gb 250      nothing is served
    python -m benchmarks.sessions.replay --out DIR --trace F --device cuda --model F \\
        --block-tokens 512 --longest 32000 --pool-gb 12 --first 2000

A trace tells prompts as hashes of 512 tokens each. Here a hash becomes `--block-tokens` tokens, and pool and host memory are
in proportion: `--pool-gb` and `--host-gb` are what they take of Llama-3.1-8B in bfloat16, 128 KiB a token, at 512; what is
served has whole MiB. The simulation runs the worker's own pool and tier, without bytes, one prompt after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import httpx
import torch

from benchmarks.environment import ROOT, describe
from benchmarks.results_format import Result, ResultsPage, notes_of
from benchmarks.sessions.agents import Asked, asking
from benchmarks.sessions.baton import running, token_bytes
from benchmarks.sessions.simulated import Simulated
from benchmarks.sessions.trace import Turn
from benchmarks.simulate.trace import TRACE_BLOCK, TraceRequest, conversations, read_trace
from common.messages import KVLayout

BLOCK = 16  # tokens
MIB = 1 << 20
LLAMA_TOKEN_BYTES = 128 << 10  # Llama-3.1-8B in bfloat16
AGREES_WITHIN = 10.0  # % of the simulated share
MADE_UP_PER_S = 3.4  # requests, as in Mooncake's trace
TOLD_EVERY_S = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 when a request failed, else 0. A missed target is no failure."""
    options = _parse(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    is_gpu = options.device.startswith("cuda")
    facts = describe("benchmarks.sessions.replay", given, torch.device("cuda:0" if is_gpu else "cpu"))
    asked = _requests(options)
    requests = [each for each in asked if _length(each, options) <= options.longest]
    pool, host = (_blocks(gb, options) for gb in (options.pool_gb, options.host_gb))
    facts["trace"] = (
        f"{options.trace.name if options.trace else 'made up'}: {len(requests)} of {len(asked)} prompts, those of at most "
        f"{options.longest} tokens; {options.block_tokens} tokens for each {TRACE_BLOCK} recorded"
    )
    facts["memory"] = (
        f"{pool} and {host} blocks of {BLOCK} tokens in the pool and in host memory, at the recorded lengths "
        f"{_gigabytes(pool, options):.1f} and {_gigabytes(host, options):.1f} GB of an 8B Llama"
    )
    notes = notes_of(options.name, options.out)
    page = ResultsPage(options.out, options.name, title="A trace played again", facts=facts, notes=notes)
    known = options.block_tokens * _known(requests) / sum(_length(each, options) for each in requests)
    _add(page, "seen_before", 100 * known)
    _add(page, "pool_simulated", _simulated(requests, options, pool, 0))
    simulated = _add(page, "host_simulated", _simulated(requests, options, pool, host))
    if not options.simulate_only:
        served = _add(page, "host_served", _served(page, requests, options, pool, host))
        off = 100 * abs(served - simulated) / max(simulated, 1e-9)
        page.add(Result(name="served_off_simulated", value=off, unit="% of it", better="lower", target=AGREES_WITHIN))
        print(f"served_off_simulated {off:.2g} %", flush=True)
    return 1 if page.remarks else 0


def _requests(options: argparse.Namespace) -> list[TraceRequest]:
    if options.trace is None:
        return list(conversations(options.first or 1000, per_second=MADE_UP_PER_S))
    return read_trace(options.trace)[: options.first or None]


def _scaled(tokens: int, options: argparse.Namespace) -> int:
    """Tokens of the trace as they are played."""
    return max(1, round(tokens * options.block_tokens / TRACE_BLOCK))


def _length(request: TraceRequest, options: argparse.Namespace) -> int:
    """Tokens of a prompt as it is played: its hashes, and one more at least."""
    return max(_scaled(request.prompt_tokens, options), len(request.blocks) * options.block_tokens + 1)


def _blocks(gigabytes: float, options: argparse.Namespace) -> int:
    """Blocks for what takes so many GB of an 8B Llama at the recorded lengths; what is served has whole MiB of them."""
    blocks = gigabytes * 1e9 / LLAMA_TOKEN_BYTES * options.block_tokens / TRACE_BLOCK / BLOCK
    if options.simulate_only:
        return int(blocks)
    return int(max(1, round(blocks * _block_bytes(options) / MIB)) * MIB / _block_bytes(options))


def _gigabytes(blocks: int, options: argparse.Namespace) -> float:
    """The other way round."""
    return blocks * BLOCK * TRACE_BLOCK / options.block_tokens * LLAMA_TOKEN_BYTES / 1e9


def _block_bytes(options: argparse.Namespace) -> float:
    return BLOCK * token_bytes(options.model, options.device)


def _known(requests: Sequence[TraceRequest]) -> int:
    """Hashes of prompts' beginnings that an earlier prompt has: nobody finds more."""
    seen, found = set[bytes](), 0
    for each in requests:
        found += next((at for at, block in enumerate(each.blocks) if block not in seen), len(each.blocks))
        seen.update(each.blocks)
    return found


def _prompts(requests: Sequence[TraceRequest], options: argparse.Namespace) -> Iterator[list[int]]:
    """Token ids of each prompt: those of its hashes, and others that nobody else has."""
    vocab_size = int(json.loads((options.model / "config.json").read_text())["vocab_size"])
    random_ = random.Random(1)

    @lru_cache(maxsize=1 << 16)
    def block(name: bytes) -> tuple[int, ...]:
        own = random.Random(name)
        return tuple(own.randrange(vocab_size) for _ in range(options.block_tokens))

    for each in requests:
        prompt = [token for name in each.blocks for token in block(name)]
        yield prompt + [random_.randrange(vocab_size) for _ in range(_length(each, options) - len(prompt))]


def _simulated(requests: Sequence[TraceRequest], options: argparse.Namespace, pool: int, host: int) -> float:
    """% of the prompts' tokens that are found in a pool and host memory of so many blocks."""
    layout = KVLayout(num_blocks=pool, num_layers=1, block_size=BLOCK, num_kv_heads=1, head_dim=1, dtype="float32")
    worker, found, asked = Simulated(layout, num_slots=host), 0, 0
    for prompt in _prompts(requests, options):
        found, asked = found + worker.ask(prompt), asked + len(prompt)
    return 100 * found / asked


def _served(
    page: ResultsPage, requests: Sequence[TraceRequest], options: argparse.Namespace, pool: int, host: int
) -> float:
    """The same of a whole Baton, asked in the trace's order, `--at-once` prompts at a time."""
    pool_mb, host_mb = (math.ceil(blocks * _block_bytes(options) / MIB) for blocks in (pool, host))
    up = ["--kv-memory-mb", str(pool_mb), "--kv-host-mb", str(host_mb), "--max-model-len", str(options.longest + 16)]
    with running(
        options.model,
        device=options.device,
        port=options.port,
        out=options.out,
        arm=options.name,
        options=[*up, *options.up.split()],
    ) as url:
        played = asyncio.run(_play(url, options.model.resolve().name, _prompts(requests, options), options.at_once))
    failed = [each for each in played if each.error]
    if failed:
        page.remarks.append(f"{len(failed)} of {len(played)} requests failed: {failed[0].error}")
    return 100 * sum(each.cached for each in played) / sum(each.prompt_tokens for each in played)


async def _play(url: str, model: str, prompts: Iterator[list[int]], at_once: int) -> list[Asked]:
    played, told_at = list[Asked](), time.monotonic()
    async with asking(url, at_once) as ask:

        async def client() -> None:
            nonlocal told_at
            for prompt in prompts:
                asked = Asked(0, 0, len(prompt), 0)
                played.append(asked)
                try:
                    await ask(model, prompt, Turn((), 1, 0.0), asked)
                except (httpx.HTTPError, ValueError) as error:
                    asked.error = f"{type(error).__name__}: {error}"
                if time.monotonic() - told_at > TOLD_EVERY_S:
                    told_at = time.monotonic()
                    print(f"{len(played)} prompts asked", flush=True)

        await asyncio.gather(*(client() for _ in range(at_once)))
    return played


def _add(page: ResultsPage, name: str, share: float) -> float:
    page.add(Result(name=name, value=share, unit="% of prompts' tokens", better="higher"))
    print(f"{name} {share:.4g} %", flush=True)
    return share


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sessions.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default="sessions-replay", help="of the results page")
    parser.add_argument(
        "--trace", type=Path, help="a trace in Mooncake's form; default: conversations that are made up"
    )
    parser.add_argument(
        "--first", type=int, default=0, help="so many prompts of it; default: all, of made-up ones 1000"
    )
    parser.add_argument("--block-tokens", type=int, default=64, help=f"tokens for each {TRACE_BLOCK} of the trace")
    parser.add_argument("--pool-gb", type=float, default=60.0)
    parser.add_argument("--host-gb", type=float, default=64.0)
    parser.add_argument("--longest", type=int, default=16_000, help="tokens of a prompt; longer ones are left out")
    parser.add_argument("--at-once", type=int, default=4, help="prompts that are served at a time")
    parser.add_argument("--simulate-only", action="store_true", help="serve nothing")
    parser.add_argument("--model", type=Path, default=ROOT / "demo", help="folder of a model; default: the demo model")
    parser.add_argument("--device", default="fake:0:0", help="cuda, cpu or a fake one that computes nothing")
    parser.add_argument("--port", type=int, default=8392)
    parser.add_argument("--up", default="", help="further options of `baton up`")
    options = parser.parse_args(arguments)
    if options.block_tokens < BLOCK or options.block_tokens % BLOCK:
        parser.error(f"--block-tokens {options.block_tokens} is no multiple of {BLOCK}, a block of Baton")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
