"""A run as a page: a single HTML file without scripts or external resources, light and dark; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cli.bench.client import Sample
from cli.bench.report import slices
from cli.bench.results import TIMES, Done, names_of, times_of
from cli.bench.svg import Axes, Point, Series, chart

NAMES = {"ttft": "Time to first token", "itl": "Time between chunks (ITL)", "tpot": "Time per further token (TPOT)"}
NAMES |= {"e2e": "Whole answer (E2E)"}
CURVE = 60  # points of a distribution
SLICES = 60
STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#59636e;--line:#d8dee4;--card:#f6f8fa;
--c0:#2563eb;--c1:#0e9f6e;--c2:#c2740b;--c3:#c8323c;--c4:#7c3aed;--c5:#0d7f94}
@media (prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--soft:#9aa5b1;--line:#2b333d;--card:#151b23;
--c0:#6ea8fe;--c1:#3fcf8e;--c2:#f0a63a;--c3:#ff7b82;--c4:#b392f0;--c5:#4cc9dd}}
*{box-sizing:border-box}body{margin:0 auto;padding:2rem 1rem;max-width:1200px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}h1{font-size:1.5rem;margin:0}h2{font-size:1.15rem;margin:2rem 0 .6rem}
h3{font-size:.95rem;margin:0 0 .3rem}p{margin:.3rem 0;color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.7rem;margin-top:1rem}
.tile,figure{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.7rem .9rem;margin:0}
.tile b{display:block;font-size:1.35rem;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.85rem}
.charts{display:grid;margin-top:.8rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:.8rem}
svg{width:100%;height:auto;display:block}text{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
.end{text-anchor:end}.mid{text-anchor:middle}.name{font-size:12px}.grid{stroke:var(--line)}
.line{fill:none;stroke-width:2}path.limit{stroke:var(--c3);stroke-dasharray:6 4;fill:none}
figcaption{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem;color:var(--soft)}
figcaption span::before{content:"";display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em;
background:currentColor;vertical-align:-.05em}figcaption span.limit{color:var(--c3)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem;width:100%}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:600}th:first-child,td:first-child{text-align:left}tr.chosen td{font-weight:600}
.bad{color:var(--c3)}details{margin-top:1rem}summary{cursor:pointer;color:var(--soft)}
""" + "".join(
    f".c{n}{{stroke:var(--c{n})}}circle.c{n}{{fill:var(--c{n})}}span.c{n}{{color:var(--c{n})}}" for n in range(6)
)


