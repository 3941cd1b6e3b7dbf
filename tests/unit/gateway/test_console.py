"""What the console computes, and the contrast of its colours."""

from __future__ import annotations

import re
from itertools import product

import pytest

from common.messages import Imported, Settle
from gateway.console.assets import FOLDER
from gateway.console.state import counted, handovers, latencies, links, percentile
from gateway.timeline import AttemptLine, Timeline, Timelines

NOW = 1000.0
CSS = (FOLDER / "style.css").read_text()
COLOURS = {
    name: (light, dark) for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", CSS)
}
TEXTS = ("text", "muted", "accent", "good", "warn", "bad")
MARKS = ("edge", "read", "wait", "queue", "prefill", "frame", "transfer", "decode", "accent")
PAIRS = [*product(TEXTS, ("ground", "panel")), *product(("text", "muted"), ("sunken",))]
PAIRS += [("on-accent", "accent"), ("on-bad", "bad"), ("ground", "text")]


def line(name: str, *, received: float, first: float | None, ended: float | None, tokens: int = 0) -> Timeline:
    made = Timeline(request_id=name, received_at=received, submitted_at=received, prompt_tokens=40)
    made.first_token_at, made.ended_at, made.completion_tokens = first, ended, tokens
    made.status = "stop" if ended is not None else "running"
    return made


def handed_over(name: str, *, at: float, blocks: int, push_ms: float | None) -> Timeline:
    made = line(name, received=at - 1, first=at, ended=None)
    attempt = AttemptLine(number=1, began_at=at - 1, because="", prefill="p", decode=["d"], reason="load")
    attempt.claimed_by = "p"
    message = {"request_id": name, "attempt": 1, "incarnation": 1}
    attempt.imported = Imported(
        **message,
        worker="d",
        transferred_blocks=blocks,
        transferred_bytes=blocks * 1000,
        reused_blocks=0,
        transfer_ms=9.0,
    )
    attempt.imported_at = at
    if push_ms is not None:
        attempt.settled = Settle(**message, worker="p", decode_worker="d", push_ms=push_ms)
    made.attempts.append(attempt)
    return made


def test_handovers_are_of_the_last_minute_and_newest_first() -> None:
    lines = [handed_over("old", at=NOW - 61, blocks=1, push_ms=1.0), line("none", received=NOW, first=None, ended=None)]
    lines += [handed_over("a", at=NOW - 5, blocks=2, push_ms=2.0), handed_over("b", at=NOW - 1, blocks=3, push_ms=None)]
    found = handovers(lines, NOW)
    assert [(one["id"], one["age_s"], one["bytes"], one["push_ms"]) for one in found] == [
        ("b/1", 1.0, 3000, None),
        ("a/1", 5.0, 2000, 2.0),
    ]


def test_bandwidth_counts_only_pushes_whose_time_is_known() -> None:
    lines = [handed_over("a", at=NOW, blocks=2, push_ms=2.0), handed_over("b", at=NOW, blocks=4, push_ms=1.0)]
    lines.append(handed_over("c", at=NOW, blocks=50, push_ms=None))
    (link,) = links(handovers(lines, NOW))
    assert (link["handovers"], link["bytes"], link["bytes_per_s"]) == (3, 56_000, 2_000_000)
    (alone,) = links(handovers(lines[2:], NOW))
    assert alone["bytes_per_s"] is None


def test_latencies_are_of_what_ended_within_the_minute() -> None:
    lines = [line("old", received=NOW - 99, first=NOW - 98, ended=NOW - 61, tokens=5)]
    lines += [line("runs", received=NOW - 2, first=NOW - 1, ended=None, tokens=3)]
    lines += [line("a", received=NOW - 3.0, first=NOW - 2.9, ended=NOW - 1.9, tokens=11)]
    lines += [line("b", received=NOW - 3.0, first=NOW - 2.7, ended=NOW - 2.7, tokens=1)]
    found = latencies(lines, NOW)
    assert (found["ended"], found["completion_tokens"], found["errors"]) == (2, 12, 0)
    assert found["ttft_p50_ms"] == pytest.approx(100, abs=0.01)
    assert found["ttft_p95_ms"] == pytest.approx(300, abs=0.01)
    assert found["tpot_p50_ms"] == pytest.approx(100, abs=0.01)
    assert latencies([], NOW)["ttft_p50_ms"] is None


def test_percentile_is_a_value_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.01, 0.2, 0.21, 0.5, 0.95, 1.0)] == [1.0, 1.0, 2.0, 3.0, 5.0, 5.0]


def test_counters_by_kind() -> None:
    assert counted({"placed:load": 2, "placed:local: earlier": 1, "retries": 3}, "placed") == {
        "load": 2,
        "local: earlier": 1,
    }


def test_timelines_since_are_the_running_and_the_newly_ended() -> None:
    timelines = Timelines()
    old, new, runs = (line(name, received=NOW, first=None, ended=None) for name in ("old", "new", "runs"))
    for one in (old, new, runs):
        timelines.start(one)
    for one in (old, new):
        timelines.end(one)
    assert old.ended_at is not None
    assert new.ended_at is not None
    old.ended_at = new.ended_at - 10
    assert timelines.since(new.ended_at - 5) == [runs, new]


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio of two colours, 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_computed_as_defined() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_apart(theme: int) -> None:
    ratios = {f"{a} on {b}": contrast(COLOURS[a][theme], COLOURS[b][theme]) for a, b in PAIRS}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}
    marks = {name: contrast(COLOURS[name][theme], COLOURS["panel"][theme]) for name in MARKS}
    assert {name: ratio for name, ratio in marks.items() if ratio < 3} == {}


def test_every_colour_is_a_named_pair() -> None:
    rules = CSS.replace(CSS[CSS.index(":root {") : CSS.index("}")], "")
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[;,) ])", rules) == []
    assert set(re.findall(r"var\(--([\w-]+)\)", CSS)) - {"radius"} == set(COLOURS)
