# mypy: allow-untyped-calls
"""The application beside a worker for each model: gateway and workers in one process, on a bus in memory."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from common.peers import Peers
from engine.pooling.engine import PoolingConfig, PoolingEngine
from gateway.answers.catalogue import Catalogue
from gateway.app import HttpSettings, create_app
from gateway.placement.agreement import Own
from gateway.pooling.service import PoolingModels
from gateway.pooling.texts import TextTokenizer
from tests.fakes.bus import MemoryBus
from tests.fakes.generations import ScriptedGenerations, ScriptedWorkers
from tests.jina_models import build_jina
from tests.late_models import build_colbert, build_m3
from tests.pooling_models import build_pooling_model
from worker.identity import Identity
from worker.pooling.pooler import Pooler, PoolerSettings
from worker.settings import ModelIdentity


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {
        "cross": build_pooling_model(folder / "cross", "BertForSequenceClassification", num_labels=1),
        "mood": build_pooling_model(folder / "mood", "BertForSequenceClassification", num_labels=3),
        "mini": build_pooling_model(folder / "mini"),
        "late": build_colbert(folder / "late"),
        "m3": build_m3(folder / "m3"),
        "jina": build_jina(folder / "jina"),
    }
    prompts = '{"prompts": {"query": "the ", "document": ""}}'
    (made["mini"] / "config_sentence_transformers.json").write_text(prompts)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(models: dict[str, Path]) -> AsyncIterator[httpx.AsyncClient]:
    """The application beside a worker for each model."""
    bus, peers, stopping = MemoryBus(), Peers(), asyncio.Event()
    await peers.start(bus)
    tokenizers = {name: TextTokenizer.read(folder) for name, folder in models.items()}
    known = {name: Own(tokenizer=its.fingerprint) for name, its in tokenizers.items()}
    pooling = PoolingModels(bus, peers, tokenizers, known, gateway_id="g")
    running = [asyncio.create_task(pooler(bus, name, folder).run(stopping)) for name, folder in models.items()]
    script = ScriptedGenerations(lambda spec: [])
    catalogue = Catalogue(
        {},
        ScriptedWorkers(script),
        pooled={name: its.facts for name, its in tokenizers.items()},
        num_pooling=pooling.num_ready_of,
    )
    app = create_app(generations=script, catalogue=catalogue, settings=HttpSettings(), pooling=pooling)
    while pooling.num_ready < len(models):
        await asyncio.sleep(0.01)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", verify=False
    ) as opened:
        yield opened
    stopping.set()
    await asyncio.gather(*running)
    await peers.close()


def pooler(bus: MemoryBus, name: str, folder: Path) -> Pooler:
    settings = PoolerSettings(
        served=ModelIdentity(name, tokenizer_fingerprint=TextTokenizer.read(folder).fingerprint),
        max_batch_tokens=64,
        step_timeout_s=300,
        drain_s=60,
    )
    engine = PoolingEngine(PoolingConfig(model=folder))
    return Pooler(bus=bus, identity=Identity(f"of-{name}", 1), engine=engine, settings=settings, end_process=sys.exit)
