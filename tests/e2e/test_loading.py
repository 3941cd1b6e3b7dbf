"""Models that are loaded when they are asked for, and unloaded when idle: separate processes, and kills meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.loading import LEFT_BYTES, PROMPT, TOKENS, ask, eventually, memory_of, serving
from tests.e2e.stack import PATIENCE_S, ROOT
from tests.models import build_tiny_model
from tests.reference import greedy_tokens

MODELS = ("llama", "qwen")
POOL_BYTES = 64 << 20


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


async def until_said(client: httpx.AsyncClient, line: str) -> None:
    """Wait until the gateway's metrics have a line."""
    async with asyncio.timeout(PATIENCE_S):
        while line not in (await client.get("/metrics")).text.splitlines():
            await asyncio.sleep(0.05)


async def test_the_first_request_loads_its_model_alone_and_waits_for_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    async with serving(folders, tmp_path / "data", "--device", "fake", "--keep-alive", "5m") as (stack, client):
        assert (await client.get("/ready")).status_code == 200
        assert stack.children("services.decode") == []
        tokens = await ask(client, "qwen")
        assert len(tokens) == TOKENS
        [worker] = stack.children("services.decode")
        assert (await client.post("/sleep?model=qwen")).status_code == 200
        await until_said(client, 'baton_hosted_models{model_name="qwen",status="parked"} 1.0')
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert await ask(client, "qwen") == tokens  # by the same process
        assert [one.pid for one in stack.children("services.decode")] == [worker.pid]
        assert (await client.post("/sleep?model=qwen&level=2")).status_code == 200
        await eventually(lambda: stack.children("services.decode") == [])


