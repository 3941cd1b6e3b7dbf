"""The planner's decisions for Prometheus. An autoscaler (KEDA, HPA) reads the desired workers here."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector

from common.messages import PlannerState


class PlannerMetrics:
    """Gauges of the newest decision."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._workers = self._gauge("baton_planner_workers", "Workers that take new work of a role")
        self._desired = self._gauge("baton_planner_desired_workers", "Workers of a role that would be enough")
        self._pressure = self._gauge("baton_planner_pressure", "Load of a role as a share of its capacity")
        self._of_models = Gauge(
            "baton_planner_model_desired_workers",
            "Workers of a model's role that would be enough",
            ["model_name", "role"],
            registry=self.registry,
        )
        self._wanted = Gauge(
            "baton_planner_model_wanted_workers",
            "Workers of a model's role that hosts should bring it to",
            ["model_name", "role"],
            registry=self.registry,
        )
        self._acts = Gauge("baton_planner_acts", "1: this planner moves workers", registry=self.registry)
        self._moves = Counter("baton_planner_moves", "Workers moved to another role", registry=self.registry)
        self._counted = 0

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["role"], registry=self.registry)

    def take(self, state: PlannerState) -> None:
        """Publish the newest decision."""
        for gauge, values in (
            (self._workers, state.workers),
            (self._desired, state.desired),
            (self._pressure, state.pressures),
        ):
            for role, value in values.items():
                gauge.labels(role).set(value)
        for gauge, models in ((self._of_models, state.models), (self._wanted, state.wanted)):
            gauge.clear()
            for model, roles in models.items():
                for role, count in roles.items():
                    gauge.labels(model, role).set(count)
        self._acts.set(state.acts)
        self._moves.inc(state.moves - self._counted)
        self._counted = state.moves