def page(told: Mapping[str, Any], done: Sequence[Done], chosen: Done, *, within: str) -> str:
    """Render the page. `told`: the run's document; `within`: the objectives in words, "" for none."""
    title = told["label"] or f"{told['model']} at {told['server']}"
    parts = [f"<h1>{escape(title)}</h1><p>{escape(_subtitle(told))}</p>", _tiles(told, within)]
    if len(done) > 1:
        parts += ["<h2>Latency against load</h2>", _by_load(told), "<h2>Throughput against latency</h2>", _trade(told)]
    parts += [f"<h2>Steps</h2>{_steps(told, chosen.summary)}"] if len(done) > 1 else []
    parts += [f"<h2>Times{_of_step(chosen, done)}</h2>", _times(chosen.summary), _distributions(chosen)]
    parts += [_errors(told), _options(told)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    return (
        f'<!doctype html><html lang="en"><head>{head}{policy}<style>{STYLE}</style></head><body>'
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _subtitle(told: Mapping[str, Any]) -> str:
    extra = "".join(f", {name} {value}" for name, value in told["metadata"].items())
    return f"{told['model']} at {told['server']}, {told['date']}{extra}"


def _tiles(told: Mapping[str, Any], within: str) -> str:
    results = told["results"]
    tiles = []
    if told["highest_rate"] is not None:
        tiles.append((f"{told['highest_rate']:.4g}/s", "highest rate within the objectives"))
    tiles += [
        (f"{results['requests_per_s']:.2f}/s", f"requests, {results['completed']} in {results['duration_s']:.1f} s"),
        (f"{results['output_tokens_per_s']:.0f}/s", "output tokens"),
        (f"{results['input_tokens_per_s']:.0f}/s", "prompt tokens"),
    ]
    if results["slo_attainment"] is not None:
        tiles.append((f"{results['slo_attainment']:.1%}", f"within {within}"))
        tiles.append((f"{results['goodput_requests_per_s']:.2f}/s", "goodput: requests within"))
    for name in ("ttft", "tpot"):
        if values := results[f"{name}_ms"]:
            tiles.append((f"{values['p50']:.1f} ms", f"{name.upper()}, median"))
    if results["failed"]:
        tiles.append((str(results["failed"]), "requests failed"))
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in tiles
    )
    return f'<div class="tiles">{cells}</div>'


# -- several steps -------------------------------------------------------------------------------------------------


def _by_load(told: Mapping[str, Any]) -> str:
    """A chart of percentiles for each kind of time."""
    key = "rate" if all(step["rate"] for step in told["steps"]) else "concurrency"
    steps = sorted(told["steps"], key=lambda step: float(step[key]))
    across = "requests a second" if key == "rate" else "requests in flight"
    charts = []
    for name in TIMES:
        shown = [step for step in steps if step[f"{name}_ms"]]
        series = [
            Series(
                which,
                [
                    Point(
                        step[key],
                        step[f"{name}_ms"][which],
                        f"{step[key]:g}: {which} {step[f'{name}_ms'][which]:.1f} ms",
                    )
                    for step in shown
                ],
                f"c{index % 6}",
            )
            for index, which in enumerate(names_of(shown[0][f"{name}_ms"]) if shown else ())
        ]
        limit = told["options"].get(f"{name}_slo_ms") or None
        charts.append(chart(Axes(NAMES[name], across, "ms", limit), series))
    throughput = Series(
        "output tokens/s", [Point(step[key], step["output_tokens_per_s"], _label(step)) for step in steps]
    )
    charts.append(chart(Axes("Throughput", across, "tokens/s"), [throughput]))
    if told["results"]["slo_attainment"] is not None:
        line = Series(
            "within the objectives",
            [Point(step[key], 100 * step["slo_attainment"], _label(step)) for step in steps],
            "c1",
        )
        share = 100 * told["options"]["slo_share"]
        charts.append(chart(Axes("Within the objectives", across, "%", share, most_y=100), [line]))
    return f'<div class="charts">{"".join(charts)}</div>'


def _trade(told: Mapping[str, Any]) -> str:
    """Plot a user's tokens a second against the server's, and the Pareto front."""
    charts = []
    for title, unit, of in (
        ("Speed of one answer", "tokens/s of one answer", lambda step: _speed(step)),
        ("Answers' first tokens", "1/s: 1000 ms / TTFT median", lambda step: _per_second(step, "ttft")),
    ):
        found = [(step["output_tokens_per_s"], of(step), _label(step)) for step in told["steps"] if of(step)]
        points = [Point(x, y, said) for x, y, said in found]
        front = pareto(points)
        series = [Series("steps", points, "c0", joined=False), Series("best of both (Pareto)", front, "c1")]
        charts.append(chart(Axes(title, "output tokens/s of the server", unit), series))
    return f'<div class="charts">{"".join(charts)}</div>'


def pareto(points: Sequence[Point]) -> list[Point]:
    """Points that no other point dominates in x and y, by x."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (-point.x, -point.y)):
        if not front or point.y > front[-1].y:
            front.append(point)
    return front[::-1]


def _speed(step: Mapping[str, Any]) -> float:
    return _per_second(step, "tpot")


def _per_second(step: Mapping[str, Any], name: str) -> float:
    median = step[f"{name}_ms"].get("p50", 0.0)
    return 1000 / median if median else 0.0


def _label(step: Mapping[str, Any]) -> str:
    load = f"{step['rate']:g} requests/s" if step["rate"] else f"{step['concurrency']} in flight"
    ttft = step["ttft_ms"].get("p50")
    first = "" if ttft is None else f", TTFT p50 {ttft:.0f} ms"
    return f"{load}: {step['output_tokens_per_s']:.0f} tokens/s{first}"


def _steps(told: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    high = (names_of(chosen["ttft_ms"]) or ["worst"])[-1]
    head = ["load", "done", "failed", "requests/s", "tokens/s", "TTFT p50", high, "TPOT p50", high, "within"]
    rows = [_row(head, "th")]
    for step in told["steps"]:
        cells = [_label(step).partition(":")[0], step["completed"], step["failed"], f"{step['requests_per_s']:.2f}"]
        cells.append(f"{step['output_tokens_per_s']:.0f}")
        for name in ("ttft", "tpot"):
            values = step[f"{name}_ms"]
            worst = names_of(values)[-1:]
            cells += [f"{values['p50']:.1f}", f"{values[worst[0]]:.1f}"] if worst else ["-", "-"]
        share = step["slo_attainment"]
        cells.append("-" if share is None else f"{share:.1%}" + (", stopped" if step["settled_early"] else ""))
        same = all(step[name] == chosen[name] for name in ("duration_s", "completed", "output_tokens"))
        rows.append(_row(cells, "td", "chosen" if same else ""))
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


# -- one step ------------------------------------------------------------------------------------------------------


def _of_step(chosen: Done, done: Sequence[Done]) -> str:
    return f" at {escape(str(chosen.step))}" if len(done) > 1 else ""


def _times(summary: Mapping[str, Any]) -> str:
    columns = ["mean", "min", *names_of(summary["e2e_ms"]), "max"]
    rows = [_row(["ms", *columns], "th")]
    for name in TIMES:
        if values := summary[f"{name}_ms"]:
            rows.append(_row([NAMES[name], *(f"{values[column]:.2f}" for column in columns)], "td"))
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _distributions(chosen: Done) -> str:
    good = [sample for sample in chosen.run.samples if not sample.error]
    if not good:
        return ""
    charts = [
        chart(
            Axes(
                f"{NAMES[name]}: share of {'chunks' if name == 'itl' else 'requests'} up to there",
                "ms",
                "%",
                most_y=100,
            ),
            [Series(name.upper(), curve(values), f"c{index}")],
        )
        for index, (name, values) in enumerate(times_of(good).items())
        if values
    ]
    return f'<div class="charts">{"".join(charts)}{_over_time(good, chosen.run.started)}</div>'


def curve(seconds: Sequence[float]) -> list[Point]:
    """The empirical CDF: milliseconds, percent of the values up to there; at most `CURVE` points."""
    ordered = sorted(seconds)
    count = min(CURVE, len(ordered))
    ranks = [round((len(ordered) - 1) * index / max(1, count - 1)) for index in range(count)]
    return [Point(ordered[rank] * 1e3, 100 * (rank + 1) / len(ordered)) for rank in ranks]


def _over_time(good: Sequence[Sample], started: float) -> str:
    span, ended, slowest = slices(good, started, SLICES)
    at = [(index + 0.5) * span / SLICES for index in range(SLICES)]
    rate = Series("answers", [Point(x, count * SLICES / span) for x, count in zip(at, ended, strict=True)])
    first = Series("slowest TTFT", [Point(x, value * 1e3) for x, value in zip(at, slowest, strict=True) if value], "c2")
    charts = [chart(Axes("Answers that ended, over the run", "s", "1/s"), [rate])]
    return "".join([*charts, chart(Axes("Slowest first token, by when it was asked for", "s", "ms"), [first])])


# -- the rest ------------------------------------------------------------------------------------------------------


def _errors(told: Mapping[str, Any]) -> str:
    found: dict[str, int] = {}
    for step in told["steps"]:
        for error, count in step["errors"].items():
            found[error] = found.get(error, 0) + count
    if not found:
        return ""
    rows = [_row([error, count], "td", "bad") for error, count in sorted(found.items(), key=lambda kind: -kind[1])]
    return f'<h2>Errors</h2><div class="scroll"><table>{"".join(rows)}</table></div>'


def _options(told: Mapping[str, Any]) -> str:
    rows = [
        _row([f"--{name.replace('_', '-')}", value], "td") for name, value in told["options"].items() if value != ""
    ]
    rows += [_row([name, value], "td") for name, value in told["client"].items()]
    return f'<details><summary>Options</summary><div class="scroll"><table>{"".join(rows)}</table></div></details>'


def _row(cells: Sequence[object], kind: str, name: str = "") -> str:
    inner = "".join(f"<{kind}>{escape(str(cell))}</{kind}>" for cell in cells)
    return f'<tr class="{name}">{inner}</tr>' if name else f"<tr>{inner}</tr>"
