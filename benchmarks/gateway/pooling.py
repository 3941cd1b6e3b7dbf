"""The gateway's CPU time for one input of a request for vectors: reading, tokenising, the bus, writing.

    python -m benchmarks.gateway.pooling [--out benchmarks/results]      two cores, about a minute

The gateway is a process with real servers. The worker is a stub, in this process: it hears the bus as a worker does and answers
at once, with the same row for each input. Texts are random words of a WordPiece vocabulary of 30,000, so that tokenising costs
what it costs for a published model of 384 features.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import string
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from benchmarks.environment import ROOT, describe
from benchmarks.gateway.serving import cpu_s
from benchmarks.results_format import Result, ResultsPage, notes_of
from common.blocks import tokenizer_fingerprint
from common.bus import NatsSettings, connect_bus
from engine.pooling.engine import PoolingInput
from modelfiles.pooling import Pooling, read_pooling
from services.runtime.servers import free_port, run_nats, run_redis
from services.worker.process import files_fingerprint
from worker.identity import Identity
from worker.pooling.pooler import Pooler, PoolerSettings
from worker.settings import ModelIdentity

MODEL, WIDTH, VOCAB, LONGEST = "stub", 384, 30_000, 512
INPUTS, WORDS = 32, (16, 100)  # a request's texts; words of each, which become 1.2 tokens on average
AT_ONCE, REQUESTS, ROUNDS, START_S = 4, 60, 7, 60.0
MOST_US = 150.0  # for an input of a request with 32 short ones


class Stub:
    """Answers at once: every vector is the same."""

    fingerprint, vocab_size, max_model_len = "stub", VOCAB, LONGEST
    found: Sequence[int] = ()

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._row = torch.nn.functional.normalize(torch.rand(1, WIDTH), dim=1)

    def compute(self, inputs: Sequence[PoolingInput]) -> list[torch.Tensor]:
        return [self._row[:, : one.dimensions or WIDTH] for one in inputs]


@dataclass(frozen=True, slots=True)
class Way:
    """A form of the request."""

    name: str
    path: str
    words: int
    inputs: int
    fields: dict[str, Any]
    field: str = "input"

    def body(self, words: Sequence[str], chance: random.Random) -> bytes:
        texts = [" ".join(chance.choices(words, k=self.words)) for _ in range(self.inputs)]
        return json.dumps({"model": MODEL, self.field: texts} | self.fields).encode()


_BASE64 = {"encoding_format": "base64"}
WAYS = (
    Way("base64_32_short", "/v1/embeddings", WORDS[0], INPUTS, _BASE64),
    Way("base64_32_long", "/v1/embeddings", WORDS[1], INPUTS, _BASE64),
    Way("float_32_short", "/v1/embeddings", WORDS[0], INPUTS, {}),
    Way("base64_1_short", "/v1/embeddings", WORDS[0], 1, _BASE64),
    Way("tei_32_short", "/embed", WORDS[0], INPUTS, {}, "inputs"),
)


def write_model(folder: Path) -> list[str]:
    """Configuration and tokenizer of a model without weights; the whole words of its vocabulary."""
    chance = random.Random(0)
    letters = string.ascii_lowercase
    words = list(dict.fromkeys("".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(2 * VOCAB)))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {text: at for at, text in enumerate([*special, *words][:VOCAB])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": VOCAB, "hidden_size": WIDTH}
    config |= {"num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONGEST}))
    return [word for word in words if word in vocabulary] + ["supercalifragilistic", "x9", "café"] * 200


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[str, int]]:
    """Servers, stub and gateway: its URL and process id."""
    logs = folder / "logs"
    async with run_nats(data_dir=folder / "nats") as nats, run_redis(data_dir=folder / "redis") as redis:
        port, stopping = free_port(), asyncio.Event()
        command = [sys.executable, "-m", "services.gateway", "--model", f"{MODEL}={folder}", "--port", str(port)]
        command += ["--nats-url", nats.url, "--redis-url", redis.url, "--batch-store-mb", "0", "--log-requests", "off"]
        with logs.open("wb") as log:
            gateway = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=log, stderr=log)
            async with connect_bus(NatsSettings(url=nats.url), name="stub-0", owns_streams=False) as bus:
                raw = (folder / "tokenizer.json").read_bytes()
                identity = ModelIdentity(
                    MODEL, tokenizer_fingerprint=tokenizer_fingerprint(raw), files_fingerprint=files_fingerprint(folder)
                )
                settings = PoolerSettings(served=identity, max_batch_tokens=1 << 16, step_timeout_s=60, drain_s=5)
                pooler = Pooler(
                    bus=bus,
                    identity=Identity("stub-0", 1),
                    engine=Stub(read_pooling(folder)),
                    settings=settings,
                    end_process=sys.exit,
                )
                task = asyncio.create_task(pooler.run(stopping))
                url = f"http://127.0.0.1:{port}"
                try:
                    await _until_ready(url, gateway, logs)
                    yield url, gateway.pid
                finally:
                    stopping.set()
                    await task
                    gateway.terminate()
                    await gateway.wait()


async def _until_ready(url: str, gateway: asyncio.subprocess.Process, logs: Path) -> None:
    give_up_at = time.monotonic() + START_S
    async with httpx.AsyncClient(base_url=url, timeout=5) as client:
        while time.monotonic() < give_up_at and gateway.returncode is None:
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.2)
    raise SystemExit(f"the gateway did not get ready:\n{logs.read_text()[-2000:]}")


async def cost_us(client: httpx.AsyncClient, pid: int, way: Way, bodies: Sequence[bytes]) -> float:
    """Microseconds of the gateway's CPU for an input."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(body: bytes) -> None:
        async with slots:
            answer = await client.post(way.path, content=body, headers={"content-type": "application/json"})
            answer.raise_for_status()

    began = cpu_s(pid)
    await asyncio.gather(*(one(body) for body in bodies))
    return 1e6 * (cpu_s(pid) - began) / (len(bodies) * way.inputs)


async def measured(rounds: int) -> dict[str, float]:
    """The median of the rounds, by way."""
    chance, found = random.Random(1), {way.name: list[float]() for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        words = write_model(Path(name))
        async with serving(Path(name)) as (url, pid), httpx.AsyncClient(base_url=url, timeout=60) as client:
            bodies = {way.name: [way.body(words, chance) for _ in range(REQUESTS)] for way in WAYS}
            for way in WAYS:  # everything is warm
                await cost_us(client, pid, way, bodies[way.name][: REQUESTS // 4])
            for _ in range(rounds):
                for way in WAYS:
                    found[way.name].append(await cost_us(client, pid, way, bodies[way.name]))
    return {name: median(costs) for name, costs in found.items()}


def main(arguments: Sequence[str]) -> int:
    """Print the figures; with --out keep them as a page, too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    facts = describe("benchmarks.gateway.pooling", arguments, torch.device("cpu"))
    costs = asyncio.run(measured(options.rounds))
    results = [
        Result(
            name=name,
            value=cost,
            unit="us",
            better="lower",
            target=MOST_US if name == WAYS[0].name else None,
        )
        for name, cost in costs.items()
    ]
    for result in results:
        print(f"{result.name}: {result.value:.0f} us of CPU an input")
    if options.out is not None:
        title = "What an input of a request for vectors costs the gateway"
        ResultsPage(options.out, "gateway-pooling", title=title, facts=facts, notes=notes_of("gateway-pooling")).add(
            *results
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
