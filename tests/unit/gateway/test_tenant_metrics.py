"""What tenants used, what it cost, and what is left of their budgets."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from common.messages import NO_GOAL, Goal, Settle, Tokens, WorkerState
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.tenant_metrics import MAX_TENANTS, OTHERS, Rates, TenantLabels, TenantMetrics, device_seconds
from gateway.request.attempt import AttemptLine
from gateway.request.spec import Load
from gateway.request.timeline import Timeline
from gateway.tenants.budgets import Limits, LocalBudgets
from gateway.tenants.tenants import Tenant
from tests.fakes.workers import a_worker

PREFILL = a_worker("p", "prefill", prefill_tokens_per_s=1000.0, decode_step_ms=0.0)
DECODE = a_worker("d", "decode", prefill_tokens_per_s=0.0, decode_step_ms=20.0, running=4)
FAST = a_worker("fast", "prefill", "decode", prefill_tokens_per_s=3000.0, decode_step_ms=5.0, running=0)


def attempt(number: int = 1, *, prompt: int = 100, cached: int = 40, tokens: int = 11, by: str = "p") -> AttemptLine:
    line = AttemptLine(
        number=number, began_at=1.0, because="", prefill=by, decode=["d"], reason="x", prompt_tokens=prompt
    )
    line.claimed_by, line.cached_tokens, line.num_tokens = by, cached, tokens
    line.first_token_at = 1.0 if tokens else None
    return line


def ended(*attempts: AttemptLine, tenant: str = "acme") -> Timeline:
    line = Timeline(request_id="r-0", received_at=0.0, submitted_at=0.0, prompt_tokens=100, asker=Tenant(name=tenant))
    for one in attempts:
        line.began(one)
    line.first_token_at, line.cached_tokens, line.completion_tokens = 1.0, 40, 11
    line.ended("length", "", 2.0)
    return line


def decoded_by(line: AttemptLine, worker: str) -> AttemptLine:
    line.decode = [worker]
    if worker != line.claimed_by:
        line.settled = Settle(request_id="r", attempt=line.number, worker="p", incarnation=1, decode_worker=worker)
    return line


def test_a_request_costs_its_computed_tokens_and_its_part_of_the_steps() -> None:
    cost = device_seconds(ended(decoded_by(attempt(), "d")), Rates.of([PREFILL, DECODE, FAST]))
    assert cost.prefill == pytest.approx(60 / 1000)
    assert cost.decode == pytest.approx(10 * 0.020 / 4)  # four share a step


def test_all_attempts_that_brought_tokens_cost_something_also_those_of_workers_that_are_gone() -> None:
    lost = decoded_by(attempt(1, by="gone"), "gone too")
    nothing = attempt(2, tokens=0)
    again = attempt(3, prompt=110, cached=0, tokens=1, by="fast")
    cost = device_seconds(ended(lost, nothing, again), Rates.of([PREFILL, DECODE, FAST]))
    mean_s = (1 / 1000 + 1 / 3000) / 2
    assert cost.prefill == pytest.approx(60 * mean_s + 110 / 3000)
    assert cost.decode == pytest.approx(10 * (0.020 / 4 + 0.005) / 2)
    assert device_seconds(ended(lost), Rates()).prefill == 0  # nobody has measured anything


def metrics_of(
    fleet: list[WorkerState], limits: dict[str, Limits], budgets: LocalBudgets
) -> tuple[TenantMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    made = TenantMetrics(
        ("m",), registry, workers=lambda: fleet, budgets=budgets, limits=lambda: limits, labels=TenantLabels()
    )  # fmt: skip
    return made, registry


async def test_budgets_are_shown_as_they_are_now_and_only_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    budgets = LocalBudgets(clock=lambda: now)
    monkeypatch.setattr("gateway.observe.tenant_metrics.FRESH_S", 0.0)
    acme = Limits(requests_per_minute=60, tokens_per_minute=6000, max_concurrent=3)
    limits = {"acme": acme, "free": Limits(tokens_per_minute=600)}
    metrics, registry = metrics_of([], limits, budgets)

    def value(name: str, tenant: str, budget: str) -> float | None:
        return registry.get_sample_value(
            f"baton_tenant_budget_{name}", {"model_name": "m", "tenant": tenant, "budget": budget}
        )

    for name in ("r0", "r1"):
        await budgets.take("acme", acme, name, tokens=1000, ttl_s=60)
    await metrics.refresh()
    assert [value("used", "acme", name) for name in ("requests", "tokens", "concurrent")] == [2, 2000, 2]
    assert [value("limit", "acme", name) for name in ("requests", "tokens", "concurrent")] == [60, 6000, 3]
    assert [value("used", "free", name) for name in ("requests", "tokens", "concurrent")] == [None, 0, None]
    now += 1.0  # a sixtieth of a minute's worth comes back
    await metrics.refresh()
    assert [value("used", "acme", name) for name in ("requests", "tokens", "concurrent")] == [1, 1900, 2]
    del limits["acme"]  # the file was read again
    await metrics.refresh()
    assert value("limit", "acme", "requests") is None
    assert [entry["tenant"] for entry in metrics.as_json()] == ["free"]


async def test_what_was_used_is_counted_by_tenant() -> None:
    metrics, registry = metrics_of([PREFILL, DECODE], {}, LocalBudgets())
    for tenant in ("acme", "acme", "free"):
        metrics.observe(ended(decoded_by(attempt(), "d"), tenant=tenant))
    labels = {"model_name": "m", "tenant": "acme"}
    assert registry.get_sample_value("baton_tenant_requests_total", labels) == 2
    assert registry.get_sample_value(
        "baton_tenant_device_seconds_total", labels | {"phase": "prefill"}
    ) == pytest.approx(0.12)
    assert registry.get_sample_value(
        "baton_tenant_device_seconds_total", labels | {"phase": "decode"}
    ) == pytest.approx(0.1)
    acme, free = metrics.as_json()
    assert (acme["tenant"], acme["requests"], acme["completion_tokens"], acme["budgets"]) == ("acme", 2, 22, {})
    assert (acme["prompt_tokens"], acme["cached_tokens"], acme["prefill_s"], acme["decode_s"]) == (200, 80, 0.12, 0.1)
    assert free["tenant"] == "free"


def test_goodput_and_slack_are_counted_by_tenant() -> None:
    metrics, registry = metrics_of([], {}, LocalBudgets())
    goals = [Goal(ttft_ms=1500.0, tpot_ms=200.0), Goal(ttft_ms=900.0), NO_GOAL]
    for goal in goals:  # first token after 1 s, 10 more within another second
        line = ended(decoded_by(attempt(), "d"))
        line.goal = goal
        metrics.observe(line)
    patient, left = ended(), ended()
    patient.patient, left.status = True, "cancelled"
    metrics.observe(patient)
    metrics.observe(left)

    def value(name: str, **labels: str) -> float | None:
        found = {"model_name": "m", "tenant": "acme"} | labels
        return registry.get_sample_value(f"baton_tenant_slo_{name}_total", found)

    assert [value("requests", missed=missed) for missed in ("none", "ttft", "tpot")] == [2, 1, None]
    assert [value("seconds", part="ttft", of=of) for of in ("goal", "taken")] == [
        pytest.approx(2.4),
        pytest.approx(2.0),
    ]
    assert [value("seconds", part="tpot", of=of) for of in ("goal", "taken")] == [
        pytest.approx(2.0),
        pytest.approx(1.0),
    ]
    [acme] = metrics.as_json()
    assert (acme["requests"], acme["judged"], acme["good"]) == (5, 3, 2)


def test_labels_are_bounded_and_a_tenant_keeps_its_own() -> None:
    labels = TenantLabels()
    metrics = GatewayMetrics(["m"], tenants=labels)
    counts = {f"work:t{index}": 1 for index in range(MAX_TENANTS + 50)}
    for _ in range(2):
        text = metrics.render({"m": Load(counters=counts)}).decode()
    tokens = [line for line in text.splitlines() if line.startswith("baton_tenant_tokens_total{")]
    assert len(tokens) == MAX_TENANTS + 1
    assert f'baton_tenant_tokens_total{{model_name="m",tenant="{OTHERS}"}} 50.0' in tokens
    assert (labels.of("t0"), labels.of(f"t{MAX_TENANTS}"), labels.of("t0")) == ("t0", OTHERS, "t0")


def test_a_first_token_says_how_much_was_cached_there() -> None:
    line = attempt(cached=0, tokens=0)
    line.cached_tokens = None
    timeline = Timeline(request_id="r-0", received_at=0.0, submitted_at=0.0, prompt_tokens=100)
    timeline.began(line)
    timeline.took(Tokens(request_id="r-0", attempt=1, position=0, token_ids=b"", cached_tokens=64), 1, "", 1.0)
    assert line.cached_tokens == 64
    again = attempt(2)
    again.cached_tokens = again.first_token_at = None
    timeline.began(again)
    timeline.took(Tokens(request_id="r-0", attempt=2, position=1, token_ids=b""), 1, "", 2.0)
    assert again.cached_tokens is None  # told with the request's first token alone
