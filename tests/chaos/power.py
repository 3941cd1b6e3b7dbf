"""Power cuts of the broker, emulated: its store is a file system in a file, and a cut leaves what had reached that file.

What the server wrote and Linux still kept in its page cache is lost, as with a real cut; kill -9 alone would keep it. Needs root
(mount). The durable stream is BATON_DEAD: jobs are in memory, and their gateways queue them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import nats

from common import subjects
from common.bus import NatsSettings, connect_bus
from common.servers import DEPLOY, die_with_parent, find_nats_server, free_port, port_is_free
from tests.chaos.cluster import FaultDidNotHappenError
from tests.integration.waiting import eventually

DISK_MB = 48
OPTION = "sync_interval: always"


def can_mount() -> bool:
    """Whether this process may mount a file: root, outside of most containers."""
    return os.geteuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4") is not None


async def cut(folder: Path, *, always: bool, publish_s: float) -> tuple[int, int]:
    """Publish for a while, cut the power, start again. Return how many messages were acknowledged, and how many of them lost."""
    folder.mkdir(parents=True)
    disk, after = folder / "disk", folder / "disk-after-the-cut"
    _run("truncate", "-s", f"{DISK_MB}M", str(disk))
    _run("mkfs.ext4", "-q", "-F", str(disk))
    config = _config(folder, always=always)
    with _mounted(disk, folder / "mnt") as mnt:
        async with _server(config, mnt) as (process, url):
            acked = await _publish(url, publish_s)
            process.send_signal(signal.SIGSTOP)
            _copy_at_rest(disk, after)
            process.kill()
            await process.wait()
    with _mounted(after, folder / "mnt") as mnt:
        async with _server(config, mnt) as (_, url):
            kept = await _kept(url)
    for image in (disk, after):
        image.unlink()
    return len(acked), len(acked - kept)


def _config(folder: Path, *, always: bool) -> Path:
    shipped = (DEPLOY / "nats" / "nats.conf").read_text()
    if f"\n  {OPTION}\n" not in shipped:
        raise FaultDidNotHappenError(f"deploy/nats/nats.conf has no line `{OPTION}` to turn off")
    file = folder / "nats.conf"
    file.write_text(shipped if always else shipped.replace(OPTION, ""))
    return file


async def _publish(url: str, seconds: float) -> set[int]:
    async with connect_bus(NatsSettings(url=url), name="chaos"):  # creates the streams
        client = await nats.connect(url)
        stream, acked, end = client.jetstream(), set(), time.monotonic() + seconds
        while time.monotonic() < end:
            batch = range(len(acked), len(acked) + 16)
            subject = subjects.dead_letter("job")
            await asyncio.gather(*(stream.publish(subject, b"%d" % number + bytes(1000)) for number in batch))
            acked |= set(batch)
        await client.close()
        return acked


async def _kept(url: str) -> set[int]:
    client = await nats.connect(url)
    try:
        stream = client.jetstream()
        try:
            state = (await stream.stream_info(subjects.DEAD_STREAM)).state
        except nats.js.errors.NotFoundError:
            return set()
        kept = set()
        for number in range(state.first_seq, state.last_seq + 1):
            with contextlib.suppress(nats.js.errors.NotFoundError):
                message = await stream.get_msg(subjects.DEAD_STREAM, number)
                kept.add(int((message.data or b"").rstrip(b"\0")))
        return kept
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _server(config: Path, store: Path):  # type: ignore[no-untyped-def]
    port = free_port()
    command = [str(find_nats_server()), "-c", str(config), "-a", "127.0.0.1", "-sd", str(store), "-p", str(port)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, preexec_fn=die_with_parent
    )

    async def listens() -> bool:
        return not port_is_free(port)

    try:
        await eventually(listens)
        yield process, f"nats://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


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
