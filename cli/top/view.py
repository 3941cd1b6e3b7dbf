"""One picture of `baton top` as lines; pure. Styles are separate from texts, so that len() is the width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cli.top.keys import HELP, Chosen
from cli.top.state import State
from cli.top.tables import TABS, Column, Row, number, sparks
from common.log import printable

STYLES = {
    "head": "\x1b[7m",
    "bold": "\x1b[1m",
    "dim": "\x1b[2m",
    "bad": "\x1b[31m",
    "warn": "\x1b[33m",
    "good": "\x1b[32m",
}
PLAIN = "\x1b[0m"
BAD, WARN = ("lost", "error", "broken", "bad", "2 have it"), ("draining", "cancelled", "warn", "waiting", "refused")
MARKS = {True: "▼", False: "▲"}
LINES_AROUND = 7  # lines above and below the table
Line = tuple[str, str]  # text, style


def frame(state: State, chosen: Chosen, columns: int, rows: int) -> list[Line]:
    """The picture: at most `rows` lines of at most `columns` characters."""
    lines = [*header(state, chosen), ("", ""), (_tabs(chosen), "bold")]
    if chosen.helps:
        lines += [("", ""), *((f"  {keys:<14} {what}", "") for keys, what in HELP)]
        return _cut(lines, columns, rows)
    found = selected(chosen, chosen.shown.rows(state))
    fitting = fit(chosen.shown.columns, columns, found)
    room = max(1, rows - LINES_AROUND)
    chosen.now.top = min(chosen.now.top, max(0, len(found) - room))
    lines.append((_titles(fitting, chosen), "head"))
    lines += [(_row(fitting, row), _style(row)) for row in found[chosen.now.top : chosen.now.top + room]]
    if not found:
        lines.append((f"nothing has {chosen.now.words!r}" if chosen.now.words else chosen.shown.nothing, "dim"))
    lines += [("", "")] * (rows - 1 - len(lines))
    lines.append((_footer(chosen, len(found), room, len(chosen.shown.columns) - len(fitting)), "dim"))
    return _cut(lines, columns, rows)


def painted(lines: Sequence[Line]) -> list[str]:
    """The lines with ANSI styles."""
    return [f"{STYLES[style]}{text}{PLAIN}" if style else text for text, style in lines]


def picture(state: State, columns: int) -> list[str]:
    """The workers once, as plain text with all columns."""
    chosen = Chosen()
    found = selected(chosen, chosen.shown.rows(state))
    fitting = fit(chosen.shown.columns, columns, found)
    lines = [*header(state, chosen), ("", ""), (_titles(fitting, chosen), "")]
    lines += [(_row(fitting, row), "") for row in found] or [(chosen.shown.nothing, "")]
    return [text.rstrip() for text, _ in _cut(lines, columns, len(lines))]


def header(state: State, chosen: Chosen) -> list[Line]:
    """Return the page's header: gateways and workers, their load, and its last minute."""
    fleet, figures = state.section("fleet"), state.section("figures")
    gateways = [str(gateway["id"]) for gateway in fleet.get("gateways", [])]
    title = f"baton top   {len(fleet.get('workers', []))} workers   {len(gateways)} gateways: {', '.join(gateways) or 'none'}"
    models = ", ".join(str(model["name"]) for model in fleet.get("models", []))
    title += f"   {models}" if models else ""
    trouble = state.trouble or str(fleet.get("not_ready") or "")
    if trouble:
        return [(title, "bold"), (trouble, "bad"), (_course(state), "")]
    return [
        (title + ("   held: p goes on" if chosen.paused else ""), "bold"),
        (_figures(figures), ""),
        (_course(state), ""),
    ]


def _figures(figures: Mapping[str, Any]) -> str:
    latest = figures.get("latencies") or {}
    waits = sum(tier.get("requests", 0) for tier in (figures.get("waiting") or {}).values())
    parts = [f"in flight {figures.get('in_flight') or 0}", f"waiting {waits}"]
    parts += [f"last minute: {latest.get('ended') or 0} ended", f"{latest.get('errors') or 0} failed"]
    parts += [
        f"TTFT p50 {number(latest.get('ttft_p50_ms'))} p95 {number(latest.get('ttft_p95_ms'))} ms",
        f"TPOT p50 {number(latest.get('tpot_p50_ms'))} ms",
    ]
    if prompt := latest.get("prompt_tokens"):
        parts.append(f"cached {latest.get('cached_tokens', 0) / prompt:.0%}")
    return "   ".join(parts)


