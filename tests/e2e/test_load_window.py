"""Kills while models load: workers are held where they load, then a worker, the host or the gateway is killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e import pulling
from tests.e2e.loading import LEFT_BYTES, PROMPT, TOKENS, ask, eventually, memory_of, serving
from tests.e2e.pulling import NAMES, pull, put, tokens_of
from tests.e2e.stack import PATIENCE_S, Up
from tests.hub import hub_served
from tests.models import build_tiny_model
from tests.reference import greedy_tokens

MODELS = ("llama", "qwen")
KEPT = "2s"
ATTEMPTS = 5
Ask = Callable[[], Coroutine[None, None, list[int]]]
BODY = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": build_tiny_model(folder / "llama", "llama"),
        "qwen": build_tiny_model(folder / "qwen", "qwen3", seed=1),
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    found = {name: greedy_tokens(folder, [PROMPT], TOKENS)[0] for name, folder in folders.items()}
    assert found["llama"] != found["qwen"]
    return found


async def states(client: httpx.AsyncClient) -> set[str]:
    """Each model that hosts have, and its status, as `llama loading`."""
    lines = (await client.get("/metrics")).text.splitlines()
    told = [line for line in lines if line.startswith("baton_hosted_models{") and line.endswith(" 1.0")]
    return {f"{line.split(chr(34))[1]} {line.split(chr(34))[3]}" for line in told}


def workers(stack: Up) -> list[psutil.Process]:
    return stack.children("services.decode")


@contextlib.asynccontextmanager
async def held(
    stack: Up, client: httpx.AsyncClient, asks: Mapping[str, Ask]
) -> AsyncIterator[tuple[list[psutil.Process], list[asyncio.Task[list[int]]]]]:
    """Ask models, and stop their workers while they load; those that live go on at the end.

    On a busy machine one may be ready before it is seen: then all answer, are unloaded, and are asked again.
    """
    for _ in range(ATTEMPTS):
        asking = [asyncio.create_task(ask()) for ask in asks.values()]
        found = list[psutil.Process]()

        def are_stopped(found: list[psutil.Process] = found) -> bool:
            for process in workers(stack):
                if process not in found:
                    process.suspend()
                    found.append(process)
            return len(found) == len(asks)

        try:
            await eventually(are_stopped)
            if {f"{model} loading" for model in asks} <= await states(client):
                yield found, asking
                return
        finally:
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.resume()
        await asyncio.gather(*asking)
        await eventually(lambda: workers(stack) == [])
    raise AssertionError(f"they were ready first, {ATTEMPTS} times")


@pytest.mark.long
async def test_who_is_killed_while_models_load_takes_no_answer_along_and_leaves_no_memory(
    folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    async with serving(folders, tmp_path / "data", "--prefill", "0", "--keep-alive", KEPT) as (stack, client):
        for model in MODELS:  # caches of gateway and servers are no model's
            assert await ask(client, model) == expected[model]
        await eventually(lambda: workers(stack) == [])
        idle = memory_of(stack)
        for victim in ("worker", "host", "gateway"):
            asks = {model: partial(ask, client, model) for model in MODELS}
            async with held(stack, client, asks) as (loading, asking):
                one = loading[0] if victim == "worker" else stack.child(f"services.{victim}")
                one.kill()
                if victim == "gateway":
                    await stack.says("restarting gateway")
            if victim == "gateway":  # whose clients go with it, and what they waited for is loaded for the next ones
                told = await asyncio.gather(*asking, return_exceptions=True)
                assert all(isinstance(error, httpx.TransportError) for error in told)
                asking = [asyncio.create_task(_from_the_next(client, model)) for model in MODELS]
            assert await asyncio.gather(*asking) == [expected[model] for model in MODELS], victim
            await eventually(lambda: workers(stack) == [])
        assert memory_of(stack) - idle < LEFT_BYTES


async def _from_the_next(client: httpx.AsyncClient, model: str) -> list[int]:
    """An answer of the gateway that starts again: it knows the model, or says that it may come."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(httpx.TransportError):  # it isn't there yet
                answer = await client.post("/v1/completions", json=BODY | {"model": model})
                assert answer.status_code in (200, 503), answer.text
                if answer.status_code == 200:
                    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
                    return tokens
            await asyncio.sleep(0.1)


@pytest.mark.long
async def test_a_name_on_the_bus_whose_model_changes_with_kills_answers_for_neither_wrongly(
    folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """One place, so both models have the same worker's name, one after the other."""
    with hub_served() as hub:
        for name, folder in folders.items():
            put(hub, f"org/{name}", folder)
        options = ("--keep-alive", KEPT, "--max-loaded", "1")
        async with pulling.serving(hub, tmp_path, *options) as (stack, client):
            for name in NAMES:
                await pull(client, name)
            first, *others = NAMES
            async with held(stack, client, {first: partial(tokens_of, client, first)}) as (_, asking):
                asking += [asyncio.create_task(tokens_of(client, name)) for name in others]
                stack.child("services.host").kill()
            assert await asyncio.gather(*asking) == [expected[name.removeprefix("org/")] for name in NAMES]
            for _ in range(2):
                again = [asyncio.create_task(tokens_of(client, name)) for name in NAMES * 2]
                await eventually(lambda: workers(stack))
                with contextlib.suppress(psutil.Error, IndexError):
                    workers(stack)[0].kill()  # as it loads, or serves, or goes
                assert await asyncio.gather(*again) == [expected[name.removeprefix("org/")] for name in NAMES * 2]
            await eventually(lambda: workers(stack) == [])
            stack.child("services.gateway").kill()
            assert await _from_the_next(client, NAMES[1]) == expected["qwen"]
