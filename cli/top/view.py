"""What `baton top` shows, as values and as text; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.log import printable

COLUMNS = (  # title, key, width
    ("WORKER", "worker", 18),
    ("ROLES", "roles", 15),
    ("STATUS", "status", 11),
    ("RUN", "running", 5),
    ("WAIT", "waiting", 5),
    ("QUEUED", "queued_tokens", 8),
    ("KV USED", "kv_used", 8),
    ("HELD", "kv_held", 7),
    ("FREE", "kv_free", 8),
    ("PREFILL t/s", "prefill_tokens_per_s", 12),
    ("STEP ms", "decode_step_ms", 8),
    ("LINK GB/s", "link_gb_per_s", 10),
)
LEFT = 3  # the first columns are text
MAX_NAME = 64
CONTESTED = "2 have it"  # a name
METRICS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:request_success_total": "finished",
    "baton_request_errors_total": "errors",
}


KEPT = ("model", "running", "waiting", "queued_tokens", "kv_blocks", "kv_used", "kv_held", "kv_free")


def worker_row(worker: Mapping[str, Any]) -> dict[str, Any]:
    """One worker of `/console/state`: KV in blocks, rates per second, times in milliseconds."""
    return {
        "worker": worker["id"],
        "roles": ",".join(worker["roles"]),
        "status": CONTESTED if worker.get("is_contested") else worker["status"],
        **{name: worker[name] for name in KEPT},
        "prefill_tokens_per_s": worker["prefill_tokens_per_s"],
        "decode_step_ms": worker["decode_step_ms"],
        "link_gb_per_s": worker["link_bytes_per_s"] / 1e9,
    }


def picture(
    workers: Sequence[Mapping[str, Any]],
    gateways: Sequence[str],
    metrics: Mapping[str, float],
    *,
    columns: int,
    refused: str = "",
) -> list[str]:
    """The table's lines, none longer than `columns`. `refused`: why there are no metrics."""
    lines = [f"baton top   {len(workers)} workers   {len(gateways)} gateways: {', '.join(gateways) or 'none'}"]
    lines.append("gateway   " + ("   ".join(f"{name} {value:.0f}" for name, value in metrics.items()) or refused))
    longest = max((len(row["worker"]) for row in workers), default=0)
    widths = [max(COLUMNS[0][2], min(longest, MAX_NAME) + 2), *(width for _, _, width in COLUMNS[1:])]
    lines += ["", "".join(_cell(title, widths[at], at) for at, (title, _, _) in enumerate(COLUMNS))]
    for row in workers:
        lines.append("".join(_cell(_text(row[key]), widths[at], at) for at, (_, key, _) in enumerate(COLUMNS)))
    if not workers:
        lines.append("no worker is heard")
    return [printable(line[:columns]).rstrip() for line in lines]


def parse_metrics(text: str) -> dict[str, float]:
    """The shown counters and gauges from Prometheus' text, each summed over its labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = METRICS.get(line.partition("{")[0].partition(" ")[0])
        if name is not None and not line.startswith("#"):
            found[name] = found.get(name, 0.0) + float(line.rpartition("}")[2].split()[-1 if "}" not in line else 0])
    return found


def _cell(text: str, width: int, at: int) -> str:
    text = text if len(text) < width else text[: width - 2] + "…"
    return f"{text:<{width}}" if at < LEFT else f"{text:>{width}}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "-" if not value else f"{value:.0f}" if value >= 1000 else f"{value:.1f}"
    return str(value)
