"""`baton bench` and `baton top` against a whole Baton with the fake device."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio

from common import subjects
from common.bus import NatsBus, NatsSettings, connect_bus
from common.messages import GatewayState, gateway_state_decoder
from tests.e2e.cluster import ROOT, Cluster
from tests.models import build_tiny_model

PATIENCE_S = 120.0
ADMIN_KEY = "an-admin-key-of-a-test"
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: object) -> AsyncIterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("terminal")  # type: ignore[attr-defined]
    model = build_tiny_model(folder / "tiny", "llama")
    options = {"fake": True, "kv_memory_mb": 8, "fake_step_ms": 5}
    keys = ("--admin-key", ADMIN_KEY)
    async with Cluster(folder / "run", model=model, gateway_options=keys, **options) as running:  # type: ignore[arg-type]
        yield running


async def start(service: str, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"cli.{service}",
        *options,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def output(service: str, *options: str) -> tuple[int | None, str, str]:
    process = await start(service, *options)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, out.decode(), err.decode()


async def test_bench_counts_what_it_asked_for(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = [
        "--url",
        cluster.url,
        "--num-prompts",
        "6",
        "--input-len",
        "24",
        "--prefix-len",
        "16",
        "--output-len",
        "8",
    ]
    options += ["--max-concurrency", "2", "--e2e-slo-ms", "0.001", "--output", str(file)]
    code, out, err = await output("bench", *options)
    assert code == 0, out + err
    results = json.loads(file.read_text())["results"]
    assert (results["completed"], results["failed"]) == (6, 0)
    assert results["output_tokens"] == 6 * 8
    assert results["input_tokens"] == 6 * (24 + 16)
    assert results["goodput_requests_per_s"] == 0  # nobody answers in a microsecond
    assert results["ttft_ms"]["p50"] > 0
    assert "TTFT" in out
    assert "█" in out


async def test_bench_of_chat_and_of_refusals(cluster: Cluster) -> None:
    chat = ["--url", cluster.url, "--endpoint", "chat", "--num-prompts", "2", "--input-len", "3", "--output-len", "4"]
    code, out, err = await output("bench", *chat)
    assert code == 0, out + err
    wrong = ["--served-model-name", "nobody", "--num-warmups", "0"]
    code, out, _ = await output("bench", *chat, *wrong)
    assert code == 1
    assert "2 x HTTP 404: the model 'nobody' does not exist" in out


async def test_bench_sweeps_with_vllm_s_words_and_leaves_a_report(cluster: Cluster, tmp_path: Path) -> None:
    vllm = ["--base-url", cluster.url, "--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "3"]
    vllm += ["--backend", "openai", "--goodput", "e2el:60000", "--save-result", "--save-detailed"]
    vllm += ["--result-dir", str(tmp_path), "--result-filename", "run.json"]
    files = ["--output", f"{tmp_path / 'run.html'},{tmp_path / 'run.csv'}"]
    code, out, err = await output("bench", *vllm, "--sweep", "concurrency=1,3", *files)
    assert code == 0, out + err
    assert [line.split()[:3] for line in out.splitlines() if "in flight" in line][:2] == [
        ["1", "in", "flight"],
        ["3", "in", "flight"],
    ]
    told = json.loads((tmp_path / "run.json").read_text())
    assert [(step["concurrency"], step["completed"], step["slo_attainment"]) for step in told["steps"]] == [
        (1, 3, 1.0),
        (3, 3, 1.0),
    ]
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 6
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 3
    assert "<svg" in (tmp_path / "run.html").read_text()
    code, out, err = await output("bench", "compare", str(tmp_path / "run.json"), str(tmp_path / "run.json"))
    assert code == 0, err
    assert "TTFT p50 ms" in out
    assert "worse" not in out


async def test_bench_says_that_no_rate_is_within_what_nobody_can_do(cluster: Cluster) -> None:
    """The step ends with the first answer, and the search with the step: that request met no other."""
    options = ["--url", cluster.url, "--input-len", "8", "--output-len", "2"]
    options += ["--sweep", "max=1", "--e2e-slo-ms", "0.001", "--request-rate", "0.004"]
    code, out, err = await output("bench", *options)
    assert code == 1, out + err
    assert out.count("stopped early") == 1
    assert "even one request at a time has E2E " in out
    assert "the objective is out of reach here" in out


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_bench_prints_what_there_is(
    cluster: Cluster, tmp_path: Path, ended_by: signal.Signals
) -> None:
    file = tmp_path / "bench.json"
    options = ["--url", cluster.url, "--num-prompts", "1000", "--request-rate", "0.01", "--arrivals", "constant"]
    options += ["--input-len", "8", "--output-len", "2", "--output", str(file)]
    before = await ended(cluster)
    process = await start("bench", *options)
    async with asyncio.timeout(60):
        while len(await ended(cluster) - before) < 2:  # the warm-up, and the first
            await asyncio.sleep(0.05)
    process.send_signal(ended_by)
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert b"interrupted" in out
    assert json.loads(file.read_text())["results"]["completed"] <= 1


async def ended(cluster: Cluster) -> set[str]:
    """The requests that ended lately, as the gateway says."""
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, headers=admin) as client:
        told = (await client.get("/debug/requests?limit=100")).json()
    return {entry["request_id"] for entry in told["latest"]}


async def test_top_shows_every_worker_and_the_gateway(cluster: Cluster) -> None:
    asked = ("--url", cluster.url, "--api-key", ADMIN_KEY)
    code, out, err = await output("top", *asked, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [(row["worker"], row["roles"]) for row in found["workers"]] == [
        ("decode-0", "decode"),
        ("prefill-0", "prefill"),
    ]
    assert all(row["kv_used"] + row["kv_held"] + row["kv_free"] == row["kv_blocks"] > 0 for row in found["workers"])
    assert len(found["gateways"]) == 1
    assert found["figures"]["in_flight"] == 0
    assert found["requests"].keys() == {"waiting", "running", "latest", "slowest"}
    code, out, err = await output("top", *asked)
    assert code == 0, err
    assert "prefill-0" in out
    assert "1 gateways" in out


async def test_what_tells_of_everybody_needs_the_admin_key_and_says_so(cluster: Cluster) -> None:
    code, _, err = await output("top", "--url", cluster.url)
    assert code == 2
    assert "a key is needed: --api-key" in err
    code, _, err = await output("trace", "--url", cluster.url)
    assert code == 2
    assert "a valid admin key is needed" in err
    code, out, err = await output("trace", "--url", cluster.url, "--api-key", ADMIN_KEY)
    assert code == 0, err
    assert "slowest:" in out


class Terminal:
    """A command in a terminal of its own, and what it showed."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self._master = master
        self._new = b""

    async def shows(self, part: bytes) -> None:
        """Wait until it shows `part`, from where the last wait ended."""
        async with asyncio.timeout(PATIENCE_S):
            while part not in self._new:
                self._new += await asyncio.to_thread(os.read, self._master, 4096)
        self._new = self._new.partition(part)[2]

    def types(self, text: bytes) -> None:
        os.write(self._master, text)

    async def ends(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def in_a_terminal(service: str, *options: str, **more: str) -> AsyncIterator[Terminal]:
    master, slave = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"cli.{service}", *options),
        cwd=ROOT,
        env=ENVIRONMENT | {"TERM": "xterm"} | more,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(master)


