"""The grammar of a message: the client's for content, the tools', and the thinking budget, combined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from common.errors import InvalidRequestError
from gateway.grammars.maker import GrammarMaker
from gateway.grammars.wanted import Wanted, of_text
from gateway.parsing.format import Format
from gateway.parsing.grammar import CallShape, Shape, message_grammar, with_body
from gateway.parsing.terminals import Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageWish:
    """Requirements of an answer. `calls` are the callable functions, if enforced."""

    calls: Sequence[CallShape] = ()
    must_call: bool = False
    is_single: bool = False
    body: Wanted | None = None  # grammar of the content
    budget: int | None = None  # tokens of reasoning
    is_reasoning: bool = False  # the prompt opened a block of reasoning
    has_reasoned: bool = False  # that, or the prompt closed one
    may_think: bool = True  # the answer may open one itself


async def grammar_of_message(
    wish: MessageWish,
    bound: Bound,
    maker: GrammarMaker,
    *,
    tenant: str,
    eos_ids: Sequence[int],
    encode: Callable[[str], list[int]],
) -> Wanted | None:
    """Combine the grammars; None: no restriction. Raises InvalidRequestError, and as `GrammarMaker.make`."""
    format_, shape = bound.format, _shape(wish, bound.format)
    # If the prompt opened the reasoning, the grammar starts after it.
    after = encode(format_.closes_reasoning) if wish.is_reasoning else None
    budget = wish.budget if wish.is_reasoning else None
    if wish.body is not None and not (shape.calls or shape.thinks or shape.has_thought or format_.is_in_parts):
        return replace(wish.body, after=after, budget=budget)
    write = partial(message_grammar, bound, shape, eos_ids)
    try:
        text = await asyncio.to_thread(write) if shape.calls else write()  # schemas may be large
    except (ValueError, RecursionError) as error:
        why = "is too deep" if isinstance(error, RecursionError) else error
        raise InvalidRequestError(f"{_field(wish)}: {why}", param=_field(wish)) from None
    if wish.body is not None:
        made = await maker.make(wish.body, tenant)
        return of_text(wish.body.field, with_body(text, made.text), after=after, budget=budget)
    if wish.must_call and not text:
        raise InvalidRequestError(
            "tool_choice: how this model writes calls isn't known, so none can be required: see --tool-call-parser",
            param="tool_choice",
        )
    return of_text(_field(wish), text, after=after, budget=budget) if text or budget is not None else None


def _shape(wish: MessageWish, format_: Format) -> Shape:
    # Where text is free, no mask would forbid reasoning.
    may_think = wish.may_think or not (wish.must_call or wish.body is not None)
    return Shape(
        calls=wish.calls,
        must_call=wish.must_call,
        is_single=wish.is_single,
        has_body=wish.body is not None,
        thinks=bool(format_.opens_reasoning) and may_think and not wish.has_reasoned,
        has_thought=wish.is_reasoning,
        budget=None if wish.has_reasoned else wish.budget,
    )


def _field(wish: MessageWish) -> str:
    """The client's field of a faulty grammar."""
    if wish.must_call:
        return "tool_choice"
    return "tools" if wish.calls else "thinking_token_budget"
