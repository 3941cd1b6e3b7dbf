"""The Batch API through the official `openai` client, unchanged; the workers run the fake device, so every answer is known."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Batch

from common import subjects
from common.wire import NatsSettings, connect
from gateway.batches.records import BatchLimits
from gateway.batches.store import batch_streams
from gateway.keeping.streams import KeptStreams
from tests.chaos.asks import Oracle
from tests.e2e.cluster import ROOT, Cluster
from tests.integration.waiting import eventually

FAKE = {"fake": True, "kv_memory_mb": 8, "fake_step_ms": 5, "prefill": 0, "decode": 0, "both": 1}
KEYS = {"acme": "baton-acme-key-of-the-test", "other": "baton-other-key-of-the-test"}
TENANTS = "".join(f'[tenants.{name}]\nkeys = ["{key}"]\n' for name, key in KEYS.items())
WITHIN_S = 120.0
TOKENS = 8


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("batches")
    tenants = folder / "tenants.toml"
    tenants.write_text(TENANTS)
    options = ("--tenants", str(tenants), "--batch-lines", "2000")
    options += ("--batch-line-bytes", str(64 << 10), "--batch-file-bytes", str(1 << 20))
    async with Cluster(folder / "run", model=model, gateway_options=options, **FAKE) as cluster:  # type: ignore[arg-type]
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(cluster, "acme") as client:
        yield client


def client_of(cluster: Cluster, tenant: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=KEYS[tenant], max_retries=0)


def prompt_of(number: int) -> list[int]:
    return [20 + number % 200, 30 + number // 200, 41, 42]


def completion(number: int, **options: object) -> dict[str, object]:
    body = {"model": "tiny", "prompt": prompt_of(number), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | options
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/completions", "body": body}


def jsonl(lines: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def batch_of(
    client: openai.AsyncOpenAI, raw: bytes, *, endpoint: str = "/v1/completions", **options: object
) -> Batch:
    file = await client.files.create(file=("input.jsonl", raw), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
        **options,  # type: ignore[arg-type]
    )


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(WITHIN_S):
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.1)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def entries(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, object]]:
    """Entries by custom id; nothing may be there twice."""
    if file_id is None:
        return {}
    raw = (await client.files.content(file_id)).content
    assert len(raw) == (await client.files.retrieve(file_id)).bytes
    found = [json.loads(line) for line in raw.splitlines()]
    assert len({entry["custom_id"] for entry in found}) == len(found)
    return {entry["custom_id"]: entry for entry in found}


async def typed(cluster: Cluster, *words: str) -> tuple[int | None, str, str]:
    """`baton batch …` with acme's key."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.batch", *words, "--url", cluster.url, "--api-key", KEYS["acme"]),
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("BATON_")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), WITHIN_S)
    return process.returncode, out.decode(), err.decode()


async def test_a_batch_from_the_command_line(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl([completion(number) for number in range(3)]))
    code, out, err = await typed(cluster, "run", str(tmp_path / "in.jsonl"))
    assert code == 0, out + err
    name = out.split()[0]
    assert "completed: 3 of 3 lines, 0 failed" in out
    code, out, err = await typed(cluster, "list")
    assert any(line.split()[:2] == [name, "completed"] for line in out.splitlines()), out + err
    code, out, err = await typed(cluster, "get", name, "--output", str(tmp_path / "out.jsonl"))
    assert code == 0, err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3
    code, _, err = await typed(cluster, "cancel", name)
    assert code == 2
    assert "baton:" in err
    (tmp_path / "bad.jsonl").write_bytes(b'{"url": "/v1/completions"}\n')
    code, out, _ = await typed(cluster, "run", str(tmp_path / "bad.jsonl"))
    assert code == 1
    assert "failed" in out
    assert "line 1: " in out


async def test_a_batch_from_upload_to_output(client: openai.AsyncOpenAI, oracle: Oracle) -> None:
    raw = jsonl([completion(number) for number in range(40)])
    file = await client.files.create(file=("my input.jsonl", raw), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(raw), "my input.jsonl", "batch")
    assert (await client.files.content(file.id)).content == raw
    assert file.id in [one.id async for one in client.files.list()]
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"who": "test"}
    )
    assert batch.status == "validating"
    batch = await ended(client, batch)
    assert (batch.status, batch.error_file_id, batch.metadata) == ("completed", None, {"who": "test"})
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at  # type: ignore[operator]
    found = await entries(client, batch.output_file_id)
    assert len(found) == 40
    for number in range(40):
        response = found[f"line {number}"]["response"]
        assert found[f"line {number}"]["error"] is None
        assert response["status_code"] == 200  # type: ignore[index]
        tokens = response["body"]["choices"][0]["token_ids"]  # type: ignore[index]
        assert tokens == oracle.answer(completion(number)["body"])[0].tokens  # type: ignore[arg-type]
    assert batch.id in [one.id async for one in client.batches.list(limit=1)]
    assert (await client.files.retrieve(batch.output_file_id or "")).purpose == "batch_output"
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(file.id)


