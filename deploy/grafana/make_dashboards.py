"""Write dashboards/*.json from the tables below: `python deploy/grafana/make_dashboards.py`. A test keeps them up to date.

A panel is a title, a unit, and queries with legends; `$model` is the model, `$__rate_interval` Grafana's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent / "dashboards"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
MODEL = 'model_name=~"$model"'


class Panel(NamedTuple):
    title: str
    unit: str
    queries: list[tuple[str, str]]  # expression, legend
    kind: str = "timeseries"
    about: str = ""


def quantiles(histogram: str) -> list[tuple[str, str]]:
    """p50, p95 and p99 of a histogram."""
    rate = f"sum by (le) (rate({histogram}_bucket{{{MODEL}}}[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {rate})", f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99)]


def rate(counter: str, *, by: str = "", labels: str = MODEL) -> str:
    """Per second, summed."""
    return f"sum by ({by}) (rate({counter}{{{labels}}}[$__rate_interval]))"


def worker(metric: str) -> str:
    """A worker's gauge; every gateway tells it, so each worker is taken once."""
    return f"max by (worker) ({metric}{{{MODEL}}})"


def worker_rate(counter: str, *, by: str = "worker") -> str:
    """A worker's counter per second."""
    return f"max by ({by}) (rate({counter}{{{MODEL}}}[$__rate_interval]))"


