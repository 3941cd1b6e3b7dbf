"""Compose without containers: run the commands and settings of docker-compose.yml as plain processes on this machine.

    .venv/bin/python deploy/run-as-processes.py [--keep DIR] [--queries FILE]

The one-shot `users`, NATS and Redis with the shipped files and those users, the services of the profiles cpu and planner with
their own variables and health checks, and Prometheus with its rules where it is installed. A service's mounts are links in a
folder that stands for its root. Addresses alone are changed: names of containers become 127.0.0.1, ports free ones.

Sends one request and keeps what gateway and planner expose (NAME.metrics). Prometheus must scrape both and evaluate every rule,
and is asked the queries of FILE (a list in JSON; answers.json). Stops all, and returns 0 if all went well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from services.runtime.linux import die_with_parent  # noqa: E402
from services.runtime.servers import find_nats_server, find_redis_server, free_port, stop  # noqa: E402

KEY, ADMIN_KEY = "compose-without-containers", "compose-for-its-admin"
VARIABLES = {"BATON_API_KEYS": KEY, "BATON_ADMIN_KEY": ADMIN_KEY}
PROFILES = ("cpu", "planner", "watch")
SERVERS = ("nats", "redis")
WATCH = "prometheus"  # of the profile watch the only one that Debian has
METRICS = {"gateway": "8000", "planner": "9101"}
READY_TIMEOUT_S = 120.0
RULES_TIMEOUT_S = 60.0  # the first evaluation of a group comes at a time of its own, within 15 s
CHECK_TIMEOUT_S = 60.0
PAUSE_S = 0.5  # between two health checks
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


def services(*profiles: str) -> dict[str, dict[str, Any]]:
    """Return what `docker compose` would start of Baton's own services and its two servers, by name."""
    every = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    ours = {name: one for name, one in every.items() if name in SERVERS or "BATON_IMAGE" in one["image"]}
    del ours["spaces"]  # which processes of one machine share already
    if shutil.which(WATCH):
        ours[WATCH] = every[WATCH]
    return {name: one for name, one in ours.items() if not one.get("profiles") or set(profiles) & set(one["profiles"])}


class Places:
    """Paths, names and ports of containers on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ports = {name: free_port() for name in ("8000", "9101", "4222", "6379", "8222", "9090")}

    def mounts(self, name: str, service: Mapping[str, Any]) -> dict[str, str]:
        """Make a service's mounts, as links below a folder of its own. Returns their paths by those in the container."""
        paths: dict[str, str] = {}
        for volume in service.get("volumes", []):
            source, target = expand(volume, {}).split(":")[:2]
            real = ROOT / source if source.startswith(".") else self._folder / "volumes" / source
            if not source.startswith("."):
                real.mkdir(parents=True, exist_ok=True, mode=0o700)
            link = self._folder / "roots" / name / target.lstrip("/")
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(real)
            paths[target] = str(link)
        for target in service.get("tmpfs", []):
            paths[target] = str(self._folder / "roots" / name / target.lstrip("/"))
            Path(paths[target]).mkdir(parents=True, exist_ok=True)
        if name == WATCH:  # its file names paths and addresses
            link = Path(paths["/etc/prometheus/prometheus.yml"])
            text = self.here(link.read_text(encoding="utf-8"), paths)
            link.unlink()
            link.write_text(text, encoding="utf-8")
        return paths

    def here(self, text: str, mounts: Mapping[str, str]) -> str:
        """Return a command's word or a variable's value with this machine's paths and addresses."""
        if mounts:
            targets = "|".join(re.escape(target) for target in sorted(mounts, key=len, reverse=True))
            text = re.sub(rf"(?<![\w/.-])({targets})(?![\w-])", lambda match: mounts[match[1]], text)
        text = re.sub(r"(?<![\w.-])(nats|redis|gateway|planner):(?=\d)", "127.0.0.1:", text)
        text = text.replace("0.0.0.0", "127.0.0.1")
        for name, port in self.ports.items():
            text = re.sub(rf"(^|127\.0\.0\.1:){name}(?!\d)", rf"\g<1>{port}", text)
        return text

    def command(self, name: str, service: Mapping[str, Any], mounts: Mapping[str, str]) -> list[str]:
        """Return the command line of a service: its own, with this machine's programs and ports."""
        words = [self.here(str(word), mounts) for word in service["command"]]
        if name == "nats":
            return [str(find_nats_server()), *words, "-a", "127.0.0.1", "-p", str(self.ports["4222"])]
        if name == "redis":
            return [str(find_redis_server()), *words[1:], "--port", str(self.ports["6379"])]
        if name == WATCH:
            return [WATCH, *words, f"--web.listen-address=127.0.0.1:{self.ports['9090']}"]
        return [*service.get("entrypoint", [str(ROOT / "baton")]), *words]