async def test_chat_in_a_terminal_does_commands_and_tells_its_pace(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--url", cluster.url, "--set", "max_tokens=6")
    async with in_a_terminal("chat", *options, HOME=str(tmp_path)) as chat:
        await chat.shows(b"you> ")
        chat.types(b"/set seed 4\n")
        await chat.shows(b"seed")
        await chat.shows(b"you> ")
        chat.types(b'"""Hello\n')
        await chat.shows(b"...> ")
        chat.types(b'there"""\n')
        await chat.shows(b"first token ")
        await chat.shows(b" tokens/s")
        await chat.shows(b"you> ")
        chat.types(b"/save " + str(tmp_path / "talk.json").encode() + b"\n")
        await chat.shows(b"2 messages saved")
        await chat.shows(b"you> ")
        chat.types(b"\x04")
        assert await chat.ends() == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["messages"][0] == {"role": "user", "content": "Hello\nthere"}
    assert saved["options"]["seed"] == 4
    history = tmp_path / ".local/state/baton/chat_history"
    assert "/set seed 4" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


async def test_top_lives_in_a_terminal_until_q(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        await client.post("/v1/completions", json={"model": "tiny", "prompt": [7] * 20, "max_tokens": 2})
    options = ("--url", cluster.url, "--api-key", ADMIN_KEY)
    async with in_a_terminal("top", *options) as top:
        await top.shows(b"decode-0")
        top.types(b"2")
        await top.shows(b"cmpl-")
        top.types(b"/no-such-word\r")
        await top.shows(b"nothing has 'no-such-word'")
        top.types(b"?")
        await top.shows(b"this help")
        top.types(b"xq")
        assert await top.ends() == 0


async def test_trace_asks_which_request_to_show(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        await client.post("/v1/completions", json={"model": "tiny", "prompt": [7] * 20, "max_tokens": 2})
    async with in_a_terminal("trace", "--url", cluster.url, "--api-key", ADMIN_KEY) as trace:
        await trace.shows(b"which?")
        trace.types(b"1\n")
        await trace.shows(b"where it went:")
        await trace.shows(b"which?")
        trace.types(b"\n")
        assert await trace.ends() == 0


async def test_top_without_a_gateway_says_so() -> None:
    code, _, err = await output("top", "--url", "http://127.0.0.1:1")
    assert code == 2
    assert "baton:" in err
    assert "Traceback" not in err


async def test_trace_tells_where_a_request_s_time_went(cluster: Cluster, tmp_path: Path) -> None:
    asked = ("--url", cluster.url, "--api-key", ADMIN_KEY)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        body = {"model": "tiny", "prompt": [7] * 100, "max_tokens": 6, "ignore_eos": True, "n": 2}
        answer = (await client.post("/v1/completions", json=body | {"timings_per_token": True})).json()
    timings = answer["timings"]
    assert (timings["prompt_n"] + timings["cache_n"], timings["predicted_n"]) == (100, 12)
    assert min(timings[f"{name}_{what}"] for name in ("prompt", "predicted") for what in ("ms", "per_second")) > 0
    code, out, err = await output("trace", answer["id"], *asked)
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("cmpl")] == [
        f"{answer['id']}-{index}   length" for index in range(2)
    ]
    rows = [line.split()[0] for line in out.splitlines() if "█" in line or "░" in line]
    assert {"placement", "queue", "prefill", "transfer", "decode"} <= set(rows)
    code, out, _ = await output("trace", *asked, "--json")
    assert code == 0
    assert f"{answer['id']}-0" in [entry["request_id"] for entry in json.loads(out)["latest"]]
    code, out, err = await output("trace", "slowest", *asked, "--json")
    assert code == 0, err
    (tmp_path / "slow.json").write_text(out)
    code, out, err = await output("trace", str(tmp_path / "slow.json"))
    assert code == 0, err
    assert "where it went: " in out
    code, _, err = await output("trace", "cmpl-nobody", *asked)
    assert (code, err.count("\n")) == (2, 1)
    assert "cmpl-nobody" in err


@pytest.mark.quick(first=1)
@pytest.mark.parametrize(("service", "taken"), [("decode", "decode-0"), ("gateway", "gateway")])
async def test_a_name_that_another_process_has_is_refused_and_harms_nobody(
    cluster: Cluster, service: str, taken: str
) -> None:
    kind = ["--worker-id", taken, "--device", "fake"] if service == "decode" else ["--gateway-id", taken, "--port", "0"]
    model = str(cluster.folder.parent / "tiny")
    flags = [*cluster.reach("nats", taken), *cluster.reach("redis", taken), "--model", model, *kind]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"services.{service}", *flags, cwd=ROOT, env=ENVIRONMENT, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 2
    assert f"baton: the name '{taken}' is taken: another process on this bus has it" in said.decode()
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 3, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 3


async def test_a_gateway_that_loses_its_name_tells_its_streams_why(cluster: Cluster) -> None:
    """Once an older process of its name is heard (a divided bus became whole), it ends, but not without a word."""
    body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 1_500, "ignore_eos": True, "stream": True}
    older = asyncio.Queue[GatewayState]()
    async with (
        connect_bus(NatsSettings(url=cluster.nats.url), name="bystander") as bus,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        await bus.subscribe(subjects.gateway_heartbeat("gateway"), gateway_state_decoder, older.put_nowait)
        beat = msgspec.structs.replace(await older.get(), incarnation=1)
        beating = asyncio.create_task(_beat(bus, beat))
        events = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        beating.cancel()
    error = json.loads(events[-1])["error"]
    assert len(events) > 2
    assert error["message"].startswith("this gateway ends: another one has its name")
    async with asyncio.timeout(PATIENCE_S):
        assert await cluster.processes["gateway"].wait() == 2
    assert "the name 'gateway' is taken" in (cluster.folder / "gateway.log").read_text()
    await cluster.start("gateway")
    await cluster.until_ready()


async def _beat(bus: NatsBus, state: GatewayState) -> None:
    while True:
        await bus.publish(subjects.gateway_heartbeat(state.gateway), state)
        await asyncio.sleep(0.2)
