"""Power cuts of the broker, emulated: its store is a file system in a file, and a cut leaves what had reached that file.

What the server wrote and Linux still kept in its page cache is lost, as with a real cut; kill -9 alone would keep it. Needs root
(mount). What must survive are batches: each line that was acknowledged has exactly one result in the end, the right one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.runtime.servers import DEPLOY, run_nats
from tests.chaos.asks import SPECIAL, VOCABULARY, Oracle
from tests.chaos.cluster import ChaosCluster, FaultDidNotHappenError
from tests.e2e.cluster import READY_S
from tests.integration.waiting import eventually

DISK_MB = 64
OPTION = "sync_interval: always"
# Read after the shipped file, in place of its block.
DEFAULT = "jetstream {\n  max_memory_store: 256MB\n  max_file_store: 8GB\n}\n"
LINES, TOKENS = 40, 16
OVER = ("completed", "failed", "expired", "cancelled")
ENDS_WITHIN_S = 120.0
GONE_AFTER_S = 10.0  # of no progress, with the default: what is lost never comes


def can_mount() -> bool:
    """Whether this process may mount a file: root, outside of most containers."""
    return os.geteuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4") is not None


class PowerCluster(ChaosCluster):
    """A cluster whose NATS keeps its store on a disk of its own. `always`: with the configuration that is shipped."""

    def __init__(self, folder: Path, *, always: bool = True, **options: Any) -> None:
        super().__init__(folder, **options)
        self._always = always
        self._disk = folder / "disk-0"
        self._life = contextlib.AsyncExitStack()  # of a server, and its mount

    async def start_nats(self, *, port: int = 0) -> None:
        if not self._disk.exists():
            _run("truncate", "-s", f"{DISK_MB}M", str(self._disk))
            _run("mkfs.ext4", "-q", "-F", str(self._disk))
            self._stack.push_async_callback(self._power_off)
            if f"\n  {OPTION}\n" not in (DEPLOY / "nats" / "nats.conf").read_text():
                raise FaultDidNotHappenError(f"deploy/nats/nats.conf has no line `{OPTION}`")
        store = self._life.enter_context(_mounted(self._disk, self.folder / "mnt"))
        extra = self.users.nats + ("" if self._always else DEFAULT)
        log_file = self.folder / "nats.log"
        self.nats = await self._life.enter_async_context(
            run_nats(port=port, data_dir=store, log_file=log_file, extra=extra)
        )
        self.nats.login = self.users.admin_nats

    async def cut(self) -> None:
        """The power fails, and comes back: the server finds what had reached the disk."""
        after = self.folder / f"disk-{len(self.faults) + 1}"
        self.nats.process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(_copy_at_rest, self._disk, after)
        self.nats.process.kill()
        await self.nats.process.wait()
        port = self.nats.port
        await self._power_off()
        self._disk.unlink()
        self._disk = after
        self.faults.append("power cut")
        await self.start_nats(port=port)

    async def until_ready(self) -> None:
        """A cluster without workers takes batches, and no more."""
        if self.names:
            await super().until_ready()
            return
        async with httpx.AsyncClient(base_url=self.url, timeout=2.0) as client:

            async def serves() -> bool:
                with contextlib.suppress(httpx.HTTPError):
                    return (await client.get("/v1/batches")).status_code == 200
                return False

            await eventually(serves, READY_S)

    async def _power_off(self) -> None:
        await self._life.aclose()


@dataclass(slots=True, kw_only=True)
class Cuts:
    """What became of the lines of acknowledged batches."""

    acknowledged: int = 0
    lost: int = 0  # no result
    again: int = 0  # more than one
    wrong: int = 0  # not what the fake device says, or an error
    done_before: list[int] = field(default_factory=list)  # lines of the batch with a result, when the power failed


async def cut_power(folder: Path, *, model: Path, oracle: Oracle, cuts: int, always: bool) -> Cuts:
    """Cut the power `cuts` times, each time with a batch that was acknowledged: queued (every second time), or running.

    With NATS's default nothing is there to be run after it: then there are no workers.
    """
    found, chance = Cuts(), random.Random(cuts)
    options: dict[str, Any] = {
        "fake": True,
        "kv_memory_mb": 8,
        "fake_step_ms": 10,
        "prefill": 0,
        "decode": 0,
        "both": int(always),
    }
    async with PowerCluster(folder, model=model, always=always, **options) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as client:
            batches: dict[str, list[dict[str, Any]]] = {}
            for number in range(cuts):
                lines = [line_of(chance, place) for place in range(LINES)]
                batch = await _begin(client, lines)
                batches[batch] = lines
                found.acknowledged += len(lines)
                found.done_before.append(await _until_done(client, batch, number % 2 * chance.randint(1, LINES // 2)))
                await cluster.cut()
                await cluster.until_ready()
            for batch, lines in batches.items():
                judge(found, lines, await _entries(client, batch, hopeful=always), oracle)
    return found


def line_of(chance: random.Random, number: int) -> dict[str, Any]:
    """A line of a batch; `number` is its name."""
    body = {
        "model": "tiny",
        "prompt": [chance.randint(SPECIAL, VOCABULARY) for _ in range(chance.randint(4, 60))],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}


async def _begin(client: httpx.AsyncClient, lines: list[dict[str, Any]]) -> str:
    """Return a batch's id once it is acknowledged."""

    async def ask(path: str, **options: Any) -> dict[str, Any] | None:
        """A gateway that has just lost its server may say 503: nothing was acknowledged then."""
        answer = await client.post(path, **options)
        if answer.status_code not in (200, 503):
            raise AssertionError(answer.text)
        return answer.json() if answer.status_code == 200 else None

    raw = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", raw)}}
    file = await eventually(lambda: ask("/v1/files", **form))
    assert file is not None
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await eventually(lambda: ask("/v1/batches", json=body))
    assert batch is not None
    return str(batch["id"])


