"""The planner process: `baton planner`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys

from prometheus_client import start_http_server

from common.bus import connect_bus
from common.config import ConfigError, PlannerSettings, fail, load_settings
from common.errors import ServingError
from common.peers import Peers
from common.telemetry import start_logging
from services.connections import nats_settings
from services.leaving import until_signalled
from services.planner.metrics import PlannerMetrics
from services.planner.plan import PlanSettings
from services.planner.planner import Planner, PlannerConfig

log = logging.getLogger("baton.planner")


async def run(settings: PlannerSettings) -> None:
    """Watch the fleet and move roles until signalled; workers keep the roles that they have then."""
    planner_id = settings.planner_id or f"planner-{secrets.token_hex(4)}"
    metrics = PlannerMetrics()
    async with (
        until_signalled() as stopping,
        connect_bus(nats_settings(settings), name=planner_id, owns_streams=False) as bus,
    ):
        if settings.plan_metrics_port:
            start_http_server(settings.plan_metrics_port, settings.plan_metrics_host, registry=metrics.registry)
        peers = Peers()
        await peers.start(bus)
        planner = Planner(bus, peers, config_of(settings, planner_id), report=metrics.take)
        await planner.start()
        log.info("planner.ready", extra={"planner": planner_id, "dry_run": settings.plan_dry_run})
        await planner.run(stopping)
        await peers.close()


def config_of(settings: PlannerSettings, planner_id: str) -> PlannerConfig:
    """What the settings mean for the decisions."""
    return PlannerConfig(
        planner_id=planner_id,
        period_s=settings.plan_period_s,
        dry_run=settings.plan_dry_run,
        plan=PlanSettings(
            horizon_s=settings.ttft_slo_ms / 1000,
            hold_s=settings.plan_hold_s,
            cooldown_s=settings.plan_cooldown_s,
            reverse_s=settings.plan_reverse_s,
            prefill_high=settings.plan_prefill_high,
            prefill_low=settings.plan_prefill_low,
            decode_high=settings.plan_decode_high,
            decode_low=settings.plan_decode_low,
            step_level_ms=settings.tpot_slo_ms,
            attainment=settings.plan_attainment,
        ),
    )


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        settings = load_settings(PlannerSettings, command="planner", arguments=sys.argv[1:])
        start_logging(service=settings.planner_id or "planner", level=settings.log_level, form=settings.log_format)
        asyncio.run(run(settings))
    except (ConfigError, ServingError, OSError, ValueError) as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
