"""Two releases on one bus: processes of an older commit, taken from the repository's history, beside those of this tree."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.asks import KINDS, Oracle
from tests.chaos.cluster import ChaosCluster
from tests.chaos.kills import Verdict, judge
from tests.chaos.load import Load
from tests.e2e.cluster import ROOT
from tests.release import COMMIT, NAME

PACKAGES = (
    "common",
    "decode",
    "deploy",
    "engine",
    "gateway",
    "kvtransfer",
    "planner",
    "prefill",
    "services",
    "telemetry",
    "worker",
)
# What a process of the older release can be asked for.
KNOWN_KINDS = tuple(kind for kind in KINDS if not kind.startswith("grammar"))
CHECKOUT_S = 180.0  # a second on a quiet machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """An older commit."""

    name: str
    commit: str


LAST = Release(name=NAME, commit=COMMIT)


class HistoryIsMissingError(Exception):
    """This is no clone of the repository, or a shallow one."""


def check_out(release: Release, folder: Path) -> Path:
    """Put the release's packages into a new folder below `folder` and return it. Raises HistoryIsMissingError."""
    where, archive = folder / release.commit, folder / f"{release.commit}.tar"
    folder.mkdir(parents=True, exist_ok=True)
    command = ["git", "-C", str(ROOT), "archive", "--output", str(archive), release.commit, *PACKAGES]
    if shutil.which("git") is None or subprocess.run(command, capture_output=True, timeout=CHECKOUT_S).returncode != 0:
        raise HistoryIsMissingError(f"commit {release.commit} is not here: a shallow clone, or no clone at all")
    with tarfile.open(archive) as tar:
        tar.extractall(where, filter="data")
    archive.unlink()
    return where


class UpgradeCluster(ChaosCluster):
    """Two gateways, and processes of two releases: those in `old` run the older one's code from their next start on."""

    beside_0_1_0 = True

    def __init__(
        self,
        folder: Path,
        *,
        model: Path,
        code: Path,
        old: Sequence[str] | None = None,
        **options: object,
    ) -> None:
        """`code`: where the release was checked out. `old` None: everything."""
        super().__init__(folder, model=model, gateways=2, **options)
        self.old = set(self.names + self.gateways if old is None else old)
        self._code = code

    def _root(self, name: str) -> Path:
        return self._code if name in self.old else super()._root(name)

    def _worker_flags(self, name: str) -> list[str]:
        flags = super()._worker_flags(name)
        return _said_in_0_1_0(flags) if name in self.old else flags

    async def replace(self, name: str, *, old: bool) -> None:
        """Drain a process by SIGTERM and start the other release in its place. A gateway gets no new requests meanwhile."""
        await self.leave(name)
        (self.old.add if old else self.old.discard)(name)
        await self.again(name)
        self.leaving.discard(name)


def _said_in_0_1_0(flags: list[str]) -> list[str]:
    """A worker's flags, those for a fake device under their former names."""
    found: list[str] = []
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        device, *costs = value.split(":")
        if (flag, device) == ("--device", "fake"):
            found += ["--fake", "--fake-step-ms", costs[0], "--fake-token-us", costs[1]]
        else:
            found += [flag, value]
    return found


async def roll(
    cluster: UpgradeCluster, oracle: Oracle, names: Sequence[str], *, old: bool, streams: int, first: int
) -> Verdict:
    """Replace one process after the other while `streams` requests are in flight."""
    async with Load(cluster.balance, oracle, streams=streams, first=first, kinds=KNOWN_KINDS) as load:
        await load.until_answered(streams // 2)
        began = time.monotonic()
        for name in names:
            await cluster.replace(name, old=old)
            await load.until_answered(streams)
        outcomes = await load.stop()
    return judge("upgrade", outcomes, oracle, held=await cluster.until_idle(), began=began)
