"""A second process under a worker's name, of a release that asks nobody: no request is lost or blamed for it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.chaos.asks import Oracle
from tests.chaos.cluster import FAKE
from tests.chaos.kills import Verdict, judge
from tests.chaos.load import Load
from tests.chaos.upgrade import KNOWN_KINDS, LAST, HistoryIsMissingError, UpgradeCluster, check_out

STREAMS = 12
RANDOM_NUMBER = "secrets.randbits(63)"
OLDEST, YOUNGEST = 1, 2**63 - 1  # ours are seconds since 1970, and some bits
TAKEN = 2  # the exit code of who gives a name up


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
@pytest.mark.parametrize("ends", [True, False], ids=["which ends by its number", "which stays"])
async def test_a_worker_under_another_ones_name_costs_no_request(
    name: str, ends: bool, model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    try:
        code = check_out(LAST, tmp_path / "code")
    except HistoryIsMissingError as error:
        pytest.skip(str(error))
    give_number(code, OLDEST if ends else YOUNGEST)
    options = {"prefill": 2, "decode": 2, **FAKE, "fake_step_ms": 20}
    cluster = UpgradeCluster(tmp_path / "cluster", model=model, code=code, old=(), **options)
    async with cluster:
        verdict = await beside_another(cluster, oracle, name, ends=ends)
    assert (verdict.violations, verdict.broken, dict(verdict.errors)) == ([], [], {})


def give_number(code: Path, number: int) -> None:
    """Let processes of the last release begin with this incarnation: it says which of two is the older."""
    file = code / "services" / "runtime" / "worker_process.py"
    before = file.read_text()
    assert RANDOM_NUMBER in before
    file.write_text(before.replace(RANDOM_NUMBER, str(number)))


async def beside_another(cluster: UpgradeCluster, oracle: Oracle, name: str, *, ends: bool) -> Verdict:
    """Let a process of the last release take the name of a running worker for a while, under load.

    `ends`: by the numbers ours is the younger one, which gives the name up.
    """
    ours, both = cluster.processes[name], asyncio.Event()
    cluster.peers.on_heard(lambda _: both.set() if name in cluster.peers.contested else None)
    async with Load(cluster.balance, oracle, streams=STREAMS, first=60_000, kinds=KNOWN_KINDS) as load:
        await load.until_answered(STREAMS // 2)
        began = time.monotonic()
        cluster.old.add(name)
        await cluster.start(name)
        await both.wait()
        await load.until_answered(2 * STREAMS)
        if ends:  # before the other one is gone: else it may still be leaving when it is counted
            assert await ours.wait() == TAKEN
        await cluster.crash(name)
        cluster.old.discard(name)
        cluster.processes[name] = ours
        if ends:
            await cluster.again(name)
        await cluster.until_ready()
        await load.until_answered(STREAMS)
        outcomes = await load.stop()
    return judge("a name twice", outcomes, oracle, held=await cluster.until_idle(), began=began)
