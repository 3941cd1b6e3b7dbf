"""The planner process: `baton planner`."""

from __future__ import annotations

import asyncio
import logging
import sys

from prometheus_client import start_http_server

from common.bus import connect_bus
from common.errors import ServingError
from common.peers import Peers
from common.settings import ConfigError
from planner.metrics import PlannerMetrics
from planner.planner import Planner
from services.planner.settings import PlannerSettings
from services.runtime.loading import fail, load_settings
from services.runtime.log import start_logging
from services.runtime.names import made_up, new_incarnation
from services.runtime.signals import until_signalled

log = logging.getLogger("baton.planner")


async def run(settings: PlannerSettings) -> None:
    """Watch the fleet and move roles until signalled; workers then keep their roles."""
    planner_id = settings.planner_id or made_up("planner")
    metrics = PlannerMetrics()
    async with (
        until_signalled() as stopping,
        connect_bus(settings.nats(), name=planner_id, owns_streams=False) as bus,
    ):
        if settings.plan_metrics:
            host, _, port = settings.plan_metrics.rpartition(":")
            start_http_server(int(port), host.strip("[]"), registry=metrics.registry)
        peers = Peers()
        await peers.start(bus)
        planner = Planner(bus, peers, settings.config(planner_id, new_incarnation()), report=metrics.take)
        await planner.start()
        log.info("planner.ready", extra={"planner": planner_id, "dry_run": settings.plan_dry_run})
        await planner.run(stopping)
        await peers.close()


def main(kind: type[PlannerSettings] = PlannerSettings) -> int:
    """Entry point; returns the exit code."""
    try:
        settings = load_settings(kind, command="planner", arguments=sys.argv[1:])
        start_logging(service=settings.planner_id or "planner", level=settings.log_level, form=settings.log_format)
        asyncio.run(run(settings))
    except (ConfigError, ServingError, OSError, ValueError) as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