async def test_chat_lines_and_lines_that_fail(client: openai.AsyncOpenAI) -> None:
    def line(name: str, **options: object) -> dict[str, object]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4} | options
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    lines = [line("good"), line("hot", temperature=9), line("streamed", stream=True), line("urgent", priority=5)]
    batch = await ended(client, await batch_of(client, jsonl(lines), endpoint="/v1/chat/completions"))
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}  # type: ignore[union-attr]
    good = await entries(client, batch.output_file_id)
    assert set(good) == {"good", "urgent"}  # its priority is the lowest, whatever it says
    assert good["good"]["response"]["body"]["object"] == "chat.completion"  # type: ignore[index]
    bad = await entries(client, batch.error_file_id)
    assert {name: entry["response"]["body"]["error"]["param"] for name, entry in bad.items()} == {  # type: ignore[index]
        "hot": "temperature",
        "streamed": "stream",
    }
    assert {entry["response"]["status_code"] for entry in bad.values()} == {400}  # type: ignore[index]


async def test_a_wrong_file_fails_as_a_whole_and_says_which_lines(client: openai.AsyncOpenAI) -> None:
    lines = (
        jsonl([completion(0), completion(1), completion(0), completion(2, model="another")]) + b'\n{"custom_id": 1}\n'
    )
    batch = await ended(client, await batch_of(client, lines))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or []] == [
        (3, "duplicate_custom_id"),
        (4, "model_not_found"),
        (6, "invalid_json_line"),
    ]


async def test_a_tenant_sees_only_its_own(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    batch = await ended(client, await batch_of(client, jsonl([completion(7)])))
    async with client_of(cluster, "other") as other:
        assert [one async for one in other.files.list()] == []
        assert [one async for one in other.batches.list()] == []
        for ask in (
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.output_file_id or ""),
            other.files.delete(batch.input_file_id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )


async def test_a_file_whose_parts_have_expired_is_not_found(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """They are older than its record."""
    file = await client.files.create(file=("input.jsonl", b"{}\n"), purpose="batch")
    async with connected(cluster) as kept:
        await kept.purge(subjects.batch_part(file.id, "*"))
    with pytest.raises(openai.NotFoundError, match="has expired"):
        await client.files.content(file.id)
    await client.files.delete(file.id)


async def test_a_cancelled_batch_keeps_what_was_done(client: openai.AsyncOpenAI) -> None:
    batch = await batch_of(client, jsonl([completion(number, max_tokens=200) for number in range(600)]))
    async with asyncio.timeout(WITHIN_S):
        while not (batch.request_counts and batch.request_counts.completed):
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
    with pytest.raises(openai.ConflictError):
        await client.files.delete(batch.input_file_id)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    batch = await ended(client, batch)
    assert (batch.status, batch.cancelled_at is not None) == ("cancelled", True)
    done, left = await entries(client, batch.output_file_id), await entries(client, batch.error_file_id)
    assert done
    assert left
    assert set(done) | set(left) == {f"line {number}" for number in range(600)}
    assert not set(done) & set(left)
    assert {entry["error"]["code"] for entry in left.values()} == {"batch_cancelled"}  # type: ignore[index]
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "empty"),
        (b"x" * (65 << 10), "line 1 is longer"),
        (b"{}\n" * 2001, "more than 2000 lines"),
    ],
)
async def test_bounds_of_a_file(client: openai.AsyncOpenAI, raw: bytes, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told) as raised:
        await client.files.create(file=("input.jsonl", raw), purpose="batch")
    assert raised.value.body["param"] == "file"  # type: ignore[index]