async def run(folder: Path, queries: list[str]) -> int:
    """Start everything in compose's order, ask once, look at what is exposed, stop everything. Returns the exit code."""
    places = Places(folder)
    wanted = services(*PROFILES)
    async with contextlib.AsyncExitStack() as held:
        setup = await _start("users", wanted.pop("users"), places, folder)
        if code := await asyncio.wait_for(setup.wait(), CHECK_TIMEOUT_S):
            print(f"users ended with {code}: see {folder / 'users.log'}", file=sys.stderr)
            return 1
        for name in sorted(wanted, key=lambda one: one not in SERVERS):
            process = await _start(name, wanted[name], places, folder)
            held.push_async_callback(stop, process, STOP_TIMEOUT_S)
            if name in SERVERS:
                await _listens(places.ports["4222" if name == "nats" else "6379"])
        answer = await _ask(f"http://127.0.0.1:{places.ports['8000']}")
        for name, service in wanted.items():
            await _check(name, service, places)
        key = (folder / "volumes" / "metrics-key" / "key").read_text(encoding="utf-8")
        for name, port in METRICS.items():
            (folder / f"{name}.metrics").write_text(await _exposed(places.ports[port], key), encoding="utf-8")
        if WATCH in wanted:
            await _watched(places.ports["9090"], queries, folder)
    print(answer)
    return 0


async def _start(name: str, service: Mapping[str, Any], places: Places, folder: Path) -> asyncio.subprocess.Process:
    """Start one service with its own variables and no others of Baton's; its output goes to NAME.log."""
    mounts = places.mounts(name, service)
    given = {key: expand(str(value), VARIABLES) for key, value in service.get("environment", {}).items()}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    with (folder / f"{name}.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *places.command(name, service, mounts),
            env=inherited | {key: places.here(value, mounts) for key, value in given.items()},
            cwd=ROOT,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )


async def _listens(port: int) -> None:
    """Return once somebody listens there. Raises TimeoutError."""
    async with asyncio.timeout(CHECK_TIMEOUT_S):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(POLL_S)  # between attempts to connect: there is nothing to wait on yet


async def _check(name: str, service: Mapping[str, Any], places: Places) -> None:
    """Run a service's health check where it needs nothing but Python or `test`. Raises RuntimeError when it fails too often."""
    health = service.get("healthcheck", {})
    test = health.get("test", [])
    if test[:1] != ["CMD"] or test[1] not in (".venv/bin/python", "test"):
        return
    program = sys.executable if test[1] == ".venv/bin/python" else test[1]
    words = [program, *(places.here(word, places.mounts(name, service)) for word in test[2:])]
    for _ in range(health.get("retries", 3)):  # as compose does, with shorter pauses
        check = await asyncio.create_subprocess_exec(*words, cwd=ROOT, preexec_fn=die_with_parent)
        code = await asyncio.wait_for(check.wait(), CHECK_TIMEOUT_S)
        if not code:
            print(f"{name} is healthy")
            return
        await asyncio.sleep(PAUSE_S)
    raise RuntimeError(f"the health check of {name} ended with {code}")


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


async def _exposed(port: int, key: str) -> str:
    """Return a service's metrics, with the key that `users` made for Prometheus."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as client:
        return (await client.get(f"http://127.0.0.1:{port}/metrics")).raise_for_status().text


async def _watched(port: int, queries: list[str], folder: Path) -> None:
    """Wait until Prometheus scraped all and evaluated every rule, and ask it. Raises RuntimeError, TimeoutError."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=10) as client:
        async with asyncio.timeout(RULES_TIMEOUT_S):
            while not (seen := await _evaluated(client)):
                await asyncio.sleep(POLL_S)  # it scrapes and evaluates at times of its own
        answers = []
        for query in queries:
            told = (await client.get("/query", params={"query": query})).json()
            if told["status"] != "success":
                raise RuntimeError(f"prometheus refuses {query!r}: {told['error']}")
            answers.append(told["data"]["result"])
    (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    print(f"prometheus: {seen}, {len(queries)} queries answered")


async def _evaluated(client: httpx.AsyncClient) -> str:
    """Say what is scraped and evaluated, or "" while something is not yet. Raises RuntimeError for a rule that fails."""
    with contextlib.suppress(httpx.TransportError):
        targets = (await client.get("/targets")).json()["data"]["activeTargets"]
        groups = (await client.get("/rules")).json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        if failed := [rule for rule in rules if rule["health"] == "err"]:
            raise RuntimeError(f"prometheus: {failed[0]['name']}: {failed[0]['lastError']}")
        if (
            rules
            and {target["health"] for target in targets} == {"up"}
            and {rule["health"] for rule in rules} == {"ok"}
        ):
            return f"{len(targets)} targets scraped, {len(rules)} rules evaluated"
    return ""


async def _ready(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await client.get("/ready")).status_code == 200
    return False


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="docker-compose.yml's profiles cpu and planner as plain processes")
    parser.add_argument("--keep", type=Path, help="folder for logs and data; default: a temporary one")
    parser.add_argument("--queries", type=Path, help="a list in JSON of what to ask Prometheus")
    given = parser.parse_args()
    queries = json.loads(given.queries.read_text(encoding="utf-8")) if given.queries else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return asyncio.run(run(folder, queries))


if __name__ == "__main__":
    sys.exit(main())
