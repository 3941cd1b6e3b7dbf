"""The text of `baton trace`; pure."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cli.trace.parts import Bar, Entry, longest, parts_of
from common.log import printable

NAME = 12  # columns of a bar's name
TIMES = 27  # columns of a span's start, length and share
FEWEST_BAR, MOST_BAR = 16, 60
FEWEST_NOTE = 14  # columns; with less space notes go below
TICKS = 4  # marks on the axis after its origin
LISTS = ("waiting", "running", "slowest", "latest")
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


def waterfall(request: Entry, columns: int, *, styled: bool = False) -> list[str]:
    """The lines of one request, none longer than `columns`; `styled`: the longest part in bold."""
    total = max(request["total_ms"] or 0.0, 0.001)
    parts = parts_of(request)
    bars = [bar for part in parts for bar in part.bars]
    slow, late = longest(bars), longest(bars, request["ttft_ms"]) if request["ttft_ms"] is not None else None
    width = max(FEWEST_BAR, min(MOST_BAR, columns - NAME - TIMES - 32))
    lines = [*_head(request, total), "", *_axis(total, width)]
    for part in parts:
        lines += [part.title] if part.title else []
        for bar in part.bars:
            mark = "◀ longest" if bar is slow else "◀ longest to the first token" if bar is late else ""
            drawn = list(_lines(bar, mark, total, width, columns))
            drawn = [_fitted(line, columns) for line in drawn]
            lines += [f"{BOLD}{line}{PLAIN}" for line in drawn] if styled and bar is slow else drawn
    return [
        *(line if line.startswith(BOLD) else _fitted(line, columns) for line in lines),
        *_sums(bars, total, columns),
    ]


def _head(request: Entry, total: float) -> list[str]:
    cached = f", {request['cached_tokens']} of them cached" if request["cached_tokens"] else ""
    first = "no token" if request["ttft_ms"] is None else f"first token {request['ttft_ms']:.1f} ms"
    drafted = request.get("drafted_tokens")  # a gateway of an older release says nothing of it
    drafts = f", {request['accepted_tokens']} of {drafted} drafted ones accepted" if drafted else ""
    tokens = f"{request['prompt_tokens']} prompt tokens{cached}, {request['completion_tokens']} generated{drafts}"
    lines = [
        f"{request['request_id']}   {request['status']}" + (f" ({request['detail']})" if request["detail"] else ""),
        f"{tokens}, {first}, {total:.1f} ms in all",
    ]
    return [*lines, f"trace {request['trace_id']}"] if request["trace_id"] else lines


def _axis(total: float, width: int) -> list[str]:
    """The header with time marks."""
    row, marks = [" "] * (width + 8), [" "] * width
    for instant in _instants(total):
        at = _column(instant, total, width)
        said = f"{instant:g}"
        row[at : at + len(said)] = said
        marks[at] = "╷"
    head = f"{'part':<{NAME}}{'from ms':>9}{'took ms':>10}{'share':>8}  "
    return [head + "".join(row).rstrip(), " " * len(head) + "".join(marks).rstrip()]


def _instants(total: float) -> list[float]:
    """0 and round numbers up to `total`."""
    rough = total / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [round(step * index, 9) for index in range(int(total / step) + 1)]


def _column(at: float, total: float, width: int) -> int:
    return min(width - 1, max(0, int(width * at / total)))


def _lines(bar: Bar, mark: str, total: float, width: int, columns: int) -> Iterator[str]:
    """A bar's row; the part of its note that doesn't fit goes below."""
    cells = [" "] * width
    if bar.ticks:
        for at in bar.ticks:
            cells[_column(at, total, width)] = "|"
    else:
        first, last = _column(bar.began, total, width), _column(bar.ended, total, width)
        cells[first : last + 1] = ("░" if bar.aside else "█") * (last + 1 - first)
    share = "" if bar.aside else f"{bar.took / total:.1%}"
    row = f"{bar.name:<{NAME}}{bar.began:>9.1f}{bar.took:>10.1f}{share:>8}  {''.join(cells)}  "
    note = "  ".join(part for part in (mark, printable(bar.note)) if part)
    room = columns - len(row)
    if room < FEWEST_NOTE:
        yield row
        yield from textwrap.wrap(note, max(1, columns - 4), initial_indent="    ", subsequent_indent="    ")
        return
    first_line, *more = textwrap.wrap(note, room) or [""]
    yield row + first_line
    yield from (" " * len(row) + line for line in more)


def _sums(bars: Sequence[Bar], total: float, columns: int) -> list[str]:
    """The time of each kind of part over all attempts, longest first."""
    spent: dict[str, float] = {}
    for bar in bars:
        if not bar.aside and bar.took > 0:
            spent[bar.name] = spent.get(bar.name, 0.0) + bar.took
    order = sorted(spent, key=lambda name: -spent[name])
    said = ", ".join(f"{name} {spent[name]:.1f} ms ({spent[name] / total:.0%})" for name in order)
    return ["", *textwrap.wrap(f"where it went: {said}", columns)] if said else []


def _fitted(line: str, columns: int) -> str:
    return printable(line[:columns]).rstrip()


# -- lists ---------------------------------------------------------------------------------------------------------


def listed(requests: Mapping[str, Sequence[Entry]]) -> list[str]:
    """The ids in the numbering of `table`, from 1."""
    return [str(entry["request_id"]) for title in LISTS for entry in requests.get(title, [])]


def table(requests: Mapping[str, Sequence[Entry]], columns: int) -> list[str]:
    """The lists of requests as numbered lines, none longer than `columns`."""
    lines, number = list[str](), 0
    for title in LISTS:
        entries = requests.get(title, [])  # older gateways have no such list
        lines.append(f"{title}:" + ("" if entries else " none"))
        if entries:
            lines.append(
                _cells("#", "at", "request", "status", "prompt", "cached", "tokens", "ttft ms", "total ms", "longest")
            )
        for entry in entries:
            number += 1
            lines.append(_entry(number, entry))
        lines.append("")
    return [_fitted(line, columns) for line in lines[:-1]]


def _entry(number: int, entry: Entry) -> str:
    phases = {name: value for name, value in (entry.get("phases_ms") or {}).items() if value}
    most = max(phases, key=lambda name: phases[name], default="")
    unix = entry.get("received_unix")
    return _cells(
        number,
        time.strftime("%H:%M:%S", time.localtime(unix)) if unix else "-",
        entry["request_id"],
        entry["status"],
        entry["prompt_tokens"],
        entry["cached_tokens"],
        entry["completion_tokens"],
        entry["ttft_ms"],
        entry["total_ms"],
        f"{most} {phases[most]:.1f} ms" if most else "",
    )


def _cells(*values: Any) -> str:
    texts = ["-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value) for value in values]
    number, at, name, status, *numbers, most = texts
    return f"{number:>4} {at:<9}{name:<46}{status:<10}" + "".join(f"{text:>9}" for text in numbers) + f"   {most}"
