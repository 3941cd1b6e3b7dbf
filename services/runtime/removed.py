"""Settings of earlier releases that are gone: what to do instead, for whoever still gives one. No I/O."""

from __future__ import annotations

_GATEWAY, _PLANNER, _WORKERS = ("gateway", "up"), ("planner", "up"), ("prefill", "decode", "worker", "up")
_CONNECTED = (*_WORKERS, "gateway", "planner", "doctor")
# Commands -> removed setting -> what to use instead.
REMOVED: dict[tuple[str, ...], dict[str, str]] = {
    _CONNECTED: {
        "nats_ca": "one for both servers since 0.2: --servers-ca, whose file may have several authorities",
        "nats_cert": "one for both servers since 0.2: --servers-cert",
        "nats_key": "one for both servers since 0.2: --servers-key",
        "redis_ca": "one for both servers since 0.2: --servers-ca, whose file may have several authorities",
        "redis_cert": "one for both servers since 0.2: --servers-cert",
        "redis_key": "one for both servers since 0.2: --servers-key",
    },
    _GATEWAY: {
        "window_s": "a constant since 0.2: 1 s of the workers' prefill rates",
        "reserved": "a constant since 0.2: a tenth",
        "trace_share": "OpenTelemetry's since 0.2: OTEL_TRACES_SAMPLER=parentbased_traceidratio, OTEL_TRACES_SAMPLER_ARG=0.1",
        "slo_window_s": "a constant since 0.2: 30 s",
        "batch_file_mb": "a constant since 0.2: 100 MiB",
        "batch_lines": "a constant since 0.2: 50,000",
        "batch_line_kb": "a constant since 0.2: 1024 KiB",
        "batch_concurrency": "one line for every 64 of --max-requests since 0.2",
        "batch_keep_days": "one for batches and responses since 0.2: --keep-days",
        "responses_keep_days": "one for batches and responses since 0.2: --keep-days; --responses-store-mb off keeps no response",
        "console": "always served since 0.2, to whoever has the admin key where there is one",
        "batch_window_s": "a constant since 0.2: a day, as `completion_window` says",
    },
    _WORKERS: {
        "max_prefills": "a constant since 0.2: 16",
        "fake_faults": "for tests alone since 0.2",
        "transport_host": "of the transport since 0.2: --transport ucx:HOST",
        "fake": "a device since 0.2: --device fake",
        "fake_step_ms": "of the device since 0.2: --device fake:STEP_MS",
        "fake_token_us": "of the device since 0.2: --device fake:STEP_MS:TOKEN_US",
    },
    _PLANNER: {
        "plan_metrics_port": "one address since 0.2: --plan-metrics 127.0.0.1:9101",
        "plan_metrics_host": "one address since 0.2: --plan-metrics 127.0.0.1:9101",
        "plan_period_s": "a constant since 0.2: 2 s",
        "plan_hold_s": "a constant since 0.2: 10 s",
        "plan_cooldown_s": "a constant since 0.2: 30 s",
        "plan_reverse_s": "a constant since 0.2: 60 s",
        "plan_prefill_high": "a constant since 0.2: 0.9",
        "plan_prefill_low": "a constant since 0.2: 0.6",
        "plan_decode_high": "a constant since 0.2: 0.85",
        "plan_decode_low": "a constant since 0.2: 0.6",
        "plan_attainment": "a constant since 0.2: 0.95",
    },
    ("top",): {
        "tab": "a key of the running view since 0.2: 1 to 4, or Tab",
        "interval_s": "a constant since 0.2: 1 s",
        "once": "what `baton top | cat` does since 0.2: one picture where the output is no terminal",
    },
    ("trace",): {
        "request": "an argument since 0.2: baton trace REQUEST",
        "slowest": "a word since 0.2: baton trace slowest",
        "latest": "a word since 0.2: baton trace latest",
        "status": "a filter of the console's requests since 0.2",
        "tenant": "a filter of the console's requests since 0.2",
        "worker": "a filter of the console's requests since 0.2",
        "min_ms": "a filter of the console's requests since 0.2",
        "limit": "a constant since 0.2: 10",
    },
    ("batch",): {
        "action": "an argument since 0.2: baton batch ACTION",
        "name": "an argument since 0.2: baton batch ACTION NAME",
        "limit": "a constant since 0.2: 20, the newest",
        "watch": "a word since 0.2: baton batch run FILE",
        "errors": "a word since 0.2: baton batch errors ID",
    },
    ("bench",): {
        "json_file": "one option since 0.2: --output FILE.json",
        "html_file": "one option since 0.2: --output FILE.html",
        "csv_file": "one option since 0.2: --output FILE.csv",
        "requests_file": "one option since 0.2: --output FILE.jsonl",
        "dataset_name": "what --dataset-path says since 0.2",
        "prefix_share": "a constant since 0.2: all prompts have the prefix",
        "step_s": "a constant since 0.2: 15 s; --num-prompts sets a step's size",
        "duration_s": "what --num-prompts and --request-rate say since 0.2",
        "timeout_s": "a constant since 0.2: 600 s",
        "percentile_metrics": "always all four since 0.2",
        "metric_percentiles": "always 50, 90, 95 and 99 since 0.2",
        "print_each": "what --output FILE.jsonl has since 0.2",
        "find_max": "a sweep since 0.2: --sweep max",
        "slo_share": "of the sweep since 0.2: --sweep max=0.99",
        "compare_files": "a word since 0.2: baton bench compare A.json B.json",
        "vocab_size": "a constant since 0.2: random token ids are below 256",
        "label": "metadata since 0.2: --metadata label=NAME",
    },
    ("users",): {
        "folder": "an argument since 0.2: baton users FOLDER",
        "members": "an argument since 0.2: baton users FOLDER ROLE:ID,ROLE:ID",
    },
    ("chat",): {
        "stats": "a word in the chat since 0.2: /stats off",
        "markdown": "a word in the chat since 0.2: /markdown off",
        "history": "a word in the chat since 0.2: /history off",
        "think": "what --set takes since 0.2: --set think=on",
        "max_tokens": "what /set takes since 0.2: --set max_tokens=N",
        "temperature": "what /set takes since 0.2: --set temperature=N",
    },
}


def removed_from(command: str) -> dict[str, str]:
    """The settings that a command had, each with what holds now."""
    return {name: said for commands, names in REMOVED.items() if command in commands for name, said in names.items()}


def is_removed(name: str) -> bool:
    """True if any command had the setting: one environment may serve them all."""
    return any(name in names for names in REMOVED.values())
