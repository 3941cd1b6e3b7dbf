"""Which dialect a path belongs to, and with it the form of keys and errors, and the name in traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from gateway.answers.ask import Ask
from gateway.dialects.dialect import Dialect, Endpoint
from gateway.http.fields import parse_body
from gateway.http.keys import BEARER, KeyForm
from gateway.http.problem import Problem
from gateway.http.responses import json_response, plain_error
from gateway.tenants.tenants import is_under


@dataclass(frozen=True, slots=True)
class Entry:
    """An endpoint with its dialect. `ignores_unknown`: fields that nobody knows are left out instead of refused."""

    dialect: Dialect
    endpoint: Endpoint[Any]
    ignores_unknown: bool = False

    def read(self, raw: bytes) -> tuple[Any, Ask]:
        """A request's fields, and what it asks for. Raises InvalidRequestError."""
        body = parse_body(raw, self.endpoint.body, ignores_unknown=self.ignores_unknown)
        return body, self.endpoint.ask(body)


class DialectTable:
    """The dialects of a gateway. A dialect also owns the paths below its own."""

    def __init__(self, dialects: Sequence[Dialect], *, ignores_unknown: bool = False) -> None:
        self.dialects = tuple(dialects)
        self.entries: dict[str, Entry] = {}
        self._roots: dict[str, Dialect] = {}
        for dialect in dialects:
            for path in (*dialect.endpoints, *dialect.views):
                root = path.partition("/{")[0]
                known = self._roots.setdefault(root, dialect)
                if known is not dialect or path in self.entries:
                    raise ValueError(f"{path}: claimed by both {known.name} and {dialect.name}")
            self.entries |= {
                path: Entry(dialect, endpoint, ignores_unknown) for path, endpoint in dialect.endpoints.items()
            }

    @property
    def batchable(self) -> Mapping[str, Entry]:
        """The paths that a batch line may have."""
        return {path: entry for path, entry in self.entries.items() if entry.endpoint.is_batchable}

    def owner(self, path: str) -> Dialect | None:
        """The dialect that a path belongs to; None for the gateway's own paths."""
        found = self._roots.get(path)
        if found is not None:
            return found
        return next((dialect for root, dialect in self._roots.items() if is_under(path, (root,))), None)

    def key_form(self, path: str) -> KeyForm:
        """How clients of a path send their key."""
        owner = self.owner(path)
        return owner.key if owner is not None else BEARER

    def refusal(self, path: str, problem: Problem) -> Response:
        """An error as the path's dialect writes it."""
        owner = self.owner(path)
        if owner is None:
            return plain_error(problem)
        status, body = owner.error(problem)
        return json_response(body, status=status, headers=problem.headers)

    def operation(self, path: str) -> str:
        """The operation in a path's traces; "" for paths that don't generate."""
        entry = self.entries.get(path)
        return entry.endpoint.operation if entry is not None else ""