@pytest.mark.long
async def test_an_idle_model_sleeps_with_its_weights_wakes_and_is_unloaded_after_its_time(
    folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    options = ("--keep-alive", "1s,6s", "--max-loaded", "1", "--prefill", "1", "--kv-memory-mb", "64")
    async with serving(folders, tmp_path / "data", *options) as (stack, client):
        assert await ask(client, "llama") == expected["llama"]
        await until_said(client, 'baton_hosted_models{model_name="llama",status="parked"} 1.0')
        pids = {one.pid for one in stack.children("services.decode")}
        assert await asyncio.gather(*(ask(client, model) for model in MODELS)) == [expected[model] for model in MODELS]
        assert pids <= {one.pid for one in stack.children("services.decode")}  # it woke
        for one in stack.children("services.decode"):
            one.kill()  # asleep or awake
        assert await asyncio.gather(*(ask(client, model) for model in MODELS)) == [expected[model] for model in MODELS]
        await eventually(lambda: stack.children("services.decode") == [])


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "second"),
    [
        (("--prefill", "0", "--tensor-parallel-size", "2"), "services.rank"),
        (("--prefill", "0", "--pipeline-parallel-size", "2"), "services.rank"),
        (("--prefill", "1", "--transport", "ucx"), "services.prefill"),
    ],
    ids=["ranks", "stages", "ucx"],
)
async def test_two_processes_sleep_and_wake_and_are_loaded_anew_if_one_dies_asleep(
    options: tuple[str, ...], second: str, folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    options = ("--keep-alive", "5m", "--kv-memory-mb", str(POOL_BYTES >> 20), *options)
    async with serving({"llama": folders["llama"]}, tmp_path / "data", *options) as (stack, client):

        def both() -> list[psutil.Process]:
            return [*stack.children("services.decode"), *stack.children(second)]

        async def until_asleep() -> None:
            assert (await client.post("/sleep?model=llama")).status_code == 200
            await until_said(client, 'baton_hosted_models{model_name="llama",status="parked"} 1.0')

        assert await ask(client, "llama") == expected["llama"]
        processes = both()
        assert len(processes) == 2
        await until_asleep()
        asleep = [one.memory_info().rss for one in processes]
        assert await ask(client, "llama") == expected["llama"]  # which wakes both
        assert both() == processes
        awake = [one.memory_info().rss for one in processes]  # a pool that woke has all its pages
        assert min(after - before for after, before in zip(awake, asleep, strict=True)) > POOL_BYTES // 2
        await until_asleep()
        fallen = [before - one.memory_info().rss for one, before in zip(processes, awake, strict=True)]
        assert min(fallen) > POOL_BYTES // 2
        assert await ask(client, "llama") == expected["llama"]
        await until_asleep()
        processes[1].kill()
        await eventually(lambda: not processes[0].is_running())
        said = (tmp_path / "data" / "logs" / "decode-0.log").read_text()
        assert (f"rank 1 (pid {processes[1].pid})" in said) == (second == "services.rank")
        assert await ask(client, "llama") == expected["llama"]
        assert not set(both()) & set(processes)


@pytest.mark.long
async def test_a_model_is_loaded_for_a_request_swapped_for_another_and_unloaded_when_idle(
    folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    options = ("--keep-alive", "2s", "--max-loaded", "1")
    async with serving(folders, tmp_path / "data", *options) as (stack, client):
        assert stack.children("services.decode") == []
        assert (await client.get("/ready")).status_code == 200
        said, body = "", {"model": "llama", "prompt": "Hello", "max_tokens": 4, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            async for line in stream.aiter_lines():
                said += f"{line}\n"
        assert ": llama: " in said  # how far it is
        assert said.endswith("data: [DONE]\n\n")
        assert len(stack.children("services.decode")) == 1
        answers = await asyncio.gather(*(ask(client, model) for model in MODELS * 2))
        assert dict(zip(MODELS * 2, answers, strict=True)) == expected
        assert answers[:2] == answers[2:]
        await eventually(lambda: stack.children("services.decode") == [])
        assert await ask(client, "qwen") == expected["qwen"]


@pytest.mark.long
async def test_kills_of_host_worker_and_gateway_while_loading_lose_nothing(
    folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    async with serving(folders, tmp_path / "data", "--keep-alive", "-1") as (stack, client):
        asking = [asyncio.create_task(ask(client, model)) for model in MODELS]
        await eventually(lambda: stack.children("services.decode"))
        stack.child("services.host").kill()
        assert await asyncio.gather(*asking) == [expected[model] for model in MODELS]
        for worker in stack.children("services.decode"):
            worker.kill()
        assert await asyncio.gather(*(ask(client, model) for model in MODELS)) == [expected[model] for model in MODELS]
        stack.child("services.gateway").kill()
        await stack.says("restarting gateway")
        for model in MODELS:
            assert await _from_the_next(client, model) == expected[model]


async def _from_the_next(client: httpx.AsyncClient, model: str) -> list[int]:
    """An answer of the gateway that starts again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await ask(client, model)
            except (httpx.TransportError, AssertionError):  # it isn't there yet, or heard nobody yet
                await asyncio.sleep(0.1)


@pytest.mark.long
async def test_three_models_swapped_under_load_lose_nothing_and_give_their_memory_back(
    folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """`SOAK_S` makes it longer, up to the time that a test may take."""
    seconds, chance = float(os.environ.get("SOAK_S", "60")), random.Random(7)
    served = {**folders, "demo": ROOT / "demo"}
    wanted = {**expected, "demo": greedy_tokens(ROOT / "demo", [PROMPT], TOKENS)[0]}
    options = ("--keep-alive", "1s", "--max-loaded", "2")
    async with serving(served, tmp_path / "data", *options) as (stack, client):
        answers, loads, loaded = Counter[str](), 0, set[int]()
        for model, tokens in wanted.items():  # what is imported and cached once is no model's memory
            assert await ask(client, model) == tokens
        await eventually(lambda: stack.children("services.decode") == [])
        idle = memory_of(stack)
        until = asyncio.get_running_loop().time() + seconds

        async def keep_asking() -> None:
            while asyncio.get_running_loop().time() < until:
                model = chance.choice(list(served))
                assert await ask(client, model) == wanted[model], model
                answers[model] += 1
                await asyncio.sleep(chance.choice((0.0, 0.0, 0.0, 2.5)))

        asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
        while not all(task.done() for task in asking):
            pids = {child.pid for child in stack.children("services.decode")}
            loads, loaded = loads + len(pids - loaded), pids
            await asyncio.sleep(0.1)
        await asyncio.gather(*asking)
        assert min(answers.values()) > 0
        assert loads > len(served)
        await eventually(lambda: stack.children("services.decode") == [])
        left = memory_of(stack) - idle
        print(f"{answers.total()} answers, {loads} loads in {seconds:.0f} s, {left / 1e6:+.1f} MB when idle again")
        assert left < LEFT_BYTES