def _course(state: State) -> str:
    parts = [
        f"tokens/s {number(state.fleet_rate.now)} {sparks(state.fleet_rate.samples, 20)}",
        f"in flight {sparks(state.in_flight, 20)}",
        f"TTFT {sparks(state.ttft, 20)}",
    ]
    return "   ".join(parts)


def _tabs(chosen: Chosen) -> str:
    names = [f"[{at + 1} {tab.name}]" if at == chosen.tab else f" {at + 1} {tab.name} " for at, tab in enumerate(TABS)]
    words = f"   / {chosen.now.words}{'_' if chosen.types else ''}" if chosen.types or chosen.now.words else ""
    return "".join(names) + words


# -- rows ----------------------------------------------------------------------------------------------------------


def selected(chosen: Chosen, rows: list[Row]) -> list[Row]:
    """Rows that contain every word, sorted; unknown values last."""
    words, key = chosen.now.words.lower().split(), chosen.now.sort
    kept = [row for row in rows if all(_has(row, word, chosen.shown.columns) for word in words)]
    known = [row for row in kept if row[key] not in (None, "")]
    known.sort(
        key=lambda row: row[key] if isinstance(row[key], int | float) else str(row[key]), reverse=chosen.now.descends
    )
    return known + [row for row in kept if row[key] in (None, "")]


def _has(row: Row, word: str, columns: Sequence[Column]) -> bool:
    title, colon, part = word.partition(":")
    for column in columns:
        if colon and column.title.lower().startswith(title):
            return part in _text(column, row).lower()
    return any(word in _text(column, row).lower() for column in columns)


def fit(columns: Sequence[Column], width: int, rows: Sequence[Row]) -> list[tuple[Column, int]]:
    """The columns that fit, by priority, and their widths; texts get their full width if possible."""
    wanted = {column.key: _wanted(column, rows) for column in columns}
    left, kept = width, set[str]()
    for column in sorted(columns, key=lambda column: -column.worth):
        if column.width <= left:
            kept.add(column.key)
            left -= column.width
    found = []
    for column in columns:
        if column.key in kept:
            more = min(left, max(0, wanted[column.key] - column.width))
            left -= more
            found.append((column, column.width + more))
    return found


def _wanted(column: Column, rows: Sequence[Row]) -> int:
    return 2 + max((len(_text(column, row)) for row in rows), default=0) if column.is_text else column.width


def _titles(columns: Sequence[tuple[Column, int]], chosen: Chosen) -> str:
    cells = []
    for column, width in columns:
        mark = MARKS[chosen.now.descends] if column.key == chosen.now.sort else ""
        cells.append(_cell(column.title + mark, width, column))
    return "".join(cells)


def _row(columns: Sequence[tuple[Column, int]], row: Row) -> str:
    return "".join(_cell(_text(column, row), width, column) for column, width in columns)


def _text(column: Column, row: Row) -> str:
    value = row[column.key]
    if column.show is not None:
        return column.show(value)
    return str(value or "") if column.is_text else number(value)


def _cell(text: str, width: int, column: Column) -> str:
    text = printable(text)
    text = text if len(text) < width else text[: width - 2] + "…"
    return f"{text:<{width}}" if column.is_text else f"{text:>{width - 1}} "


def _style(row: Row) -> str:
    said = str(row.get("status") or row.get("level") or "")
    return "bad" if said.startswith(BAD) else "warn" if said.startswith(WARN) else ""


def _footer(chosen: Chosen, count: int, room: int, hidden: int) -> str:
    top = chosen.now.top
    parts = [f"{top + 1} to {min(count, top + room)} of {count}"] if count > room else []
    parts += [f"{hidden} columns more in a wider window"] if hidden else []
    return "   ".join([*parts, "? help   q leaves   / filter   ←→ sort   r order   p hold"])


def _cut(lines: Sequence[Line], columns: int, rows: int) -> list[Line]:
    return [(printable(text[:columns]), style) for text, style in lines[:rows]]