PHASES = (
    "http, admission, queue, prefill and first_frame add up to the time to the first token. "
    "transfer, push, late_push and handover run beside it."
)
DASHBOARDS: dict[str, tuple[str, list[Panel]]] = {
    "slo": (
        "Baton: service levels",
        [
            Panel("Requests that met the service levels", "percentunit", [(f"baton:slo_met:ratio_rate5m{{{MODEL}}}", "met")], "stat"),
            Panel("Error budget, burning (1 = as fast as allowed)", "none", [
                (f"baton:ttft_bad:ratio_rate1h{{{MODEL}}} / 0.01", "first token > 2 s"),
                (f"baton:itl_bad:ratio_rate1h{{{MODEL}}} / 0.01", "gap > 100 ms"),
                (f"baton:error:ratio_rate1h{{{MODEL}}} / 0.01", "errors"),
            ]),
            Panel("Requests by the target missed", "reqps", [(rate("baton_slo_requests_total", by="missed"), "{{missed}}")]),
            Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
            Panel("Gap between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
            Panel("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds")),
            Panel("Tokens", "none", [
                (rate("vllm:prompt_tokens_total"), "prompt"),
                (rate("vllm:generation_tokens_total"), "generated"),
                (rate("baton_slo_good_tokens_total"), "generated, of requests that met the levels"),
            ]),
            Panel("Running and waiting", "none", [
                (f"sum(vllm:num_requests_running{{{MODEL}}})", "running"),
                (f"sum(vllm:num_requests_waiting{{{MODEL}}})", "waiting"),
            ]),
            Panel("Errors and refusals", "reqps", [
                (rate("baton_request_errors_total", by="code"), "{{code}}"),
                (rate("baton_refusals_total", by="reason"), "refused: {{reason}}"),
            ]),
        ],
    ),
    "request": (
        "Baton: a request's way",
        [
            Panel("Parts of the time to first token, mean", "s", [
                (f"sum by (phase) (rate(baton_ttft_phase_seconds_sum{{{MODEL}}}[$__rate_interval])) / "
                 f"sum by (phase) (rate(baton_ttft_phase_seconds_count{{{MODEL}}}[$__rate_interval]))", "{{phase}}"),
            ], "timeseries", PHASES),
            Panel("Parts of the time to first token, p99", "s", [
                (f"histogram_quantile(0.99, sum by (le, phase) (rate(baton_ttft_phase_seconds_bucket{{{MODEL}}}[$__rate_interval])))",
                 "{{phase}}"),
            ], "timeseries", PHASES),
            Panel("Why prompts wait: prompts that wait for each reason", "none", [
                (rate("baton_prompt_wait_seconds_total", by="reason"), "{{reason}}"),
            ], about="place: for a place, in the gateway; claim: no worker takes the job; room: no free KV blocks; "
                     "load: KV is on the way; prompts: others go first."),
            Panel("Placements by reason", "reqps", [(rate("baton_placements_total", by="reason"), "{{reason}}")]),
            Panel("Queue", "s", quantiles("vllm:request_queue_time_seconds")),
            Panel("Prefill", "s", quantiles("vllm:request_prefill_time_seconds")),
            Panel("Decode", "s", quantiles("vllm:request_decode_time_seconds")),
            Panel("Prompt tokens of a request", "none", quantiles("vllm:request_prompt_tokens")),
            Panel("Generated tokens of a request", "none", quantiles("vllm:request_generation_tokens")),
            Panel("What went wrong on the way", "reqps", [
                (rate("baton_gateway_events_total", by="event"), "{{event}}"),
                (f"sum(rate(baton_request_attempts_count{{{MODEL}}}[$__rate_interval])) - "
                 f'sum(rate(baton_request_attempts_bucket{{{MODEL}, le="1.0"}}[$__rate_interval]))', "moved requests"),
            ]),
        ],
    ),
    "workers": (
        "Baton: workers and KV",
        [
            Panel("Workers by role", "none", [
                (f"count by (role) (max by (worker, role) (baton_worker_role{{{MODEL}}}))", "{{role}}"),
                (f"count(max by (worker) (baton_worker_ready{{{MODEL}}}) == 1)", "ready"),
            ], "stat"),
            Panel("KV in use", "percentunit", [(f"baton:worker_kv_used:ratio{{{MODEL}}}", "{{worker}}")]),
            Panel("Blocks held (leases, handoffs, quarantine)", "none", [(worker("baton_worker_kv_held_blocks"), "{{worker}}")]),
            Panel("Running sequences", "none", [(worker("baton_worker_running_sequences"), "{{worker}}")]),
            Panel("Waiting: sequences and prompt tokens", "none", [
                (worker("baton_worker_waiting_sequences"), "{{worker}}"),
                (worker("baton_worker_queued_prompt_tokens"), "{{worker}}: tokens"),
            ]),
            Panel("Device busy", "percentunit", [(f"baton:worker_busy:ratio_5m{{{MODEL}}}", "{{worker}}")]),
            Panel("Prompt tokens: hit rate of the prefix caches", "percentunit", [
                (f"{worker_rate('baton_worker_cached_tokens_total')} / {worker_rate('baton_worker_prompt_tokens_total')}", "{{worker}}"),
                (f"baton:prefix_hit:ratio_rate30m{{{MODEL}}}", "all, 30 min"),
            ]),
            Panel("Prompt tokens from a cache: by its tier and who knew of them", "none", [
                (rate("baton_prefix_hit_tokens_total", by="tier, placed_by"), "{{tier}}, placed by the {{placed_by}}"),
                (rate("baton_prefix_lost_tokens_total"), "promised by the index, and gone"),
                (f"sum by (tier) ({worker_rate('baton_worker_cache_hit_tokens_total', by='worker, tier')})", "{{tier}}: all workers"),
            ], about="index: the prefix index sent the request to the worker that has them; worker: it had more than the index knew."),
            Panel("Transferred", "Bps", [(worker_rate("baton_worker_transfer_bytes_total"), "{{worker}}")]),
            Panel("Bandwidth of a push, beside the link's", "Bps", [
                (f"{worker_rate('baton_worker_transfer_bytes_total')} / {worker_rate('baton_worker_transfer_seconds_total')}", "{{worker}}"),
                (worker("baton_worker_link_bytes_per_second"), "{{worker}}: link"),
            ]),
            Panel("Tokens computed", "none", [
                (worker_rate("baton_worker_generated_tokens_total"), "{{worker}}: generated"),
                (worker("baton_worker_prefill_tokens_per_second"), "{{worker}}: measured rate of prompts"),
            ]),
            Panel("Drafts: accepted share, and tokens of a step that verifies one", "none", [
                (f"{worker_rate('baton_worker_accepted_tokens_total')} / {worker_rate('baton_worker_drafted_tokens_total')}", "{{worker}}: accepted"),
                (f"1 + {worker_rate('baton_worker_accepted_tokens_total')} / {worker_rate('baton_worker_drafts_total')}", "{{worker}}: tokens"),
                (f"baton:worker_drafts:ratio_rate30m{{{MODEL}}}", "{{worker}}: drafts a generated token, 30 min"),
            ], about="Nothing without --speculative-config. Drafts that don't pay pause: then there are few a generated token."),
            Panel("Step of the decode batch", "s", [(worker("baton_worker_decode_step_seconds"), "{{worker}}")]),
            Panel("Trouble", "none", [
                (worker_rate("baton_worker_preemptions_total"), "{{worker}}: preemptions"),
                (worker_rate("baton_worker_failed_steps_total"), "{{worker}}: failed steps"),
                (worker_rate("baton_worker_out_of_memory_total"), "{{worker}}: out of memory"),
                (worker_rate("baton_worker_bad_digests_total"), "{{worker}}: wrong bytes"),
                (worker_rate("baton_worker_dead_letters_total"), "{{worker}}: dead letters"),
            ]),
        ],
    ),
    "tenants": (
        "Baton: tenants",
        [
            Panel("Goodput: requests within their goals", "percentunit", [
                (f"baton:tenant_slo_met:ratio_rate5m{{{MODEL}}}", "{{tenant}}"),
            ], about="Of the requests with an answer or an error; each by its own goal."),
            Panel("Requests that missed their goal, by the part missed", "reqps", [
                (rate("baton_tenant_slo_requests_total", by="tenant, missed", labels=f'{MODEL}, missed!="none"'), "{{tenant}}: {{missed}}"),
            ]),
            Panel("Whose slack is spent: time taken of what goals give", "percentunit", [
                (f'sum by (tenant, part) (rate(baton_tenant_slo_seconds_total{{{MODEL}, of="taken"}}[$__rate_interval])) / '
                 f'sum by (tenant, part) (rate(baton_tenant_slo_seconds_total{{{MODEL}, of="goal"}}[$__rate_interval]))', "{{tenant}}: {{part}}"),
            ], about="ttft: until the first token; tpot: the tokens after it. 1: as late as is good; the rest is slack that others may get."),
            Panel("Tokens by tenant", "none", [(rate("baton_tenant_tokens_total", by="tenant"), "{{tenant}}")]),
            Panel("Share of the tokens, an hour", "percentunit", [
                (f"sum by (tenant) (increase(baton_tenant_tokens_total{{{MODEL}}}[1h])) / "
                 f"scalar(sum(increase(baton_tenant_tokens_total{{{MODEL}}}[1h])))", "{{tenant}}"),
            ]),
            Panel("Budgets, used", "percentunit", [
                (f"max by (tenant, budget) (baton_tenant_budget_used{{{MODEL}}}) / max by (tenant, budget) (baton_tenant_budget_limit{{{MODEL}}})",
                 "{{tenant}}: {{budget}}"),
            ], about="Of what a tenant may use in a minute (requests, tokens) or at a time (concurrent), over all gateways."),
            Panel("Cost: devices that work for a tenant", "none", [
                (rate("baton_tenant_device_seconds_total", by="tenant"), "{{tenant}}"),
            ], about="Device-seconds a second: tokens by the rates that workers measure."),
            Panel("Cost by phase", "none", [
                (rate("baton_tenant_device_seconds_total", by="tenant, phase"), "{{tenant}}: {{phase}}"),
            ]),
            Panel("Share of the cost, an hour", "percentunit", [
                (f"sum by (tenant) (increase(baton_tenant_device_seconds_total{{{MODEL}}}[1h])) / "
                 f"scalar(sum(increase(baton_tenant_device_seconds_total{{{MODEL}}}[1h])))", "{{tenant}}"),
            ]),
            Panel("Requests by tenant", "reqps", [(rate("baton_tenant_requests_total", by="tenant"), "{{tenant}}")]),
            Panel("Refusals by reason", "reqps", [(rate("baton_refusals_total", by="reason"), "{{reason}}")]),
            Panel("Waiting requests by tier", "none", [(f"sum by (tier) (baton_waiting_requests{{{MODEL}}})", "{{tier}}")]),
            Panel("Waiting prompt tokens by tier", "none", [(f"sum by (tier) (baton_waiting_prompt_tokens{{{MODEL}}})", "{{tier}}")]),
            Panel("How requests ended", "reqps", [(rate("baton_requests_total", by="status"), "{{status}}")]),
            Panel("Lines of batches", "reqps", [(rate("baton_batch_lines_total", by="state"), "{{state}}")]),
            Panel("Lines of batches, queued and running", "none", [
                (f"max(baton_batch_queued_lines{{{MODEL}}})", "queued"),
                (f"sum(baton_batch_running_lines{{{MODEL}}})", "running"),
            ]),
        ],
    ),
}  # fmt: skip


def dashboard(uid: str, title: str, panels: list[Panel]) -> dict[str, Any]:
    """Grafana's object for one dashboard."""
    return {
        "uid": f"baton-{uid}",
        "title": title,
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["baton"], "title": "Baton", "asDropdown": True, "keepTime": True}],
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                {
                    "name": "model",
                    "label": "Model",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${source}"},
                    "query": "label_values(vllm:num_requests_running, model_name)",
                    "refresh": 2,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": WIDTH * (number % COLUMNS), "y": HEIGHT * (number // COLUMNS), "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def rendered() -> dict[str, str]:
    """File name -> text."""
    return {
        f"{uid}.json": json.dumps(dashboard(uid, title, panels), indent=1) + "\n"
        for uid, (title, panels) in DASHBOARDS.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in rendered().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