async def test_a_file_that_is_too_large_is_refused_and_leaves_nothing(cluster: Cluster) -> None:
    headers = {"authorization": f"Bearer {KEYS['other']}"}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, headers=headers) as client:
        raw = b"0123456789\n" * 120_000
        answer = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", raw)})
        assert answer.status_code == 413

        async def endless() -> AsyncIterator[bytes]:  # says no length
            yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(40):
                yield b"0123456789\n" * 4000

        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = await client.post("/v1/files", content=endless(), headers=kind)
        assert answer.status_code in (400, 413)
        assert (await client.get("/v1/files")).json()["data"] == []


async def test_a_client_that_hangs_up_leaves_nothing(cluster: Cluster) -> None:
    """Neither a file nor parts of one."""
    async with connected(cluster) as kept:
        before = await kept.count(subjects.batch_part("*", "*"))
        left = asyncio.Event()

        async def broken_off() -> AsyncIterator[bytes]:
            yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(10):
                yield b"0123456789\n" * 100  # parts have 256 lines

            async def parts() -> bool:
                return await kept.count(subjects.batch_part("*", "*")) > before

            await eventually(parts)
            left.set()
            raise httpx.WriteError("the client is gone")

        headers = {"authorization": f"Bearer {KEYS['other']}", "content-type": "multipart/form-data; boundary=b"}
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60, headers=headers) as client:
            with pytest.raises(httpx.WriteError):
                await client.post("/v1/files", content=broken_off())
        assert left.is_set()

        async def gone() -> bool:
            return await kept.count(subjects.batch_part("*", "*")) == before

        await eventually(gone)


@contextlib.asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[KeptStreams]:
    """The streams, seen by NATS's admin."""
    async with connect(NatsSettings(url=cluster.nats.url), name="test") as wire:
        found = batch_streams(wire, BatchLimits())
        found.open()
        try:
            yield found
        finally:
            await found.close()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "assistants"}, "purpose"),
        ({}, "purpose"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after[anchor]"),
        ({"purpose": "batch", "colour": "red"}, "colour"),
    ],
)
async def test_wrong_fields_are_named(cluster: Cluster, fields: dict[str, str], param: str) -> None:
    headers = {"authorization": f"Bearer {KEYS['acme']}"}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, headers=headers) as client:
        answer = await client.post("/v1/files", data=fields, files={"file": ("a.jsonl", b"{}\n")})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.long
async def test_a_killed_gateway_loses_no_line(cluster: Cluster, client: openai.AsyncOpenAI, oracle: Oracle) -> None:
    lines = [completion(number, max_tokens=60) for number in range(120)]  # seconds of work
    batch = await batch_of(client, jsonl(lines))
    async with asyncio.timeout(WITHIN_S):
        while not (batch.request_counts and batch.request_counts.completed):
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    assert batch.status == "in_progress"
    cluster.kill("gateway")
    await cluster.processes["gateway"].wait()
    await cluster.start("gateway")
    await cluster.until_ready()
    batch = await ended(client, batch)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    found = await entries(client, batch.output_file_id)
    for number in range(120):
        response = found[f"line {number}"]["response"]
        expected = oracle.answer(lines[number]["body"])[0].tokens  # type: ignore[arg-type]
        assert response["body"]["choices"][0]["token_ids"] == expected  # type: ignore[index]
    assert len(found) == 120


async def test_interactive_requests_go_before_lines(client: openai.AsyncOpenAI) -> None:
    """While a batch keeps the gateway busy, a client's request is answered long before the batch is over."""
    batch = await batch_of(client, jsonl([completion(number, max_tokens=200) for number in range(200)]))
    answers = [
        await client.completions.create(model="tiny", prompt=[9, 9, number], max_tokens=4) for number in range(5)
    ]
    assert all(answer.usage and answer.usage.completion_tokens for answer in answers)
    batch = await client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert batch.request_counts.completed < 200
    await client.batches.cancel(batch.id)
    assert (await ended(client, batch)).status == "cancelled"


async def test_metrics_tell_of_lines(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    await ended(client, await batch_of(client, jsonl([completion(0), completion(1, temperature=9)])))
    headers = {"authorization": f"Bearer {KEYS['acme']}"}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, headers=headers) as http:

        async def idle() -> dict[str, float]:
            lines = [line.rpartition(" ") for line in (await http.get("/metrics")).text.splitlines() if line[0] != "#"]
            found = {name: float(value) for name, _, value in lines}
            return found if found['baton_batch_running_lines{model_name="tiny"}'] == 0 else {}

        found = await eventually(idle)
    assert found['baton_batch_lines_total{model_name="tiny",state="completed"}'] >= 1
    assert found['baton_batch_lines_total{model_name="tiny",state="failed"}'] >= 1
