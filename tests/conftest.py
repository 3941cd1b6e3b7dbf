"""Fixtures of all tests: real servers, one of each for a whole run."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import inspect
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from services.runtime.servers import run_nats, run_redis
from tests.quick import mark_the_others_long

# Torch's threads of several tests wait for each other's cores, spinning: kernels' tests took three times the processor time.
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # read when torch is loaded, which is later, and by the processes of tests
CPUINFO = Path("/proc/cpuinfo")
LONGEST_S = 200.0  # of an async test's body
LONGEST_ID = 80

# `make test` tries the same examples each time: a find of chance stops nobody's unrelated change. `make long` searches.
BUSY = [HealthCheck.too_slow]  # a busy machine draws slowly
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=BUSY)
settings.register_profile("search", max_examples=1_000, deadline=None, suppress_health_check=BUSY)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=100, help="runs of tests/simulation")


def pytest_configure() -> None:
    if CPUINFO.is_file() and "amx_tile" in CPUINFO.read_text():  # else no test has to wait for torch
        importlib.import_module("engine.processor").settle()
    gc.disable()  # while modules are loaded: it would look through all of them again and again


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_the_others_long(items, are_all=not any("::" in arg for arg in config.args))


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection looks through it later: not now either, since it is nearly all there for good
    gc.enable()


def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """Name a failed test at once: an F among thousands of dots would be anonymous until the end of the run."""
    if not isinstance(report, pytest.TestReport) or not report.failed:
        return None
    category, word = ("failed", "FAILED") if report.when == "call" else ("error", "ERROR")
    return category, f"\n{word} {report.nodeid}\n", word


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a table's row by the fields in it, which pytest would only number: `[{"top_p": 2}-400]`."""
    if not isinstance(val, dict | list | tuple):
        return None
    try:
        text = json.dumps(val)
    except (TypeError, ValueError):
        return None
    return text if len(text) <= LONGEST_ID else f"{text[: LONGEST_ID - 1]}~"


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test that waits for ever fails where it waits. (One that isn't async ends the run, by `make`'s faulthandler_timeout.)"""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _in_time(item.obj)


def _in_time(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., Coroutine[object, object, None]]:
    @functools.wraps(test)
    async def bounded(**fixtures: object) -> None:
        async with asyncio.timeout(LONGEST_S):
            await test(**fixtures)

    return bounded


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nats_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A NATS server with JetStream, shared: name what you make after your test."""
    async with run_nats(data_dir=tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A Redis or Valkey server, shared: flush it first if you count what is in it."""
    async with run_redis(data_dir=tmp_path_factory.mktemp("redis")) as server:
        yield server.url
