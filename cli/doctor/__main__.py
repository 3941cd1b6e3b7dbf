"""What is wrong here, and how to mend it: `baton doctor`."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import asdict

from cli.doctor import machine
from cli.doctor.finding import Finding
from cli.doctor.fleet import check_fleet
from cli.doctor.running import running
from cli.doctor.servers import check_nats, check_redis
from cli.doctor.settings import DoctorSettings
from common import bus, store
from common.settings import ROOT, ConfigError
from services.runtime.loading import fail, load_settings

DEVICES_S = 120.0  # torch and CUDA start slowly


def main() -> int:
    """Entry point: 1 when a check failed, 2 when the options are wrong."""
    logging.basicConfig(level=logging.CRITICAL)  # the findings report what the clients log
    try:
        settings = load_settings(DoctorSettings, command="doctor", arguments=sys.argv[1:])
        findings = asyncio.run(examine(settings))
    except ConfigError as error:
        return fail(error)
    if settings.print_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(*(finding.line() for finding in findings), sep="\n")
    return int(any(finding.level == "fail" for finding in findings))


async def examine(settings: DoctorSettings) -> list[Finding]:
    findings, settings = await running(settings)
    findings += [*machine.python_and_packages(), *machine.limits(), *machine.port(settings.host, settings.port)]
    findings += machine.model(settings.model)
    nats, redis = settings.nats(), settings.redis()
    findings += [finding async for finding in check_nats(nats.url, bus.identity_of(nats))]
    findings += [finding async for finding in check_redis(redis.url, store.identity_of(redis))]
    if not any(finding.check == "nats" and finding.level == "fail" for finding in findings):
        findings += [finding async for finding in check_fleet(settings)]
    return findings + (await devices() if settings.device != "cpu" else [])


async def devices() -> list[Finding]:
    """Check the GPUs in a child: torch stays out of this process, and a hanging driver is noticed."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.doctor.devices"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(child.communicate(), DEVICES_S)
        return [Finding(**finding) for finding in json.loads(output)]
    except (TimeoutError, ValueError) as error:
        if child.returncode is None:
            child.kill()
            await child.wait()
        remedy = "run `python -m cli.doctor.devices` and read its error; see dmesg"
        return [Finding("torch", "fail", f"the check of the GPUs gave no answer ({type(error).__name__})", remedy)]


if __name__ == "__main__":
    sys.exit(main())
