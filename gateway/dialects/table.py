"""The table of dialects: path -> dialect, and so the form of keys and errors, and the name in traces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from gateway.answers.ask import Ask
from gateway.dialects.dialect import Dialect, Endpoint, View
from gateway.http.application import ByPath, told_path
from gateway.http.exchange import Way, fields_of, request_scope
from gateway.http.fields import NOT_GIVEN, parse_body
from gateway.http.problem import Problem, json_response, plain_error
from gateway.tenants.tenants import BEARER, KeyForm, is_open


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An endpoint with its dialect. `ignores_unknown`: unknown fields are dropped instead of refused."""

    dialect: Dialect
    path: str  # as in metrics and traces
    endpoint: Endpoint[Any]
    ignores_unknown: bool = False

    def read(
        self, raw: bytes, given: Mapping[str, str] = NOT_GIVEN, headers: Mapping[str, str] = NOT_GIVEN
    ) -> tuple[Any, Ask]:
        """Parse a request's fields, with those `given` by its path, into an ask. Raises InvalidRequestError."""
        body = self.parse(self.unpacked(raw, headers), given)
        return body, self.endpoint.ask(body)

    def unpacked(self, raw: bytes, headers: Mapping[str, str]) -> bytes:
        return raw if self.dialect.unpack is None else self.dialect.unpack(raw, headers)

    def parse(self, raw: bytes, given: Mapping[str, str] = NOT_GIVEN) -> Any:
        """Raises InvalidRequestError."""
        return parse_body(raw, self.endpoint.body, given=given, ignores_unknown=self.ignores_unknown)


class DialectTable:
    """The dialects of a gateway."""

    def __init__(
        self,
        dialects: Sequence[Dialect],
        *,
        ignores_unknown: bool = False,
        traced: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`traced`: operations of other paths whose requests have spans.

        Raises ValueError if two dialects share a path, unless it is a GET that headers tell apart."""
        self.dialects = tuple(dialects)
        self.ignores_unknown = ignores_unknown
        self.entries: dict[str, Entry] = {}
        self.views: dict[str, dict[Dialect, View]] = {}
        self._open = {path for dialect in dialects for path in dialect.paths.open_paths}
        _check(dialects)
        for dialect in dialects:
            for path, view in dialect.paths.views.items():
                self.views.setdefault(path, {})[dialect] = view
            for path, endpoint in dialect.paths.endpoints.items():
                self.entries[path] = Entry(
                    dialect=dialect, path=told_path(path), endpoint=endpoint, ignores_unknown=ignores_unknown
                )
        generating = {path: (entry.path, entry.endpoint.operation) for path, entry in self.entries.items()}
        self._traced = ByPath(generating | {path: (path, operation) for path, operation in traced.items()})
        self._owners = ByPath(_grouped([(path, one) for one in dialects for path in one.paths.answered]))
        below = [
            (path.partition("/{")[0], one) for one in dialects for path in (*one.paths.answered, *one.paths.prefixes)
        ]
        self._owners_below = _grouped([(root, one) for root, one in below if root != "/"])  # every path is below it

    @property
    def batchable(self) -> Mapping[str, Entry]:
        """Paths allowed in a batch line."""
        return {path: entry for path, entry in self.entries.items() if entry.endpoint.is_batchable and "{" not in path}

    def owners(self, path: str) -> tuple[Dialect, ...]:
        """The dialects of a path; none for the gateway's own paths."""
        found = self._owners.find(path)
        if found is not None:
            return found[0]
        while path and path not in self._owners_below:
            path = path.rpartition("/")[0]
        return self._owners_below.get(path, ())

    def owner(self, scope: Scope) -> Dialect | None:
        """The dialect of a request."""
        owners = self.owners(scope["path"])
        return recognised(owners, fields_of(scope)) if owners else None

    def key_form(self, scope: Scope) -> KeyForm:
        """The form of a request's key."""
        owner = self.owner(scope)
        return owner.key if owner is not None else BEARER

    def is_open(self, method: str, path: str) -> bool:
        """True if no key is needed."""
        return method in ("GET", "HEAD") and (is_open(path) or path in self._open)

    @property
    def id_headers(self) -> list[str]:
        return [dialect.id_header for dialect in self.dialects if dialect.id_header]

    def id_header(self, scope: Scope) -> str:
        """The header for the request's id, in addition to x-request-id; "" for none."""
        owner = self.owner(scope)
        return owner.id_header if owner is not None else ""

    def refusal(self, scope: Scope, problem: Problem) -> Response:
        """An error in the form of the request's dialect."""
        owner, state = self.owner(scope), request_scope(scope)
        if owner is None:
            return plain_error(problem)
        state.problem = problem.status
        status, body = owner.error(problem, state.request_id)
        return json_response(body, status=status, headers=problem.headers)

    def way(self, scope: Scope) -> Way | None:
        """The names for the span of a request; None if its path is not traced."""
        found = self._traced.find(scope["path"]) if scope["method"] == "POST" else None
        if found is None:
            return None
        path, operation = found[0]
        told = {
            "http.request.method": "POST",
            "http.route": path,
            "url.path": scope["path"],
            "url.scheme": "http",
        }
        return Way(
            name=f"POST {path}",
            operation=operation,
            attributes=told,
            status="http.response.status_code",
        )


def recognised(dialects: Sequence[Dialect], headers: Mapping[str, str]) -> Dialect:
    """The first dialect that recognises the headers, else the one without such a test."""
    if len(dialects) == 1:
        return dialects[0]
    by_headers = (one for one in dialects if one.recognises is not None and one.recognises(headers))
    return next(by_headers, None) or next((one for one in dialects if one.recognises is None), dialects[0])


def _grouped(owned: Iterable[tuple[str, Dialect]]) -> dict[str, tuple[Dialect, ...]]:
    found: dict[str, tuple[Dialect, ...]] = {}
    for path, dialect in dict.fromkeys(owned):
        found[path] = (*found.get(path, ()), dialect)
    return found


def _check(dialects: Sequence[Dialect]) -> None:
    """Raises ValueError."""
    known: dict[tuple[str, str], Dialect] = {}
    written: dict[str, str] = {}
    for dialect in dialects:
        claims = [("POST", path) for path in (*dialect.paths.endpoints, *dialect.paths.calls)]
        claims += [("DELETE", path) for path in dialect.paths.deletes]
        claims += [("GET", path) for path in dialect.paths.views if dialect.recognises is None]
        for claim in claims:
            if claim in known:
                raise ValueError(f"{claim[1]}: claimed by both {known[claim].name} and {dialect.name}")
            known[claim] = dialect
        for path in dialect.paths.answered:
            first = written.setdefault(re.sub(r"\{\w+", "{", path), path)
            if first != path:
                raise ValueError(f"{path} of {dialect.name} is another's {first}: name the parameters the same")
