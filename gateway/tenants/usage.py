"""Usage of each key by the hour: this gateway's counts, and sums over all gateways' records. No I/O."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

HOUR_S = 3_600
DAY_S = 86_400
KEEP_DAYS = 35
MAX_HOURS = 24 * 31  # maximum of a query
MAX_KEYS_A_DAY = 500  # counted individually at a gateway
OTHERS = ("(others)", "(others)")
COUNTS = ("requests", "errors", "prompt_tokens", "cached_tokens", "completion_tokens")

Counts = list[int]  # as COUNTS


class Used(msgspec.Struct, frozen=True, array_like=True):
    """A key's counts in one hour of the day, 0 to 23."""

    hour: int
    key: str
    tenant: str
    counts: Counts


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Usage at one gateway on one day since 1970."""

    v: int = 1
    day: int
    used: list[Used] = []


usage_decoder = msgspec.msgpack.Decoder(UsageRecord)


class Usage:
    """Counts of requests that ended here today and yesterday."""

    def __init__(self) -> None:
        self._days: dict[int, dict[tuple[int, str, str], Counts]] = {}
        self._names: dict[int, set[tuple[str, str]]] = {}  # counted individually on these days
        self._changed: set[int] = set()

    def add(self, key: str, tenant: str, counts: Counts, *, now: float) -> None:
        day, hour = int(now) // DAY_S, int(now) % DAY_S // HOUR_S
        if day not in self._days:
            self._days[day], self._names[day] = {}, set()
            for old in [one for one in self._days if one < day - 1 and one not in self._changed]:
                del self._days[old], self._names[old]
        names, name = self._names[day], (key, tenant)
        if name not in names and len(names) >= MAX_KEYS_A_DAY:
            name = OTHERS
        else:
            names.add(name)
        into = self._days[day].setdefault((hour, *name), [0] * len(COUNTS))
        for index, count in enumerate(counts):
            into[index] += count
        self._changed.add(day)

    def records(self) -> list[UsageRecord]:
        """All records known here."""
        return [self._record(day) for day in sorted(self._days)]

    def take_changed(self) -> list[UsageRecord]:
        """Take the changed records, to be written. Return failed ones by `again`."""
        changed, self._changed = sorted(self._changed), set()
        return [self._record(day) for day in changed]

    def again(self, record: UsageRecord) -> None:
        self._changed.add(record.day)

    def _record(self, day: int) -> UsageRecord:
        used = [Used(hour, key, tenant, list(counts)) for (hour, key, tenant), counts in self._days[day].items()]
        return UsageRecord(day=day, used=used)


def usage_json(records: Iterable[UsageRecord], *, hours: int, now: float | None = None) -> dict[str, Any]:
    """Series by key of the last `hours`, oldest first: hourly, and daily beyond three days."""
    now = time.time() if now is None else now
    step = HOUR_S if hours <= 72 else DAY_S
    number = -(-hours * HOUR_S // step)
    first = (int(now) // step - number + 1) * step
    keys: dict[tuple[str, str], dict[str, list[int]]] = {}
    for record in records:
        for used in record.used:
            place = (record.day * DAY_S + used.hour * HOUR_S - first) // step
            if not 0 <= place < number or len(used.counts) < len(COUNTS):
                continue
            series = keys.setdefault((used.key, used.tenant), {name: [0] * number for name in COUNTS})
            for name, count in zip(COUNTS, used.counts, strict=False):
                series[name][place] += count
    found = [{"key": key, "tenant": tenant, **series} for (key, tenant), series in sorted(keys.items())]
    return {"from_unix": first, "step_s": step, "keys": found}
