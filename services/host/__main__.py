"""The host process: loads models of its plan when gateways want them, and unloads them when nobody does any more."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from common.bus import connect_bus
from common.errors import ServingError
from common.settings import ConfigError, Id
from services.host.host import Host
from services.host.nursery import Nursery, open_nursery
from services.host.plan import HostPlan, read_plan
from services.host.written import read_written
from services.runtime.loading import fail, load_settings
from services.runtime.log import start_logging
from services.runtime.names import made_up, new_incarnation
from services.runtime.settings import HostOptions
from services.runtime.signals import until_signalled

log = logging.getLogger("baton.host")


class HostSettings(HostOptions):
    """The host that `baton up` starts for models that are loaded on demand."""

    host_id: Id = Field("", description="name on the bus; empty: made up")
    host_plan: Path = Field(Path(), description="file with the models and their workers")


async def run(settings: HostSettings, plan: HostPlan, nursery: Nursery | None) -> None:
    """Load and unload until signalled."""
    host_id = settings.host_id
    try:
        async with (
            until_signalled() as stopping,
            connect_bus(settings.nats(), name=host_id, owns_streams=False) as bus,
        ):
            host = Host(bus, plan, host_id=host_id, incarnation=new_incarnation(), nursery=nursery)
            await host.run(stopping)
    finally:
        if nursery is not None:
            nursery.close()


def written_in(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file that comes first, and the rest."""
    if arguments and not arguments[0].startswith("-"):
        return Path(arguments[0]), list(arguments[1:])
    return None, list(arguments)


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        file, arguments = written_in(sys.argv[1:])
        settings = load_settings(HostSettings, command="host", arguments=arguments)
        if file is None and settings.host_plan == Path():
            raise ConfigError("baton host FILE.toml: name the file with the models; docs/operations.md has one")
        host_id, plan = read_written(file) if file is not None else ("", None)
        settings = settings.model_copy(update={"host_id": settings.host_id or host_id or made_up("host")})
        start_logging(service=settings.host_id, level=settings.log_level, form=settings.log_format)
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # no worker ends by an order that comes before it hears any
            signal.signal(number, signal.SIG_IGN)
        plan = plan or read_plan(settings.host_plan)
        if plan.parks_s and plan.stays_awake:
            log.warning("host.unloads_instead_of_sleep", extra={"why": plan.stays_awake})
        nursery = open_nursery(1) if plan.forks else None  # one that lends no weights: they would stay in memory
        asyncio.run(run(settings, plan, nursery))
    except (ConfigError, ServingError, OSError, ValueError) as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
