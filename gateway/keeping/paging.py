"""Pagination in the form of OpenAI's lists. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from common.errors import InvalidRequestError
from gateway.http.problem import NotKeptError

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The requested page."""

    after: str
    limit: int
    newest_first: bool

    def of(self, entries: Sequence[Entry], id_of: Callable[[Entry], str]) -> tuple[list[Entry], bool]:
        """Entries of a list ordered oldest first, and whether more follow. Raises NotKeptError for an unknown `after`."""
        ordered = list(reversed(entries)) if self.newest_first else list(entries)
        if self.after:
            places = [place for place, entry in enumerate(ordered) if id_of(entry) == self.after]
            if not places:
                raise NotKeptError(f"after: nothing has the id {self.after[:100]!r}", param="after")
            ordered = ordered[places[0] + 1 :]
        return ordered[: self.limit], len(ordered) > self.limit


def page_asked(
    query: Mapping[str, str], *, default: int, most: int, others: Collection[str] = (), has_order: bool = True
) -> Page:
    """The page in a query, which may have `others` as well. Raises InvalidRequestError."""
    check_query(query, {"after", "limit", *others, *(("order",) if has_order else ())})
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order: must be asc or desc", param="order")
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= most):
        raise InvalidRequestError(f"limit: must be 1 to {most}", param="limit")
    return Page(after=query.get("after", ""), limit=int(text), newest_first=order == "desc")


def check_query(query: Mapping[str, str], known: Collection[str]) -> None:
    """Check a query. Raises InvalidRequestError for an unknown parameter."""
    for name in query:
        if name not in known:
            raise InvalidRequestError(f"unknown parameter {name[:100]!r}: remove it", param=name[:100])


def listed(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """The object of a page."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}
