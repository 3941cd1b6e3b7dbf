"""Answers as families of models write them, and the messages that they are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.parsing.parsed import Parsed
from gateway.parsing.parser import Parser
from gateway.parsing.terminals import Bound, PlainTokens

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"$ref": "#/$defs/place"},
            "unit": {"enum": ["C", "F"]},
            "note": {"type": ["string", "null"]},
        },
        "$defs": {"place": {"anyOf": [{"type": "object"}, {"type": "null"}]}},
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass
class Said:
    """A message: content, reasoning, and calls with decoded arguments."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


def pieces_of(text: str, vocabulary: dict[str, int]) -> list[str | int]:
    """A text as a model's tokens: ids where the vocabulary has one, characters between."""
    if not vocabulary:
        return list(text)
    marks = "|".join(re.escape(mark) for mark in sorted(vocabulary, key=len, reverse=True))
    found: list[str | int] = []
    for part in re.split(f"({marks})", text):
        found += [vocabulary[part]] if part in vocabulary else list(part)
    return found


def parse(
    format_: Bound,
    text: str,
    vocabulary: dict[str, int],
    *,
    cuts: Sequence[int] | None = None,
    prompt: str = "",
    tools: bool = True,
    parallel: bool = True,
    is_whole: bool = True,
    plainly: bool = False,
) -> Parsed:
    """The message, from pieces as long as `cuts` say, again and again; None: all at once.

    `plainly`: where a piece is plain, the parser doesn't see it.
    """
    texts = {index: mark for mark, index in vocabulary.items()}
    parser = Parser(format_, SCHEMAS if tools else None, parallel=parallel)

    def feed(pieces: list[str | int], sizes: Sequence[int]) -> Parsed:
        said, run, turn = Parsed(), "", 0
        for piece in [*pieces, None]:
            size = sizes[turn % len(sizes)]
            if run and (not isinstance(piece, str) or len(run) >= size):
                ends = parser.plainly if plainly else None
                if ends is not None and PlainTokens(lambda _, run=run: run.encode(), ends)[0]:  # type: ignore[misc]
                    said.add(Parsed(reasoning=run) if parser.is_reasoning else Parsed(content=run))
                else:
                    parser.text(run)
                    said.add(parser.take())
                run, turn = "", turn + 1
            if isinstance(piece, int):
                parser.token(piece, texts[piece], is_shown=False)
                said.add(parser.take())
            elif piece is not None:
                run += piece
        return said

    if prompt:
        parser.read_prompt()
        feed(pieces_of(prompt, vocabulary), [1])
        parser.resume()
    said = feed(pieces_of(text, vocabulary), cuts or [1 << 30])
    parser.finish(is_whole=is_whole)
    said.add(parser.take())
    return said


def said_of(parsed: Parsed) -> Said:
    assert [call.index for call in parsed.calls] == list(range(len(parsed.calls)))
    assert all(call.id and call.name for call in parsed.calls)
    calls = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
    return Said(parsed.content, parsed.reasoning, calls)
