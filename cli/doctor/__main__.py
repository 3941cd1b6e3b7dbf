"""Findings about this machine and their fixes: `baton doctor`."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict

from cli.doctor import machine
from cli.doctor.child import asked
from cli.doctor.fleet import check_fleet
from cli.doctor.running import SERVERS, running
from cli.doctor.servers import check_nats, check_redis
from cli.doctor.settings import DoctorSettings
from common import bus, store
from common.settings import ConfigError
from services.runtime.checks.finding import Finding
from services.runtime.checks.gpus import Gpu, check_gpus, torch_build, visible_gpus
from services.runtime.checks.memory import available_bytes, check_fit
from services.runtime.checks.model import check_model
from services.runtime.loading import fail, load_settings
from services.worker.host_share import HostMB


def main() -> int:
    """Entry point: 1 when a check failed, 2 when the options are wrong."""
    logging.basicConfig(level=logging.CRITICAL)  # the findings report what the clients log
    try:
        settings = load_settings(DoctorSettings, command="doctor", arguments=sys.argv[1:])
        findings = asyncio.run(_told(settings))
    except ConfigError as error:
        return fail(error)
    if settings.print_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return int(any(finding.level == "fail" for finding in findings))


async def _told(settings: DoctorSettings) -> list[Finding]:
    """Collect all findings; print each as soon as it is known."""
    found = []
    async for finding in examine(settings):
        found.append(finding)
        if not settings.print_json:
            print(finding.line(), flush=True)
    return found


async def examine(settings: DoctorSettings) -> AsyncIterator[Finding]:
    """Yield findings, the quick ones first."""
    known, settings = await running(settings)
    for finding in known:
        yield finding
    for finding in (
        *machine.python_and_packages(),
        *machine.limits(HostMB.parse(settings.kv_host_mb)),
        *machine.port(settings.host, settings.port),
    ):
        yield finding
    is_on_gpu = settings.device.startswith("cuda")
    gpus = visible_gpus() if is_on_gpu else None
    found = list(_model(settings, gpus))
    is_whole = all(finding.level != "fail" for finding in found)
    ranks, stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
    total = (available_bytes() or 0) // (ranks * stages)
    if gpus is not None:
        total = min((gpu.total_bytes for gpu in gpus), default=0)
    words = (
        str(settings.model.absolute()),
        settings.device,
        str(ranks),
        str(total),
        str(int(settings.enable_expert_parallel)),
        str(stages),
    )
    reading = asyncio.create_task(asked("spec", *words)) if is_whole else None
    for finding in found:
        yield finding
    async for finding in _servers(settings):
        yield finding
    for finding in await reading if reading is not None else ():
        yield finding
    if not is_on_gpu:
        return
    there = check_gpus(settings.device, [settings.device], torch_build(), gpus)
    yield there
    if there.level != "fail":
        for finding in await asked("devices"):
            yield finding


def _model(settings: DoctorSettings, gpus: list[Gpu] | None) -> Iterator[Finding]:
    """Check if the model is supported, its size, and if it fits."""
    found = list(check_model(settings.model))
    yield from found
    if any(finding.level == "fail" for finding in found):
        return
    processes = settings.tensor_parallel_size * settings.pipeline_parallel_size
    yield check_fit(settings.model, gpus=gpus, ranks=processes)


async def _servers(settings: DoctorSettings) -> AsyncIterator[Finding]:
    """Check NATS, Redis, and the processes on the bus."""
    named = [server for server in SERVERS if any(name.startswith(f"{server}_") for name in settings.model_fields_set)]
    nats, redis = settings.nats(), settings.redis()
    on_bus = [one async for one in check_nats(nats.url, bus.identity_of(nats), is_named="nats" in named)]
    in_store = [one async for one in check_redis(redis.url, store.identity_of(redis), is_named="redis" in named)]
    for finding in on_bus + in_store:
        yield finding
    if len(on_bus) > 1 and all(finding.level != "fail" for finding in on_bus):  # one alone says that there is none
        async for finding in check_fleet(settings):
            yield finding


if __name__ == "__main__":
    sys.exit(main())