async def _look(client: httpx.AsyncClient, batch: str) -> dict[str, Any]:
    """A batch as it is; its status is "gone" where it is not known."""
    answer = await client.get(f"/v1/batches/{batch}")
    if answer.status_code == 404:
        return {"status": "gone", "request_counts": {"completed": 0, "failed": 0}}
    return answer.json() if answer.status_code == 200 else {"status": "away", "request_counts": {"completed": 0}}


async def _until_done(client: httpx.AsyncClient, batch: str, lines: int) -> int:
    """Wait until so many of a batch's lines are done; return how many are."""

    async def enough() -> dict[str, Any] | None:
        seen = await _look(client, batch)
        return seen if seen["request_counts"]["completed"] >= lines or seen["status"] in OVER else None

    seen = await eventually(enough, ENDS_WITHIN_S)
    assert seen is not None
    return int(seen["request_counts"]["completed"])


async def _entries(client: httpx.AsyncClient, batch: str, *, hopeful: bool) -> list[dict[str, Any]]:
    """The entries of both files of a batch that is over; none of one that never will be."""
    give_up_at = time.monotonic() + (ENDS_WITHIN_S if hopeful else GONE_AFTER_S)
    seen = await _look(client, batch)
    while seen["status"] not in OVER:
        if time.monotonic() > give_up_at or (seen["status"] == "gone" and not hopeful):
            return []
        await asyncio.sleep(0.2)
        seen = await _look(client, batch)
    found = []
    for file in (seen["output_file_id"], seen["error_file_id"]):
        if file is not None:
            found += (await client.get(f"/v1/files/{file}/content")).text.splitlines()
    return [json.loads(line) for line in found]


def judge(found: Cuts, lines: list[dict[str, Any]], entries: list[dict[str, Any]], oracle: Oracle) -> None:
    """Compare a batch's lines with the entries of its files."""
    counts = Counter(entry["custom_id"] for entry in entries)
    bodies = {line["custom_id"]: line["body"] for line in lines}
    found.lost += sum(not counts[name] for name in bodies)
    found.again += sum(count > 1 for count in counts.values()) + len(set(counts) - set(bodies))
    for entry in entries:
        response = entry["response"] or {}
        choices = response.get("body", {}).get("choices")
        body = bodies.get(entry["custom_id"])
        found.wrong += body is None or not choices or choices[0]["token_ids"] != oracle.answer(body)[0].tokens


def _copy_at_rest(disk: Path, copy: Path) -> None:
    """Copy what is on the disk at one instant: again, if something was written meanwhile."""
    for _ in range(10):
        before = _writes(disk)
        shutil.copyfile(disk, copy)
        if _writes(disk) == before:
            return
    raise FaultDidNotHappenError("the disk never came to rest")


def _writes(disk: Path) -> str:
    device = _run("losetup", "-j", str(disk), "-O", "NAME", "-n").strip()
    return Path(f"/sys/block/{Path(device).name}/stat").read_text().split()[4]


@contextlib.contextmanager
def _mounted(disk: Path, where: Path) -> Iterator[Path]:
    where.mkdir(exist_ok=True)
    _run("mount", "-o", "loop", str(disk), str(where))
    try:
        yield where
    finally:
        _run("umount", str(where))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
