"""Compose without containers: run the commands and settings of docker-compose.yml as plain processes on this machine.

    .venv/bin/python deploy/run-as-processes.py [--keep DIR]

NATS and Redis run with the shipped files, the CPU profile's services with their own variables. Addresses alone are
changed: names of containers become 127.0.0.1, ports free ones. Sends one request, stops all, and returns 0 if it was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.servers import Server, die_with_parent, free_port, run_nats, run_redis, stop  # noqa: E402

KEY = "compose-without-containers"
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 45.0
POLL_S = 0.2
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return `text` with compose's `${NAME}`, `${NAME:-default}` and `${NAME:?error}`. Raises KeyError for the last."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if variables.get(name):
            return variables[name]
        if operator == "?":
            raise KeyError(rest)
        return rest or ""

    return _VARIABLE.sub(value, text)


def services(profile: str) -> dict[str, dict[str, Any]]:
    """Return Baton's own services that `docker compose --profile PROFILE` would start, by name."""
    every = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    ours = {name: service for name, service in every.items() if "environment" in service}
    return {name: service for name, service in ours.items() if profile in service.get("profiles", [profile])}


def environment_of(service: Mapping[str, Any], nats: Server, redis: Server, port: int) -> dict[str, str]:
    """Return a service's variables with the addresses of this machine."""
    given = {name: expand(str(value), {"BATON_API_KEYS": KEY}) for name, value in service["environment"].items()}
    here = {
        "BATON_NATS_URL": nats.url,
        "BATON_REDIS_URL": redis.url,
        "BATON_HOST": "127.0.0.1",
        "BATON_PORT": str(port),
    }
    return given | {name: value for name, value in here.items() if name in given}


async def run(folder: Path) -> int:
    """Start everything, ask once, stop everything. Returns the exit code."""
    port = free_port()
    async with contextlib.AsyncExitStack() as held:
        nats = await held.enter_async_context(run_nats(data_dir=folder / "nats"))
        redis = await held.enter_async_context(run_redis(data_dir=folder / "redis"))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        for name, service in services("cpu").items():
            with (folder / f"{name}.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    str(ROOT / "baton"),
                    *service["command"],
                    env=inherited | environment_of(service, nats, redis, port),
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                    preexec_fn=die_with_parent,
                    start_new_session=True,
                )
            held.push_async_callback(stop, process, STOP_TIMEOUT_S)
        answer = await _ask(f"http://127.0.0.1:{port}")
    print(answer)
    return 0


async def _ask(url: str) -> str:
    """Return a completion's text once the gateway is ready. Raises TimeoutError, or HTTPStatusError for a refusal."""
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not await _ready(client):
                await asyncio.sleep(POLL_S)  # other processes start: there is nothing to wait on
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        body = {"model": model, "prompt": "Hello", "max_tokens": 8}
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    return f"{answer['usage']['completion_tokens']} tokens: {answer['choices'][0]['text']!r}"


async def _ready(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await client.get("/ready")).status_code == 200
    return False


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="docker-compose.yml's CPU profile as plain processes")
    parser.add_argument("--keep", type=Path, help="folder for logs and data; default: a temporary one")
    keep = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return asyncio.run(run(folder))


if __name__ == "__main__":
    sys.exit(main())
