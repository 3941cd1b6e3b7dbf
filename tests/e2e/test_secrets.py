"""What must not be read in logs: keys, passwords, prompts and answers; also when things go wrong, and at level debug."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx

from common.access import read_login
from tests.e2e.cluster import Cluster
from tests.e2e.stack import up
from tests.integration.waiting import eventually
from tests.models import build_tiny_model

KEY, WRONG_KEY = "a-key-of-this-test-0123456789", "another-key-of-this-test-9876"
PROMPT = "zebra-in-the-prompt"
SALT = "walrus-in-the-salt"
CUSTOM_ID = "badger-in-the-custom-id"
OPTIONS = ("--api-keys", KEY, "--log-level", "debug")


async def test_logs_have_no_keys_passwords_prompts_or_answers(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "tiny", "llama")
    folder = tmp_path / "cluster"
    options = {"fake": True, "kv_memory_mb": 8, "log_level": "debug"}
    async with Cluster(folder, model=model, gateway_options=OPTIONS, **options) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            answers = [await ask(client, KEY), await ask(client, WRONG_KEY)]
            answers.append(await ask(client, KEY, temperature=PROMPT))
            answers.append(await client.get(f"/v1/models?api_key={KEY}", headers={"authorization": f"Basic {KEY}"}))
            await batch(client, KEY)
            cluster.redis.process.kill()  # errors with addresses and users
            await cluster.redis.process.wait()
            answers.append(await ask(client, KEY))
    assert [answer.status_code for answer in answers] == [200, 401, 400, 401, 200]
    secrets = {KEY, WRONG_KEY, PROMPT, SALT, CUSTOM_ID, answers[0].json()["choices"][0]["text"]}
    files = [*folder.glob("users/*.nats"), *folder.glob("users/*.redis")]
    secrets |= {read_login(file).password for file in files}
    assert len(secrets) > len(files)
    logs = {path.name: path.read_text(errors="replace") for path in folder.glob("*.log")}
    assert "gateway.listening" in logs["gateway.log"]
    assert "worker.ready" in logs["decode-0.log"]
    found = [(name, secret) for name, text in logs.items() for secret in secrets if secret in text]
    assert found == []


async def test_only_the_gateway_is_told_the_keys(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "tiny", "llama")
    variables = {"BATON_API_KEYS": KEY, "BATON_ADMIN_KEY": f"{KEY}-admin"}
    async with up(model, tmp_path / "data", "--device", "fake", **variables) as running:
        await running.says("Baton serves")
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
            body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}
            assert (await client.post(f"{running.url}/v1/completions", json=body)).status_code == 200
        family = running.family()
        assert running.child("gateway.grammars.child") in family
        told = [one.cmdline()[-1] for one in family if KEY.encode() in Path(f"/proc/{one.pid}/environ").read_bytes()]
        assert told == ["services.gateway"]
        running.process.send_signal(signal.SIGINT)
        assert (await running.ends())[0] == 0


async def batch(client: httpx.AsyncClient, key: str) -> None:
    """A batch with a line that is answered, one that fails as it runs, and one with a line that is none."""
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": "tiny", "prompt": f"The {PROMPT}.", "max_tokens": 24, "temperature": 0, "cache_salt": SALT}
    line = {"custom_id": CUSTOM_ID, "method": "POST", "url": "/v1/completions", "body": body}
    worse = line | {"custom_id": f"{CUSTOM_ID} 2", "body": body | {"temperature": PROMPT}}
    for raw, status in (
        (f"{json.dumps(line)}\n{json.dumps(worse)}\n", "completed"),
        (f"{json.dumps(line)[:-1]}, {PROMPT}\n", "failed"),
    ):
        form = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", raw.encode())}}
        file = (await client.post("/v1/files", headers=headers, **form)).json()["id"]  # type: ignore[arg-type]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        made = (await client.post("/v1/batches", headers=headers, json=asked)).json()["id"]

        async def over(path: str = f"/v1/batches/{made}", wanted: str = status) -> bool:
            return (await client.get(path, headers=headers)).json()["status"] == wanted

        await eventually(over, 60)


async def ask(client: httpx.AsyncClient, key: str, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "prompt": f"The {PROMPT}.", "max_tokens": 24, "temperature": 0, "cache_salt": SALT}
    headers = {"authorization": f"Bearer {key}"}
    return await client.post("/v1/completions", json=body | {"ignore_eos": True} | fields, headers=headers)
