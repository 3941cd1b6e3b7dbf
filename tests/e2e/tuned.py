"""Services whose constants a test sets, by flags that the product lacks: `python -m tests.e2e.tuned gateway --window-s 0.2 …`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gateway.admission.policy import RequestLimits
from gateway.batches.records import BatchLimits
from gateway.observe.attainment import ServiceLevels
from planner.planner import PlannerConfig
from services.gateway.settings import GatewaySettings
from services.planner.settings import PlannerSettings

OF_WORKERS = ("--max-prefills", "--fake-faults", "--pull-s")


class TunedGateway(GatewaySettings):
    """A gateway with bounds and windows that a test reaches."""

    window_s: float = RequestLimits().window_s
    slo_window_s: float = ServiceLevels().window_s
    batch_file_bytes: int = BatchLimits().file_bytes
    batch_lines: int = BatchLimits().file_lines
    batch_line_bytes: int = BatchLimits().line_bytes

    def limits(self) -> RequestLimits:
        return replace(super().limits(), window_s=self.window_s)

    def levels(self) -> ServiceLevels:
        return replace(super().levels(), window_s=self.slo_window_s)

    def batches(self) -> BatchLimits:
        return replace(
            super().batches(),
            file_bytes=self.batch_file_bytes,
            file_lines=self.batch_lines,
            line_bytes=self.batch_line_bytes,
        )


class TunedPlanner(PlannerSettings):
    """A planner as patient as a test."""

    plan_period_s: float = 2.0
    plan_hold_s: float = 10.0
    plan_pause_s: float = 60.0  # between any two moves

    def config(self, planner_id: str, incarnation: int) -> PlannerConfig:
        config = super().config(planner_id, incarnation)
        rules = replace(config.plan, hold_s=self.plan_hold_s, cooldown_s=self.plan_pause_s, reverse_s=self.plan_pause_s)
        return replace(config, period_s=self.plan_period_s, plan=rules)


def is_tuned(service: str, options: Sequence[str]) -> bool:
    """Whether the options have one that the product lacks."""
    tuned: dict[str, type[GatewaySettings | PlannerSettings]] = {"gateway": TunedGateway, "planner": TunedPlanner}
    names = tuned[service].__annotations__ if service in tuned else ()
    return any(flag in options for flag in OF_WORKERS) or any(
        f"--{name.replace('_', '-')}" in options for name in names
    )


def main(service: str) -> int:
    """The entry point of a service."""
    if service == "gateway":
        from services.gateway.process import main as serve

        return serve(TunedGateway)
    if service == "planner":
        from services.planner.__main__ import main as watch

        return watch(TunedPlanner)
    return work(service)


def work(service: str) -> int:
    """A worker that holds fewer prompts, waits longer for what it pulls, or whose fake device has faults."""
    from engine.fake.engine import FakeEngine
    from engine.fake.faults import FakeFaults
    from services.worker import process
    from worker.pulls import puller

    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--max-prefills", type=int, default=16)
    flags.add_argument("--fake-faults", type=FakeFaults, default="")
    flags.add_argument("--pull-s", type=float, default=puller.LEAST_S)
    own, sys.argv[1:] = flags.parse_known_args(sys.argv[1:])
    puller.LEAST_S = own.pull_s
    for name, made in (
        ("PrefillRole", partial(process.PrefillRole, max_requests=own.max_prefills)),
        ("FakeEngine", partial(FakeEngine, faults=own.fake_faults)),
    ):
        setattr(process, name, made)
    return process.main(service)


if __name__ == "__main__":
    sys.exit(main(sys.argv.pop(1)))
