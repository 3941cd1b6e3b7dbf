"""`baton up` as a person meets it: one command, one address, restarts, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from services.runtime.running import FILE
from services.runtime.servers import run_nats, run_redis
from tests.e2e.stack import PATIENCE_S, Start, Up
from tests.ports import own_port

ROOT = Path(__file__).resolve().parents[2]


async def all_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait for processes to end; return those that did not."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=PATIENCE_S)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


async def ask(url: str, lines: str, *options: str) -> str:
    """What `baton chat` prints for these lines of input."""
    chat = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.chat", "--url", url, "--set", "max_tokens=4,temperature=0", *options),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await asyncio.wait_for(chat.communicate(lines.encode()), PATIENCE_S)
    assert chat.returncode == 0
    return printed.decode(errors="replace")


def commands_of_the_readme() -> list[str]:
    """What the README tells a newcomer to type beside `make up`."""
    made, typed = re.findall(r"^```\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)[:2]
    assert made == "make up\n"
    return str(typed).replace("\\\n", "").strip().splitlines()


async def test_the_curl_line_works_a_dead_worker_comes_back_and_ctrl_c_leaves_nothing(
    start: Start, tmp_path: Path
) -> None:
    key, file = "sk-of-a-test-that-nobody-may-see", tmp_path / "keys"
    file.write_text(f"{key}\n")
    async with start("--decode", "2", "--api-keys", f"@{file}") as up:
        await up.says(f"Baton serves tiny at {up.url}")
        everybody = [psutil.Process(up.process.pid), *up.family()]
        assert [one.cmdline() for one in everybody if key in " ".join(one.cmdline())] == []
        curl = await asyncio.create_subprocess_shell(
            f"exec {(await up.says('curl')).strip()} -s", stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await asyncio.wait_for(curl.communicate(), PATIENCE_S)
        answer = json.loads(printed)
        assert answer["choices"][0]["message"]["content"]
        assert answer["usage"]["completion_tokens"] > 0
        chat = await ask(up.url, "Hello!\n", "--api-key", f"@{file}")
        assert "tiny at" in chat, chat
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            assert (await client.get(f"{up.url}/v1/models")).status_code == 401
        log = (tmp_path / "data" / "logs" / "gateway.log").read_text()
        assert "request.refused" in log
        assert "code=invalid_api_key" in log
        assert [path for path in (tmp_path / "data").rglob("*.log") if key in path.read_text(errors="replace")] == []
        up.child("services.decode").kill()
        await up.says("ended with signal SIGKILL; its last lines:")
        await up.says("worker.ready")
        await up.says("restarting decode-")
        family = up.family()
        up.process.send_signal(signal.SIGINT)
        code, rest = await up.ends()
        assert (code, rest[-1]) == (0, "stopped")
        assert await all_gone(family) == []
        assert not (tmp_path / "data" / FILE).exists()


@pytest.mark.long
async def test_a_killed_worker_comes_back_of_the_nursery_and_later_without_it(start: Start, tmp_path: Path) -> None:
    async with start("--device", "fake", "--prefill", "1") as up:
        await up.says("Baton serves")
        prefill, log = up.child("services.prefill"), tmp_path / "data" / "logs" / "decode-0.log"
        for lives in (2, 3):
            decode = up.child("services.decode")
            assert (prefill.ppid(), decode.ppid()) == (up.process.pid, up.process.pid)
            decode.kill()
            await up.says("restarting decode-")
            async with asyncio.timeout(PATIENCE_S):
                while log.read_text().count("worker.ready") < lives or not await answers(up.url):
                    await asyncio.sleep(0.1)
            if sys.platform == "linux" and lives == 2:  # the first one was forked of it, the second one can't be
                up.child("services.nursery").kill()
        assert prefill.is_running()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no nursery")
async def test_where_the_nursery_dies_each_worker_is_started_by_itself(start: Start) -> None:
    async with start("--device", "fake", "--prefill", "0") as up, asyncio.timeout(PATIENCE_S):
        while not (found := up.children("services.nursery")):
            await asyncio.sleep(0)
        found[0].kill()
        await up.says("Baton serves")
        assert await answers(up.url)


@pytest.mark.long
async def test_what_the_readme_tells_a_newcomer_to_type_works(start: Start, tmp_path: Path) -> None:
    """Word for word but for the port; load and answers are short, by variables."""
    short = {"BATON_DATA_DIR": str(tmp_path / "data"), "BATON_NUM_PROMPTS": "3", "BATON_SET": "max_tokens=4"}

    async def typed(line: str) -> tuple[str, str]:
        process = await asyncio.create_subprocess_shell(
            line.replace("http://127.0.0.1:8000", up.url),
            cwd=ROOT,
            env=os.environ | short,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,  # where curl writes how far it is, in the middle of an answer
        )
        printed, complained = await asyncio.wait_for(process.communicate(b"Hello!\n"), PATIENCE_S)
        assert process.returncode == 0, (line, printed, complained)
        return line.split()[1] if line.startswith("./baton") else "curl", (printed + complained).decode()

    async with start("--model", "demo", "--device", "fake:0.1") as up:
        await up.says("Baton serves demo")
        assert (tmp_path / "data" / FILE).stat().st_mode & 0o777 == 0o600
        said = dict(await asyncio.gather(*map(typed, commands_of_the_readme())))
    assert said.keys() == {"chat", "curl", "top", "trace", "bench", "doctor"}
    assert f"demo at {up.url}" in said["chat"]
    assert '"completion_tokens"' in said["curl"]
    assert "prefill-0" in said["top"]
    assert "slowest:" in said["trace"]
    assert "TTFT" in said["bench"]
    assert f"{up.url} (`baton up` in {tmp_path / 'data'}) is ready" in said["doctor"]


async def test_stopping_while_starting_leaves_nothing(start: Start) -> None:
    async with start("--device", "fake") as up:
        await up.says("starting gateway")
        family = up.family()
        up.process.send_signal(signal.SIGTERM)
        code, _ = await up.ends()
        assert code == 0
        assert await all_gone(family) == []


async def test_children_die_with_a_killed_parent_and_the_next_one_forgets_its_keys(
    start: Start, tmp_path: Path
) -> None:
    left = [tmp_path / "data" / FILE, *(tmp_path / "data" / "users" / f"{name}.key" for name in ("gateway", "admin"))]
    file = tmp_path / "key"
    file.write_text("a-key-of-the-one-before")
    async with start("--device", "fake", "--api-keys", f"@{file}", "--admin-key", f"@{file}0") as up:
        assert "No such file" in await up.says("--admin-key")
    file.with_name("key0").write_text("an-admin-key-of-the-one-before")
    async with start("--device", "fake", "--api-keys", f"@{file}", "--admin-key", f"@{file}0") as up:
        await up.says("Baton serves")
        family = up.family()
        assert len(family) >= 4  # NATS, Redis, gateway, worker
        assert [path.stat().st_mode & 0o777 for path in left] == [0o600] * 3
        up.process.kill()
        assert await all_gone(family) == []
    async with start("--device", "fake") as up:
        await up.says("starting nats")
        assert [path for path in left if path.exists()] == []


async def test_a_lost_nats_is_named_and_stops_everything(start: Start) -> None:
    async with start("--device", "fake", "--drain-s", "1") as up:
        await up.says("Baton serves")
        family = up.family()
        up.child("nats-server").kill()
        await up.says("nats ended with signal SIGKILL")
        code, rest = await up.ends()
        assert code == 2
        assert rest[-1].startswith("baton: nats is gone")
        assert await all_gone(family) == []


async def test_a_model_without_a_chat_template_is_offered_for_completions(
    start: Start, model: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(model, tmp_path / "base")
    for file, change in (
        ("tokenizer_config.json", {"chat_template": None}),
        ("config.json", {"max_position_embeddings": 4096}),
    ):
        (base / file).write_text(json.dumps(json.loads((base / file).read_text()) | change))
    async with start("--model", str(base), "--port", "0", "--kv-memory-mb", "1") as up:
        url = (await up.says("Baton serves")).split(" at ")[1].split()[0]
        await up.says("base has no chat template: it continues text.")
        await up.says("base is served with 2048 of its 4096 tokens of context: --kv-memory-mb 2 holds all")
        curl = await asyncio.create_subprocess_shell(
            f"exec {(await up.says('/v1/completions')).strip()} -s", stdout=asyncio.subprocess.PIPE
        )
        assert json.loads((await asyncio.wait_for(curl.communicate(), PATIENCE_S))[0])["choices"][0]["finish_reason"]
        chat = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cli.chat", "--url", url), cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        _, complaint = await asyncio.wait_for(chat.communicate(), PATIENCE_S)
        assert chat.returncode == 2
        assert b"baton: base has no chat template: it continues text, at /v1/completions" in complaint


@pytest.mark.long
async def test_two_on_one_bus_answer_every_request_right(start: Start, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as held:
        nats = await held.enter_async_context(run_nats(data_dir=tmp_path / "nats"))
        redis = await held.enter_async_context(run_redis(data_dir=tmp_path / "redis"))
        both = []
        for name in ("one", "other"):
            servers = ("--nats-url", nats.url, "--redis-url", redis.url, "--data-dir", str(tmp_path / name))
            both.append(await held.enter_async_context(start("--device", "fake", *servers)))
        for up in both:
            await up.says("Baton serves")
        answers = await asyncio.gather(*(completion(up.url, number) for number in range(20) for up in both))
    assert [len(tokens) for tokens in answers] == [8] * 40
    assert answers[::2] == answers[1::2]


async def test_gateways_share_a_port_and_one_that_dies_leaves_it_to_the_others(start: Start) -> None:
    own = own_port(run=2)
    async with start("--device", "fake", "--prefill", "0", "--gateways", "2", "--own-port", str(own)) as up:
        await up.says("2 gateways share port")
        urls = [f"http://127.0.0.1:{port}" for port in (own, own + 1)]
        mine = process_of(up, own)
        dead_at: list[float] = []
        failed: list[float] = []
        answered: list[float] = []

        async def ask_on(number: int) -> None:
            while not dead_at or sum(begun > dead_at[0] for begun in answered) < 50:
                begun = time.monotonic()  # each with a connection of its own
                try:
                    answered.append(begun if len(await completion(up.url, number)) == 8 else 0.0)
                except httpx.TransportError:
                    failed.append(begun)

        async def kill() -> None:
            while len(answered) < 50:
                await asyncio.sleep(0.01)
            mine.kill()
            assert await all_gone([mine]) == []
            dead_at.append(time.monotonic())

        await asyncio.gather(kill(), *map(ask_on, range(4)))
        assert [begun for begun in failed if begun > dead_at[0]] == []
        await up.says("restarting gateway-0")
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            seen = (await client.get(f"{urls[1]}/ready")).json()["gateway"]
            assert seen.startswith("gateway-1-")
            assert (await client.get(f"{up.url}/ready")).json()["gateway"].startswith("gateway-")
            assert "vllm:request_success_total" in (await client.get(f"{urls[1]}/metrics")).text


def process_of(up: Up, port: int) -> psutil.Process:
    """The child that listens at this port."""
    return next(
        child
        for child in up.family()
        if any(one.laddr.port == port for one in child.net_connections() if not one.raddr)
    )


async def answers(url: str) -> bool:
    """Whether a request is served now."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=False) as client:
        body = {"model": "tiny", "prompt": [1] * 40, "max_tokens": 8, "ignore_eos": True}
        return (await client.post("/v1/completions", json=body)).status_code == 200


async def completion(url: str, number: int) -> list[int]:
    body = {"model": "tiny", "prompt": [number + 1] * 40, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=False) as client:
        answer = await client.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@pytest.mark.long
async def test_a_role_has_stages_and_the_other_none(start: Start) -> None:
    async with start("--prefill", "1", "--decode", "1", "-pp", "prefill=2") as up:
        await up.says("Baton serves")
        (stage,) = up.children("services.rank")
        leader = stage.parent()
        assert leader is not None
        assert "services.prefill" in leader.cmdline()
        body = {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": 4, "temperature": 0}
        async with httpx.AsyncClient(base_url=up.url, timeout=PATIENCE_S) as client:
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
